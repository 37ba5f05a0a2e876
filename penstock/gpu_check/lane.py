"""A version's way from the trainer's device to the host, and from there into a model."""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from penstock.gpu_check.figures import Figure, Machine, gigabytes_per_s
from penstock.gpu_check.models import random_model
from penstock.infra.backends.torch_backend import TorchBackend
from penstock.infra.engines.transformers.engine import TransformersEngine
from penstock.infra.tensors.host_memory import HostBuffers
from penstock.infra.tensors.stream import TensorBytes, digest
from penstock.infra.tensors.torch_copy import copy_all, from_bytes, seen_bytes

ROUNDS = 5
OF_PINNED = 0.7
"""Least share of the rate of one copy of page-locked memory."""
STALL_S, PAUSE_S = 0.05, 0.02
TICK_S = 0.001


def out(here: Machine) -> Iterator[Figure]:
    """A copy of the weights as the trainer starts and reads it, into memory that the machine's workers can map."""
    path = random_model(here.folder, shape="1.5B" if here.on_gpu else "tiny", device=here.device)
    backend = TorchBackend(model_path=str(path), lr=1e-6, dtype="bfloat16", device=here.device.type, share_weights=True)
    size = sum(parameter.nbytes for parameter in backend.parameters)
    started = time.perf_counter()
    first = backend.weights()
    first[0]
    yield Figure(name="first copy", value=time.perf_counter() - started, unit="s")
    held = backend.weights()  # the version before, with which a delta is compared
    held[0]
    del first
    stalls, seconds = [], []
    with Pauses() as pauses:
        for _ in range(ROUNDS):
            here.synchronize()
            started = time.perf_counter()
            tensors = backend.weights()
            stalls.append(time.perf_counter() - started)
            tensors[0]
            seconds.append(time.perf_counter() - started)
            held = tensors
    rate = pinned_rate(here, size, out=True)
    yield gigabytes_per_s(name="rate", value=size / statistics.median(seconds) / 1e9, at_least=here.limit(OF_PINNED * rate))
    yield gigabytes_per_s(name="of one copy", value=rate)
    yield Figure(name="stall of the training thread", value=1e3 * max(stalls), unit="ms", at_most=here.limit(1e3 * STALL_S))
    yield Figure(name="longest pause of another thread", value=1e3 * pauses.longest_s, unit="ms", at_most=here.limit(1e3 * PAUSE_S))
    parameters = dict(backend.model.named_parameters())
    differ = sum(not torch.equal(from_bytes(tensor), parameters[tensor.name].cpu()) for tensor in held)
    yield Figure(name="tensors that differ", value=differ, at_most=0)


def in_(here: Machine) -> Iterator[Figure]:
    """A version in shared memory into the engine of transformers, and into a module that fuses projections."""
    path = random_model(here.folder, shape="1.5B" if here.on_gpu else "tiny", device=here.device)
    engine = TransformersEngine(path, dtype="bfloat16", device=here.device.type)
    parameters = dict(engine._model.named_parameters())
    generator = torch.Generator(here.device).manual_seed(1)
    for parameter in parameters.values():
        parameter.normal_(generator=generator)
    buffers = HostBuffers(shared=True)
    source = [seen_bytes(name, parameter) for name, parameter in parameters.items()]
    tensors, expected = buffers.copy(source), digest(source)
    size = sum(tensor.nbytes for tensor in tensors)
    for parameter in parameters.values():
        parameter.zero_()
    started = time.perf_counter()
    engine.load_weights(1, tensors)
    yield Figure(name="first load", value=time.perf_counter() - started, unit="s")
    rate = pinned_rate(here, size, out=False)
    with Pauses() as pauses:
        seconds = here.seconds(lambda: engine.load_weights(1, tensors), repeats=ROUNDS)
    yield gigabytes_per_s(name="into transformers", value=size / seconds / 1e9, at_least=here.limit(OF_PINNED * rate))
    yield gigabytes_per_s(name="of one copy", value=rate)
    yield Figure(name="longest pause of another thread", value=1e3 * pauses.longest_s, unit="ms", at_most=here.limit(1e3 * PAUSE_S))
    actual = digest([seen_bytes(name, parameter) for name, parameter in parameters.items()])
    yield Figure(name="digests that differ", value=actual != expected, at_most=0)
    fused = _fused(tensors, here.device)
    seconds = here.seconds(lambda: copy_all(fused), repeats=ROUNDS)
    yield gigabytes_per_s(name="into fused projections", value=size / seconds / 1e9, at_least=here.limit(OF_PINNED * rate))
    differ = sum(not torch.equal(from_bytes(tensor), part.cpu()) for part, tensor in fused)
    yield Figure(name="tensors that differ", value=differ, at_most=0)


def _fused(tensors: list[TensorBytes], device: torch.device) -> list[tuple[torch.Tensor, TensorBytes]]:
    """A part of a tensor on the device for each tensor; q, k and v, and gate and up, are parts of one."""
    groups: dict[str, list[TensorBytes]] = {}
    for tensor in tensors:
        name = tensor.name
        for part, whole in (("q_proj", "qkv"), ("k_proj", "qkv"), ("v_proj", "qkv"), ("gate_proj", "gate_up"), ("up_proj", "gate_up")):
            name = name.replace(part, whole)
        groups.setdefault(name, []).append(tensor)
    pairs = []
    for parts in groups.values():
        rows = [part.shape[0] for part in parts]
        whole_tensor = torch.zeros(sum(rows), *parts[0].shape[1:], dtype=torch.bfloat16, device=device)
        pairs += list(zip(whole_tensor.split(rows), parts, strict=True))
    return pairs


def pinned_rate(here: Machine, size: int, *, out: bool) -> float:
    """Bytes per second, in GB, of one copy between the device and page-locked memory."""
    device = torch.empty(size, dtype=torch.uint8, device=here.device)
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=here.on_gpu)
    target, source = (host, device) if out else (device, host)
    return size / here.seconds(partial(target.copy_, source, non_blocking=True)) / 1e9


class Pauses:
    """The longest time during which another thread of this process did not run."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.longest_s, self._clock = 0.0, clock
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def _tick(self) -> None:
        before = self._clock()
        while not self._ended.is_set():
            time.sleep(TICK_S)
            now = self._clock()
            self.longest_s = max(self.longest_s, now - before - TICK_S)
            before = now

    def __enter__(self) -> "Pauses":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
