"""Weights from the trainer's memory for the workers on its machine (`weights.transport = "ipc"`).

A version is in the memory as soon as its digest is computed, while its chunks are being sent, and workers may load it then. All chunks go
to the log nevertheless: workers on other machines, and all workers while no trainer runs, read them from it.
"""

import time
from collections.abc import Callable, Sequence

from penstock.infra.errors import LogError
from penstock.infra.tensors.host_memory import HostBuffers, filled_memory
from penstock.infra.tensors.machine_memory import MachineMemory
from penstock.infra.tensors.stream import TensorBytes
from penstock.infra.tensors.weight_copy import WeightCopy
from penstock.topics.weights import Manifest

REQUEST_EVERY_S = 1.0
"""How often a worker without the newest version requests the memory from the trainer."""
LOOK_EVERY_S = 0.05
"""How often a worker with the newest version checks whether the trainer's memory has the next one."""
WAIT_S = 10.0
"""A worker reads the log when the memory has had no published version for this long, as while the trainer writes the next one there."""


def _memory(run: str, origin: Manifest, *, only_reads: bool = False) -> MachineMemory:
    """The trainer's shared memory, for a run whose version 0 is `origin`."""
    return MachineMemory(f"{run} {origin.created_ns} {origin.digest} trainer", only_reads=only_reads)


def attach(copy: WeightCopy, memory: MachineMemory, origin: Manifest) -> None:
    """Request shared memory from the process that owns it, for a copy in it; nothing changes without a response. Raises `OSError`."""
    if (file := memory.request_file()) is not None:
        copy.lay_out(names=origin.names, dtypes=origin.dtypes, shapes=origin.shapes)
        with copy.lock:
            memory.map(file)


class IpcWeightSender:
    """Offers the trainer's newest version in shared memory, to workers and for comparison with the next version."""

    def __init__(self, run: str, origin: Manifest, *, notify: Callable[[str], None] = lambda _: None) -> None:
        self._memory, self._notify = _memory(run, origin), notify
        self._buffers = HostBuffers(shared=True)

    def put(self, tensors: Sequence[TensorBytes], *, version: int, digest: str) -> Sequence[TensorBytes]:
        """Offer these tensors, copied unless they already fill shared memory; returns the shared tensors.

        A worker that loads the version before keeps its memory, and the next version is in another.
        """
        ordered: Sequence[TensorBytes] = sorted(tensors, key=lambda tensor: tensor.name)
        if (self._memory.version, self._memory.digest) != (version, digest):
            if (memory := filled_memory(ordered)) is None:
                ordered = self._buffers.copy(ordered)
                memory = filled_memory(ordered)
            assert memory is not None, "buffers of shared memory are shared"
            self._memory.use(memory)
            self._memory.digest, self._memory.version = digest, version
        try:
            self._memory.claim()
        except OSError as error:
            self._notify(f"weights.transport: workers here cannot map the trainer's memory ({error}); they read weights from the log")
        return ordered

    def close(self) -> None:
        """Release the memory; workers that have it open keep it."""
        self._memory.close()


class IpcWeightReceiver:
    """Reads the trainer's versions from shared memory, in a worker."""

    def __init__(self, run: str, origin: Manifest) -> None:
        """Prepare to read the memory of the trainer of `run`, whose version 0 is `origin`."""
        self._memory, self._origin = _memory(run, origin, only_reads=True), origin
        self.copy = WeightCopy(self._memory)
        self._request_at, self._absent_since = 0.0, 0.0
        self._requested: Manifest | None = None
        self._serves = False

    def serves(self, newest: Manifest) -> bool:
        """True if the trainer's memory contains the newest published version or the next one, or soon will."""
        now, every_s = time.monotonic(), LOOK_EVERY_S if self._holds(newest) else REQUEST_EVERY_S
        if self.copy.version != newest.version + 1 and (newest is not self._requested or now >= self._request_at):
            self._requested, self._request_at = newest, now + every_s
            try:
                attach(self.copy, self._memory, self._origin)
            except (OSError, LogError):
                self._serves = False
            else:
                self._absent_since = self._absent_since or now
                ahead = not 0 <= self.copy.version <= newest.version
                self._serves = not self._memory.no_writer and ahead and now - self._absent_since < WAIT_S
        if self._holds(newest) or self.copy.version == newest.version + 1:
            self._serves, self._absent_since = True, 0.0
        return self._serves

    def _holds(self, version: Manifest) -> bool:
        return self.copy.holds(version.version, version.digest)

    def close(self) -> None:
        with self.copy.lock:
            self._memory.close()
