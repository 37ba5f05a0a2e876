"""The groups a rollout worker draws: which of their samples are wanted still, which have ended, which are sent.

The rule: a group needs K samples and is begun as K + r; the first K that end are its samples, and the rest are nobody's.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from penstock.infra.engines.base import Completion
from penstock.workers.rollout.group_tasks import Work


@dataclass(slots=True)
class GroupInHand:
    """One group between its start and the acknowledgement of its last sample."""

    work: Work
    wanted: int
    """How many samples it needs beside those that are sent or stand in the log."""
    left: set[int]
    """Samples that may still become those."""
    ended: dict[int, Completion] = field(default_factory=dict)
    """Those of them that the engine has returned; `wanted` at most."""
    sent: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Whether nothing more has to be drawn."""
        return len(self.ended) == self.wanted

    def take(self, completion: Completion) -> None:
        """Keep a sample that the engine returned, if the group needs it."""
        if completion.sample in self.left and not self.complete:
            self.ended[completion.sample] = completion

    def known(self, samples: Iterable[int]) -> None:
        """Learn that these samples stand in the log, whoever drew them."""
        others = set(samples) - self.sent
        self.wanted -= len(others & self.left)
        self.left -= others
        self.ended = {number: one for number, one in self.ended.items() if number in self.left}
        while len(self.ended) > max(self.wanted, 0):
            del self.ended[max(self.ended)]
        if self.wanted <= 0:
            self.wanted, self.left = 0, set()

    def give(self) -> Iterator[Completion]:
        """The samples that have ended, by number; each counts as sent from now on."""
        for number in sorted(self.ended):
            self.sent.add(number)
            self.left.discard(number)
            self.wanted -= 1
            yield self.ended.pop(number)
