"""Which prompt comes next: an aborted one once more, else the next row that is not left out.

The rule: what is chosen follows from the log and the configuration alone, never from when a record came: a row is left out by the
reward that its group got in the epoch before, and the choice waits for that outcome.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.pipeline.envs.datasets.prompt_order import PromptOrder, RowId
from penstock.topics.prompts import Prompt


class Choice(NamedTuple):
    """A row for the next group."""

    place: int
    """In the order of prompts."""
    turn: RowId
    again: int | None = None
    """The group that was abandoned, and whose prompt this is once more."""


@dataclass(slots=True, kw_only=True)
class Choices:
    """The prompts asked so far, as far as they decide what is asked next."""

    order: PromptOrder
    limit: int | None = None
    """Places there are; None is no end: `run.epochs` counts prompts."""
    solved: float | None = None
    """Rows whose group had at least this mean reward in the epoch before are left out."""
    unsolved: float | None = None
    """Rows whose group had at most this mean reward in the epoch before are left out."""
    next_place: int = 0
    left_out: int = 0
    repeated: int = 0
    awaiting: dict[int, Choice] = field(default_factory=dict)
    """Abandoned groups whose prompts are to be asked once more."""
    _asked: dict[int, Choice] = field(default_factory=dict)
    """By group, of those that have not ended."""
    _repeats: set[int] = field(default_factory=set)
    """Groups that were asked once more before their outcome was read."""
    _reward: dict[RowId, float | None] = field(default_factory=dict)
    """By row and epoch, of this epoch and the one before; None while it has not ended."""

    @property
    def remembers(self) -> bool:
        """Whether outcomes decide what is asked, so that a restarted feeder has to read all of them."""
        return self.solved is not None or self.unsolved is not None

    def next(self) -> Choice | None:
        """The next prompt; None where there is none, yet (`waits`) or for good."""
        if self.awaiting:
            group = min(self.awaiting)
            return self.awaiting[group]._replace(again=group)
        while self.limit is None or self.next_place < self.limit:
            turn = self.order.at(self.next_place)
            before = turn._replace(epoch=turn.epoch - 1)
            if before not in self._reward:
                return Choice(self.next_place, turn)
            reward = self._reward[before]
            if reward is None:
                return None
            if not self._leaves_out(reward):
                return Choice(self.next_place, turn)
            del self._reward[before]  # left out once; then it is tried again
            self.next_place, self.left_out = self.next_place + 1, self.left_out + 1
        return None

    @property
    def exhausted(self) -> bool:
        """Whether no prompt will ever come; groups that are open may still be abandoned."""
        return self.limit is not None and self.next_place >= self.limit and not self.awaiting

    def asked(self, group: int, choice: Choice) -> None:
        """Note that a group's prompt is in the log, or about to be."""
        self._asked[group] = choice
        if choice.again is not None:
            self.repeated += 1
            if self.awaiting.pop(choice.again, None) is None:
                self._repeats.add(choice.again)
        elif choice.place >= self.next_place:
            self.next_place = choice.place + 1
        if self.remembers:
            self._reward.pop(choice.turn._replace(epoch=choice.turn.epoch - 1), None)
            self._reward[choice.turn] = None

    def ended(self, group: int, *, outcome: str | None, reward: float | None) -> None:
        """Note how a group ended; an abandoned one is asked once more."""
        choice = self._asked.pop(group, None)
        if choice is None:
            return
        if outcome == "abandoned" and choice.again is None:
            if group in self._repeats:
                self._repeats.discard(group)
            else:
                self.awaiting[group] = choice
            return
        if self.remembers and reward is not None:
            self._reward[choice.turn] = reward
        elif self.remembers:
            self._reward.pop(choice.turn, None)

    def _leaves_out(self, reward: float) -> bool:
        return (self.solved is not None and reward >= self.solved) or (self.unsolved is not None and reward <= self.unsolved)


def choice_of(prompt: Prompt, *, rows_before: Mapping[int, int]) -> Choice:
    """What was chosen for a recorded prompt; `rows_before` has for each source the rows of those before it."""
    source = max(number for number, rows in rows_before.items() if rows <= prompt.row)
    turn = RowId(source, prompt.epoch, prompt.row - rows_before[source])
    return Choice(prompt.group if prompt.place is None else prompt.place, turn, prompt.again)
