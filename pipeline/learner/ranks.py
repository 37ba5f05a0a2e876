"""Assigns the micro-batches of one optimizer step to the ranks of a trainer."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from penstock.infra.backends.base import Backend
from penstock.pipeline.learner.micro_batches import TokenSequence, pack
from penstock.topics.ledger import Planned

if TYPE_CHECKING:
    from penstock.infra.backends.ranks.process_set import ProcessSet

Stats = dict[str, float]


@dataclass(slots=True)
class Ranks:
    """The ranks of a trainer during one step, as rank 0 sees them."""

    processes: "ProcessSet"
    planned: dict[int, Planned] = field(default_factory=dict)
    """Group -> its partition, offset and digest."""
    _assigned: Counter[int] = field(default_factory=Counter)
    """Group -> number of its sequences that are in micro-batches; a trajectory may be several sequences of one sample."""

    def rank_of(self, number: int) -> int:
        """Rank that trains micro-batch `number` of a step. Rank 0 trains the last of each round, so that no other rank waits for it."""
        return (number + 1) % self.processes.size

    def delegates(self, number: int, sequences: Sequence[TokenSequence]) -> bool:
        """Send micro-batch `number` to its rank; False if that is rank 0, which trains it itself."""
        rank, rows = self.rank_of(number), []
        for sequence in sequences:
            rows.append([sequence.group, self._assigned[sequence.group]])
            self._assigned[sequence.group] += 1
        if rank:
            plan = [self.planned[group] for group in dict.fromkeys(sequence.group for sequence in sequences)]
            fields = [[member.group, member.sha256, member.partition, member.offset] for member in plan]
            self.processes.send(rank, do="train", plan=fields, rows=rows)
        return bool(rank)

    def finish(self, backend: Backend, own: Sequence[Stats], *, batches: int) -> list[Stats]:
        """Give ranks with fewer micro-batches an empty one; returns the statistics of all micro-batches in plan order."""
        for number in range(batches, batches + -batches % self.processes.size):
            if rank := self.rank_of(number):
                self.processes.send(rank, do="nothing")
            else:
                train_empty_batch(backend)
        self.processes.broadcast(do="report")
        by_rank = [iter(stats) for stats in (own, *self.processes.replies())]
        return [next(by_rank[self.rank_of(number)]) for number in range(batches)]


def train_empty_batch(backend: Backend) -> None:
    """Run a micro-batch of one untrained token backward with weight zero: the collectives of a backward pass need every rank."""
    empty = TokenSequence(
        group=0, sample=0, prompt_ids=np.zeros(1, np.int32), completion_ids=np.zeros(1, np.int32),
        behaviour_logprobs=np.zeros(1, np.float32), loss_mask=np.zeros(1, np.bool_), advantage=0.0,
    )  # fmt: skip
    backend.backward(pack([empty]), lambda logprobs, *_: (0.0 * logprobs.sum(), {}))
