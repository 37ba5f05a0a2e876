"""A process of the trainer beside the first: trains the micro-batches that rank 0 gives it.

The rule: it decides nothing and writes nothing; what it trains it reads from the log itself, and verifies by digest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.infra import faults
from penstock.infra.backends.base import Backend
from penstock.infra.backends.batch import TokenBatch
from penstock.infra.backends.ranks.lead_backend import obey
from penstock.pipeline.learner.ranks.lead import train_nothing
from penstock.pipeline.learner.train_step import Objective
from penstock.pipeline.learner.training_samples import pack
from penstock.topics.groups import Group
from penstock.topics.ledger import Planned

if TYPE_CHECKING:
    from penstock.infra.backends.ranks.process_set import ProcessSet


@dataclass(slots=True)
class Follower:
    """Any other rank: it does what rank 0 says until that says that it is over."""

    processes: "ProcessSet"
    objective: Objective
    open: Callable[[], Backend]
    read: Callable[[Sequence[Planned]], Sequence[Group]]
    """Reads and verifies groups by their places in the log."""
    backend: Backend | None = None
    _stats: list[dict[str, float]] = field(default_factory=list)

    def follow(self) -> None:
        """Raises `BackendError` when rank 0 has ended without a word, `PenstockError` when this rank cannot do what it is told."""
        while (message := self.processes.hear())["do"] != "end":
            self._do(message)
        self.processes.answer("ended")

    def _do(self, message: Mapping[str, Any]) -> None:
        if message["do"] == "open":
            self.backend = self.open()
            return
        assert self.backend is not None, "rank 0 gives orders before it has the model opened"
        match message["do"]:
            case "train":
                batch = self._batch(_places(message["plan"]), message["rows"])
                self._stats.append(self.objective.backward(self.backend, batch))
                faults.reach("rank.trained")
            case "nothing":
                train_nothing(self.backend)
            case "report":
                self.processes.answer(self._stats)
                self._stats = []
            case _:
                obey(self.backend, dict(message), self.processes)

    def _batch(self, plan: Sequence[Planned], rows: Sequence[Sequence[int]]) -> TokenBatch:
        sequences = {group.group: self.objective.sequences(group) for group in self.read(plan)}
        return pack([sequences[group][number] for group, number in rows])


def _places(plan: Sequence[Sequence[Any]]) -> list[Planned]:
    return [Planned(group=group, sha256=sha256, partition=partition, offset=offset) for group, sha256, partition, offset in plan]
