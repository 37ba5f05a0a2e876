"""A trainer's step, its checkpoint, and its sleep between two steps."""

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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

CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "torch": ("torch", False, {}),
    "torch, compiled": ("torch", False, {"compile": True}),
    "torch with checkpointing": ("torch", True, {}),
    "torch with checkpointing, compiled": ("torch", True, {"compile": True}),
    "ZeRO-2 with checkpointing": ("deepspeed", True, {"zero_stage": 2}),
    "ZeRO-3 with checkpointing": ("deepspeed", True, {"zero_stage": 3}),
}
"""Name -> backend, gradient checkpointing, and settings."""
ALLOCATE = "import sys, torch; torch.ones(int(sys.argv[1]) // 4, device=sys.argv[2]); print('done')"
"""A program that fills memory of a device."""


def step(here: Machine) -> Iterator[Figure]:
    """Three steps of one full micro-batch by each backend: model FLOPs utilisation, peak memory, losses and gradient norms."""
    path = random_model(here.folder, shape="1.5B" if here.on_gpu else "tiny", device=here.device)
    cases = dict(CASES) if here.on_gpu else {name: case for name, case in CASES.items() if "compile" not in case[2]}  # it takes a minute
    if importlib.util.find_spec("deepspeed") is None:
        yield Figure(name="DEEPSPEED IS NOT INSTALLED, steps of ZeRO-2 and ZeRO-3 taken", value=0)
        cases = {name: case for name, case in cases.items() if case[0] == "torch"}
    expected: dict[bool, list[TimedStep]] = {}
    for name, (kind, checkpointing, own) in cases.items():
        tokens = (16384 if checkpointing else 8192) if here.on_gpu else 512
        batch = full_batch(tokens, vocabulary=150_000 if here.on_gpu else 500)
        backend = opened(path, here, kind, gradient_checkpointing=checkpointing, **own)
        if here.on_gpu:
            torch.cuda.reset_peak_memory_stats(here.device)
        steps = [timed_step(backend, batch, here) for _ in range(4)]
        fastest, measures = min(steps, key=lambda step: step.pass_s), steps[-1].measures
        computed, whole_s = fastest.computed_tokens, min(step.pass_s + step.update_s for step in steps)
        label = f"{name}, {backend.fingerprint()['forward']}: computed tokens"
        yield Figure(name=label, value=computed, at_least=here.limit(0.9 * tokens), at_most=tokens)
        yield Figure(name="forward and backward", value=fastest.pass_s, unit="s")
        yield Figure(name="update", value=min(step.update_s for step in steps), unit="s")
        if "peak_flops" in measures:
            mfu = measures["model_flops"] / measures["peak_flops"]
            yield Figure(name="MFU of forward and backward", value=mfu / fastest.pass_s, at_least=None if "ZeRO-3" in name else 0.30)
            yield Figure(name="of the step", value=mfu / whole_s)
        if here.on_gpu:
            yield Figure(name="peak memory", value=torch.cuda.max_memory_allocated(here.device) / 1e9, unit="GB")
        gap = apart(steps, expected.setdefault(checkpointing, steps))
        yield Figure(name="losses and norms apart from torch's", value=gap, at_most=1e-2 if "compile" in own else 2e-3)
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
    through, weights = timed_step(backend, batch, here), digest(backend.weights())
    started = time.perf_counter()
    backend.load(folder)
    here.synchronize()
    yield gigabytes_per_s(name="and loaded", value=size / (time.perf_counter() - started) / 1e9)
    gap = apart([timed_step(backend, batch, here)], [through])
    yield Figure(name=f"loss and norm after loading differ ({deterministic})", value=gap, at_most=0 if deterministic == "strict" else 1e-6)
    if deterministic == "strict":
        yield Figure(name="weights after it are equal", value=float(digest(backend.weights()) == weights), at_least=1)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """A step of one micro-batch."""

    loss: float
    norm: float
    computed_tokens: float
    pass_s: float
    update_s: float
    measures: dict[str, float]


def timed_step(backend: Backend, batch: TokenBatch, here: Machine) -> TimedStep:
    here.synchronize()
    started = time.perf_counter()
    stats = backend.backward(batch, lambda logprobs, *_: batch_loss(logprobs, batch))
    here.synchronize()
    passed = time.perf_counter()
    result = backend.step(denominator=float(batch.tokens))
    here.synchronize()
    return TimedStep(
        loss=stats["loss_sum"] / batch.tokens, norm=result.grad_norm, computed_tokens=stats["computed_tokens"],
        pass_s=passed - started, update_s=time.perf_counter() - passed, measures=result.measures,
    )  # fmt: skip


def apart(steps: Sequence[TimedStep], expected: Sequence[TimedStep]) -> float:
    """Largest difference of losses, whose terms are about 1, and of norms, relative to them."""
    pairs = list(zip(steps, expected, strict=True))
    return max(max(abs(a.loss - b.loss), abs(a.norm - b.norm) / b.norm) for a, b in pairs)


def checksum(backend: TorchBackend) -> list[int]:
    """A sum over the bits of each tensor of a backend's state."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.stack(
        [tensor.detach().view(integers[tensor.element_size()]).sum(dtype=torch.int64) for tensor in backend.state()]
    ).tolist()
