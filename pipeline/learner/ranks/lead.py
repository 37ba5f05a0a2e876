"""One optimizer step on several processes: which of them trains which micro-batch, and what the others do.

The rule: rank 0 cuts the step and says by place and digest what each rank trains; a rank reads and verifies only those groups. Every
rank runs as many micro-batches as any other, and statistics are added up in plan order, whoever measured them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from penstock.infra.backends.base import Backend
from penstock.pipeline.learner.training_samples import TokenSequence, pack
from penstock.topics.ledger import Planned

if TYPE_CHECKING:
    from penstock.infra.backends.ranks.process_set import ProcessSet

Stats = dict[str, float]


@dataclass(slots=True)
class Ranks:
    """The processes of a trainer, as rank 0 leads them through one step."""

    processes: "ProcessSet"
    planned: dict[int, Planned] = field(default_factory=dict)
    """Group -> its place in the log."""
    _taken: Counter[int] = field(default_factory=Counter)
    """Group -> how many of its sequences are in micro-batches already: a trajectory may be several sequences of one sample."""

    def whose(self, number: int) -> int:
        """The rank that trains micro-batch `number` of a step: rank 0 the last of each round, so that it never keeps another waiting."""
        return (number + 1) % self.processes.size

    def gives_away(self, number: int, sequences: Sequence[TokenSequence]) -> bool:
        """Let the rank whose micro-batch this is train it; False where that is this one."""
        rank, rows = self.whose(number), []
        for one in sequences:
            rows.append([one.group, self._taken[one.group]])
            self._taken[one.group] += 1
        if rank:
            plan = [self.planned[group] for group in dict.fromkeys(one.group for one in sequences)]
            places = [[one.group, one.sha256, one.partition, one.offset] for one in plan]
            self.processes.tell(rank, do="train", plan=places, rows=rows)
        return bool(rank)

    def finish(self, backend: Backend, own: Sequence[Stats], *, batches: int) -> list[Stats]:
        """Give ranks that have one micro-batch less an empty one; returns the statistics of all, in plan order."""
        for number in range(batches, batches + -batches % self.processes.size):
            if rank := self.whose(number):
                self.processes.tell(rank, do="nothing")
            else:
                train_nothing(backend)
        self.processes.broadcast(do="report")
        by_rank = [iter(stats) for stats in (own, *self.processes.answers())]
        return [next(by_rank[self.whose(number)]) for number in range(batches)]


def train_nothing(backend: Backend) -> None:
    """Run a micro-batch of one untrained token backward, of weight zero: the collectives of a backward pass need every rank."""
    one = TokenSequence(
        group=0, sample=0, prompt_ids=np.zeros(1, np.int32), completion_ids=np.zeros(1, np.int32),
        behaviour_logprobs=np.zeros(1, np.float32), loss_mask=np.zeros(1, np.bool_), advantage=0.0,
    )  # fmt: skip
    backend.backward(pack([one]), lambda logprobs, *_: (0.0 * logprobs.sum(), {}))
