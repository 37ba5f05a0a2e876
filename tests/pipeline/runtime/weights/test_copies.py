"""A version's way from the model to the engines: how often the host copies it, and for how long other threads stand still."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from penstock.gpu_check.lane import PAUSE_S, Pauses
from penstock.infra.memory.log import MemoryLog
from penstock.infra.tensors import host_memory
from penstock.infra.tensors.host_memory import HostBuffers
from penstock.infra.tensors.torch_copy import CopyStream
from penstock.pipeline.learner.policy_trainer import Weights
from penstock.pipeline.runtime.weights import read
from penstock.pipeline.runtime.weights.receive import WeightPrefetch
from tests.support.number_run import RUN, log_with
from tests.support.published_weights import Publishing

GENEROUS = 10
TORCH_COPIES = {"copy_", "to", "clone", "cpu", "contiguous"}


class Model:
    """Parameters of `nbytes` in all, as a trainer publishes them by a transport."""

    def __init__(self, log: MemoryLog, nbytes: int, *, transport: str) -> None:
        self.publishing = Publishing(log, transport=transport)
        self.copies = CopyStream(torch.device("cpu"), HostBuffers(shared=transport == "ipc"))
        self.parameters = {name: torch.zeros(nbytes // 4, dtype=torch.bfloat16) for name in ("embedding", "head")}

    def version(self, number: int) -> None:
        for parameter in self.parameters.values():
            parameter[number] = number + 1.0
        content = Weights(lambda: self.copies.copy(self.parameters.items()))
        self.publishing.writer.publish(content, version=number, step=number)
        self.publishing.writer.finish_publishing()


@contextmanager
def copied_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of copies on the host."""
    sizes = list[int]()

    class Noted(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            name = getattr(function, "__name__", "")
            if name in TORCH_COPIES and (name == "copy_" or result.data_ptr() != args[0].data_ptr()):
                sizes.append(result.nbytes)
            return result

    def noted(target: Any, source: Any) -> None:
        sizes.append(memoryview(target).nbytes)
        np.copyto(np.asarray(target), np.asarray(memoryview(source)))

    with monkeypatch.context() as patched, Noted():
        for module in (host_memory, read):
            patched.setattr(module, "copy_bytes", noted)
        yield sizes


def seen(worker: WeightPrefetch, version: int) -> bytes:
    while worker.version < version:
        worker.wait(0.05)
    with worker.taken() as (number, tensors):
        assert number == version
        return b"".join(bytes(tensor.data[: 2 * version + 2]) for tensor in tensors)


@pytest.mark.parametrize(("transport", "expected"), [("ipc", 1), ("kafka", 2)])
def test_a_full_version_is_copied_once_from_the_model_to_the_engines_memory_and_twice_through_the_log(
    transport: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, nbytes = log_with(), 1 << 16
    model = Model(log, nbytes, transport=transport)
    with copied_bytes(monkeypatch) as sizes:
        model.version(0)
        worker = WeightPrefetch(log, RUN, direct=transport == "ipc")
        assert seen(worker, 0) == 2 * torch.ones(1, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
        assert sum(sizes) == expected * nbytes
        model.version(1)
        seen(worker, 1)
        delta = model.publishing.writer.state.manifests[1].nbytes
        assert delta < 1000
        assert sum(sizes) == expected * nbytes + nbytes + (delta if transport == "kafka" else 0)
    worker.close()
    model.publishing.writer._publisher.close()


@pytest.mark.costly
@pytest.mark.parametrize("transport", ["ipc", "kafka"])
def test_other_threads_run_while_a_version_is_copied_compared_hashed_and_read(transport: str) -> None:
    log, nbytes = log_with(), 1 << 28
    model, longest = Model(log, nbytes, transport=transport), list[float]()
    worker: WeightPrefetch | None = None
    for version in range(3):
        with Pauses() as pauses:
            model.version(version)
            worker = worker or WeightPrefetch(log, RUN, direct=transport == "ipc")
            seen(worker, version)
        longest.append(pauses.longest_s)
    assert worker is not None
    worker.close()
    model.publishing.writer._publisher.close()
    assert min(longest) < GENEROUS * PAUSE_S, longest  # a pause by the machine's load is not in every version
