"""Chooses the next prompt: the retry of an abandoned one, else the next row that is not skipped.

The choice follows from the log and the configuration, not from when a record arrived: a row is skipped by the reward of its group in the
epoch before, and the choice waits for that outcome.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.pipeline.data.prompt_order import PromptOrder, RowId
from penstock.topics.prompts import Prompt


class Choice(NamedTuple):
    """A row for the next group."""

    position: int
    """Index in the order of prompts."""
    turn: RowId
    again: int | None = None
    """The abandoned group that this retries."""


@dataclass(slots=True, kw_only=True)
class Choices:
    """The requested prompts, as far as they decide what is next."""

    order: PromptOrder
    limit: int | None = None
    """Number of prompts; None for no end: `run.epochs` counts prompts."""
    solved: float | None = None
    """Rows whose group had at least this mean reward in the epoch before are skipped."""
    unsolved: float | None = None
    """Rows whose group had at most this mean reward in the epoch before are skipped."""
    next_position: int = 0
    left_out: int = 0
    repeated: int = 0
    awaiting: dict[int, Choice] = field(default_factory=dict)
    """Abandoned groups whose prompts are to be retried."""
    _requested: dict[int, Choice] = field(default_factory=dict)
    """By group, of those that have not ended."""
    _repeats: set[int] = field(default_factory=set)
    """Groups that were retried before their outcome was read."""
    _reward: dict[RowId, float | None] = field(default_factory=dict)
    """By row and epoch, of this epoch and the one before; None until it has ended."""

    @property
    def remembers(self) -> bool:
        """True if outcomes decide the next prompts, so that a restarted feeder has to read all of them."""
        return self.solved is not None or self.unsolved is not None

    def next(self) -> Choice | None:
        """The next prompt; None if there is none, yet or for good."""
        if self.awaiting:
            group = min(self.awaiting)
            return self.awaiting[group]._replace(again=group)
        while self.limit is None or self.next_position < self.limit:
            turn = self.order.at(self.next_position)
            before = turn._replace(epoch=turn.epoch - 1)
            if before not in self._reward:
                return Choice(self.next_position, turn)
            reward = self._reward[before]
            if reward is None:
                return None
            if not self._skips(reward):
                return Choice(self.next_position, turn)
            del self._reward[before]  # skipped once; then it is tried again
            self.next_position, self.left_out = self.next_position + 1, self.left_out + 1
        return None

    @property
    def exhausted(self) -> bool:
        """True if no prompt will follow; open groups may still be abandoned."""
        return self.limit is not None and self.next_position >= self.limit and not self.awaiting

    def requested(self, group: int, choice: Choice) -> None:
        """Record that a group's prompt is in the log, or about to be."""
        self._requested[group] = choice
        if choice.again is not None:
            self.repeated += 1
            if self.awaiting.pop(choice.again, None) is None:
                self._repeats.add(choice.again)
        elif choice.position >= self.next_position:
            self.next_position = choice.position + 1
        if self.remembers:
            self._reward.pop(choice.turn._replace(epoch=choice.turn.epoch - 1), None)
            self._reward[choice.turn] = None

    def ended(self, group: int, *, outcome: str | None, reward: float | None) -> None:
        """Record how a group ended; an abandoned one is retried once."""
        choice = self._requested.pop(group, None)
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

    def _skips(self, reward: float) -> bool:
        return (self.solved is not None and reward >= self.solved) or (self.unsolved is not None and reward <= self.unsolved)


def choice_of(prompt: Prompt, *, rows_before: Mapping[int, int]) -> Choice:
    """The choice of a recorded prompt; `rows_before` has for each source the rows of those before it."""
    source = max(number for number, rows in rows_before.items() if rows <= prompt.row)
    turn = RowId(source, prompt.epoch, prompt.row - rows_before[source])
    return Choice(prompt.group if prompt.place is None else prompt.place, turn, prompt.again)
