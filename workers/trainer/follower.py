"""A trainer process other than rank 0: trains the micro-batches that rank 0 assigns.

It decides nothing and writes nothing. It reads its groups from the log and verifies their digests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.infra import faults
from penstock.infra.backends.base import Backend
from penstock.infra.backends.batch import TokenBatch
from penstock.infra.backends.ranks.lead_backend import run_command
from penstock.pipeline.learner.ranks import train_empty_batch
from penstock.pipeline.learner.train_step import Objective
from penstock.pipeline.learner.training_samples import pack
from penstock.topics.groups import Group
from penstock.topics.ledger import Planned

if TYPE_CHECKING:
    from penstock.infra.backends.ranks.process_set import ProcessSet


@dataclass(slots=True)
class Follower:
    """A rank above 0, which executes rank 0's messages until the message `end`."""

    processes: "ProcessSet"
    objective: Objective
    open: Callable[[], Backend]
    read: Callable[[Sequence[Planned]], Sequence[Group]]
    """Reads and verifies planned groups."""
    backend: Backend | None = None
    _stats: list[dict[str, float]] = field(default_factory=list)

    def follow(self) -> None:
        """Execute messages until `end`. Raises `BackendError` if rank 0 has exited, `PenstockError` if a message cannot be executed."""
        while (message := self.processes.receive())["do"] != "end":
            self._do(message)
        self.processes.reply("ended")

    def _do(self, message: Mapping[str, Any]) -> None:
        if message["do"] == "open":
            self.backend = self.open()
            return
        assert self.backend is not None, "rank 0 sends `open` first"
        match message["do"]:
            case "train":
                batch = self._batch(_plan_of(message["plan"]), message["rows"])
                self._stats.append(self.objective.backward(self.backend, batch))
                faults.reach("rank.trained")
            case "nothing":
                train_empty_batch(self.backend)
            case "report":
                self.processes.reply(self._stats)
                self._stats = []
            case _:
                run_command(self.backend, dict(message), self.processes)

    def _batch(self, plan: Sequence[Planned], rows: Sequence[Sequence[int]]) -> TokenBatch:
        sequences = {group.group: self.objective.sequences(group) for group in self.read(plan)}
        return pack([sequences[group][number] for group, number in rows])


def _plan_of(plan: Sequence[Sequence[Any]]) -> list[Planned]:
    return [Planned(group=group, sha256=sha256, partition=partition, offset=offset) for group, sha256, partition, offset in plan]
