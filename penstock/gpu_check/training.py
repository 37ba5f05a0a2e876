"""A trainer's step, its checkpoint, and its sleep between two steps."""

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.gpu_check.figures import Figure, Machine, gigabytes_per_s
from penstock.gpu_check.models import random_model, samples
from penstock.infra.backends.base import Backend, TokenBatch
from penstock.infra.backends.registry import open_backend
from penstock.infra.backends.torch_backend import TorchBackend
from penstock.infra.errors import BackendError
from penstock.infra.tensors.stream import digest
from penstock.pipeline.algorithms.losses import batch_loss
from penstock.pipeline.learner.micro_batches import MicroBatcher, distinct_tokens, pack

BACKENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "torch": ("torch", {}),
    "ZeRO-2": ("deepspeed", {"zero_stage": 2}),
    "ZeRO-3": ("deepspeed", {"zero_stage": 3}),
}
ALLOCATE = "import sys, torch; torch.ones(int(sys.argv[1]) // 4, device=sys.argv[2]); print('done')"
"""A program that fills memory of a device."""


def step(here: Machine) -> Iterator[Figure]:
    """Two steps of one full micro-batch each by every backend: model FLOPs utilisation, peak memory, loss and gradient norm."""
    shape = "1.5B" if here.on_gpu else "tiny"
    path = random_model(here.folder, shape=shape, device=here.device)
    installed = importlib.util.find_spec("deepspeed") is not None
    if not installed:
        yield Figure(name="DEEPSPEED IS NOT INSTALLED, steps of ZeRO-2 and ZeRO-3 taken", value=0)
    expected: list[tuple[float, float]] = []
    for name, (kind, own) in BACKENDS.items() if installed else [("torch", BACKENDS["torch"])]:
        for checkpointing in (False, True):
            label = f"{name} with checkpointing" if checkpointing else name
            tokens = (16384 if checkpointing else 8192) if here.on_gpu else 512
            batch = full_batch(tokens, vocabulary=500 if shape == "tiny" else 150_000)
            backend = opened(path, here, kind, gradient_checkpointing=checkpointing, **own)
            if here.on_gpu:
                torch.cuda.reset_peak_memory_stats(here.device)
            taken = [timed_step(backend, batch, here) for _ in range(3)]
            computed, seconds, measures = taken[-1][2], min(seconds for *_, seconds, _ in taken[1:]), taken[-1][4]
            yield Figure(name=f"{label}: computed tokens", value=computed, at_least=here.limit(0.9 * tokens), at_most=tokens)
            yield Figure(name="seconds", value=seconds, unit="s")
            if "peak_flops" in measures:
                yield Figure(name="MFU", value=measures["model_flops"] / seconds / measures["peak_flops"], at_least=0.30)
            if here.on_gpu:
                yield Figure(name="peak memory", value=torch.cuda.max_memory_allocated(here.device) / 1e9, unit="GB")
            results = [(loss, norm) for loss, norm, *_ in taken]
            expected = results if name == "torch" else expected
            if name != "torch" and checkpointing:
                yield Figure(name="losses and norms apart from torch's", value=apart(results, expected), at_most=1e-3)
            backend.close()
            del backend
            if here.on_gpu:
                torch.cuda.empty_cache()


def saved(here: Machine) -> Iterator[Figure]:
    """A checkpoint, and the same step after it and after loading it: equal bits if all operations are deterministic, else close ones."""
    path = random_model(here.folder, shape="0.5B" if here.on_gpu else "tiny", device=here.device)
    batch = full_batch(4096 if here.on_gpu else 512, vocabulary=500)
    for deterministic in ("strict", "warn"):
        backend = opened(path, here, "torch", deterministic=deterministic)
        try:
            timed_step(backend, batch, here)
            break
        except BackendError as refused:
            yield Figure(name=f"STRICT IS REFUSED ({refused})", value=0)
            backend.close()
    folder = here.folder / "checkpoint"
    started = time.perf_counter()
    backend.save(folder)
    written, size = time.perf_counter() - started, sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    yield gigabytes_per_s(name="checkpoint written", value=size / written / 1e9)
    through = timed_step(backend, batch, here)[:2], digest(backend.weights())
    started = time.perf_counter()
    backend.load(folder)
    here.synchronize()
    yield gigabytes_per_s(name="and loaded", value=size / (time.perf_counter() - started) / 1e9)
    again = timed_step(backend, batch, here)[:2], digest(backend.weights())
    gap = apart([again[0]], [through[0]])
    yield Figure(name=f"loss and norm after loading differ ({deterministic})", value=gap, at_most=0 if deterministic == "strict" else 1e-6)
    if deterministic == "strict":
        yield Figure(name="weights after it are equal", value=float(again[1] == through[1]), at_least=1)


