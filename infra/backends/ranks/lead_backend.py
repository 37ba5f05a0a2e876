"""Rank 0's backend: each call that all ranks have to make is sent to the others before it runs here."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from penstock.infra.backends.base import Backend, StepResult
from penstock.infra.errors import BackendError, PenstockError
from penstock.infra.tensors.stream import TensorBytes

if TYPE_CHECKING:
    from penstock.infra.backends.ranks.process_set import ProcessSet


@runtime_checkable
class Sharded(Protocol):
    """A backend of which each process holds a part of the weights."""

    def join_weights(self) -> None:
        """Enter the collective of rank 0's `weights` on another rank, which copies nothing."""


class LeadBackend:
    """A backend that forwards each call to the other ranks, except `backward`, as each rank has its own samples."""

    divides_late = True

    def __init__(self, own: Backend, processes: "ProcessSet") -> None:
        self.own, self.processes = own, processes
        self.sharded, self.shares_prompts, self.saves_in_background = own.sharded, own.shares_prompts, own.saves_in_background
        # Of rank 0 alone: its own samples, weights that every rank holds in full (not sharded ones), and files.
        self.backward, self.adapted, self.export, self.fingerprint = own.backward, own.adapted, own.export, own.fingerprint
        self.logprobs, self.reference_logprobs, self.snapshot_logprobs = own.logprobs, own.reference_logprobs, own.snapshot_logprobs

    @property
    def steps(self) -> int:
        return self.own.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self.processes.broadcast(do="count", steps=steps)
        self.own.steps = steps

    def step(self, *, denominator: float) -> StepResult:
        self.processes.broadcast(do="step", denominator=denominator)
        return self.own.step(denominator=denominator)

    def take_snapshot(self, tensors: Iterable[TensorBytes] | None = None) -> None:
        """Make the current weights, or `tensors`, every rank's proximal policy."""
        self.processes.broadcast(do="snapshot", given=tensors is not None)
        self.own.take_snapshot(None if tensors is None else self.processes.send_tensors(tensors))

    def weights(self) -> Sequence[TensorBytes]:
        if self.sharded:
            self.processes.broadcast(do="weights")
        return self.own.weights()

    def load_weights(self, tensors: Iterable[TensorBytes]) -> None:
        """Replace every rank's weights, or none on an error."""
        self.processes.broadcast(do="load_weights")
        self.own.load_weights(self.processes.send_tensors(tensors))

    def save(self, directory: str | Path) -> None:
        """Write the state of all ranks into a directory that they share; if all have the same, rank 0 writes it, perhaps in a thread."""
        if self.saves_in_background:
            self.own.save(directory)
        else:
            self._on_all_ranks("save", directory)

    def load(self, directory: str | Path) -> None:
        """Restore every rank's state. Raises `BackendError` if any rank fails."""
        self._on_all_ranks("load", directory)

    def close(self) -> None:
        self.processes.broadcast(do="close")
        self.own.close()

    def _on_all_ranks(self, do: Literal["save", "load"], directory: str | Path) -> None:
        """Run `save` or `load` on every rank and wait until all have finished. Raises rank 0's error, else the first of another's."""
        self.processes.broadcast(do=do, directory=str(directory))
        mistake: PenstockError | OSError | None = None
        try:
            getattr(self.own, do)(directory)
        except (PenstockError, OSError) as error:
            mistake = error
        others = [text for text in self.processes.replies() if text is not None]
        if mistake is not None:
            raise mistake
        if others:
            raise BackendError(others[0])


def run_command(backend: Backend, message: dict[str, Any], processes: "ProcessSet") -> None:
    """Execute a command of rank 0's backend on another rank."""
    match message["do"]:
        case "count":
            backend.steps = message["steps"]
        case "step":
            backend.step(denominator=message["denominator"])
        case "snapshot":
            backend.take_snapshot(processes.receive_tensors() if message["given"] else None)
        case "weights":
            assert isinstance(backend, Sharded), "only sharded weights are gathered"
            backend.join_weights()
        case "load_weights":
            backend.load_weights(processes.receive_tensors())
        case "save" | "load" as do:
            mistake = None
            try:
                getattr(backend, do)(message["directory"])
            except (PenstockError, OSError) as error:  # rank 0 raises it
                mistake = str(error)
            processes.reply(mistake)
        case "close":
            backend.close()
        case other:
            raise AssertionError(f"unknown command {other!r} of rank 0")