def turns(here: Machine) -> Iterator[Figure]:
    """A backend sleeps twice while another process allocates the device's memory, and wakes with the same bits."""
    path = random_model(here.folder, shape="1.5B" if here.on_gpu else "tiny", device=here.device)
    backend = opened(path, here, "torch", gradient_checkpointing=True)
    assert isinstance(backend, TorchBackend)
    timed_step(backend, full_batch(2048 if here.on_gpu else 512, vocabulary=500), here)
    size = sum(tensor.nbytes for tensor in backend.state())
    yield Figure(name="state", value=size / 1e9, unit="GB")
    for turn in ("first turn", "second turn"):
        before, started = checksum(backend), time.perf_counter()
        allocated = torch.cuda.memory_allocated(here.device) if here.on_gpu else 0
        backend.sleep()
        here.synchronize()
        asleep = time.perf_counter() - started
        if here.on_gpu:
            left = torch.cuda.memory_reserved(here.device)
            yield Figure(name=f"{turn}: memory that sleep frees", value=1 - left / allocated, at_least=0.95)
            free = torch.cuda.mem_get_info(here.device)[0]
            command = [sys.executable, "-c", ALLOCATE, str(int(0.9 * free)), str(here.device)]
            other = subprocess.run(command, capture_output=True, text=True, check=False)
            yield Figure(name="another process gets it", value=float(other.stdout.strip() == "done"), at_least=1)
        started = time.perf_counter()
        backend.wake()
        here.synchronize()
        awake = time.perf_counter() - started
        least = here.limit(20.0) if turn == "second turn" else None
        yield gigabytes_per_s(name=f"{turn}: sleep", value=size / asleep / 1e9, at_least=least)
        yield gigabytes_per_s(name="wake", value=size / awake / 1e9, at_least=least)
        yield Figure(name="bits are equal", value=float(checksum(backend) == before), at_least=1)


def opened(path: Path, here: Machine, kind: str, **own: Any) -> Backend:
    """A backend that trains in bfloat16."""
    return open_backend(kind, model_path=str(path), lr=1e-6, dtype="bfloat16", device=here.device.type, **own)


def full_batch(tokens: int, *, vocabulary: int) -> TokenBatch:
    """The first micro-batch of a usual step with that budget."""
    batcher = MicroBatcher(tokens, size=distinct_tokens)
    rows = samples(64, vocabulary=vocabulary, **({} if tokens > 1024 else {"prompt": 12, "mean": 12, "longest": 40}))
    return pack(next(batch for row in rows for batch in batcher.add(row)))


def timed_step(backend: Backend, batch: TokenBatch, here: Machine) -> tuple[float, float, float, float, dict[str, float]]:
    """Loss, gradient norm, computed tokens, seconds and measures of one step."""
    here.synchronize()
    started = time.perf_counter()
    stats = backend.backward(batch, lambda logprobs, *_: batch_loss(logprobs, batch))
    result = backend.step(denominator=float(batch.tokens))
    here.synchronize()
    seconds = time.perf_counter() - started
    return stats["loss_sum"] / batch.tokens, result.grad_norm, stats["computed_tokens"], seconds, result.measures


def apart(found: Sequence[tuple[float, float]], expected: Sequence[tuple[float, float]]) -> float:
    """Largest difference of losses, whose terms are about 1, and of norms, relative to them."""
    pairs = zip(found, expected, strict=True)
    return max(max(abs(loss - other), abs(norm - other_norm) / other_norm) for (loss, norm), (other, other_norm) in pairs)


def checksum(backend: TorchBackend) -> list[int]:
    """A sum over the bits of each tensor of a backend's state."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.stack(
        [tensor.detach().view(integers[tensor.element_size()]).sum(dtype=torch.int64) for tensor in backend.state()]
    ).tolist()
