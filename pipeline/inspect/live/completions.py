"""Selects the completions that the live view shows: the best of the recent groups, and the newest. Only these payloads are decoded."""

import contextlib
import math
from collections import deque
from dataclasses import dataclass, field

from penstock.pipeline.data.references import reference_text
from penstock.topics import groups
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import Record

RECENT = 16
KNOWN = 32
"""Number of recent prompts that are compared to detect the chat template, which is not shown."""
LEAST_COMMON = 12
REFERENCE = 24
"""Largest number of characters shown of a reference answer."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample to show."""

    which: str
    reward: float | None
    prompt: str
    text: str
    reference: str | None = None

    def line(self, width: int) -> str:
        """Format the sample in at most `width` characters, with the ends of its texts: "best 1.000  '2+2=' → '4', answer 4"."""
        head = f"{self.which} {'no reward' if self.reward is None else f'{self.reward:.3f}'}  "
        tail = "" if self.reference is None else f", answer {_end(self.reference, REFERENCE)}"
        room = max(8, (width - len(head) - len(tail) - 7) // 2)
        return f"{head}'{_end(self.prompt, room)}' → '{_end(self.text, room)}'{tail}"


@dataclass(slots=True)
class Completions:
    """The newest scored groups of a run, as records that are not decoded."""

    run: str
    _records: "deque[tuple[float, Record]]" = field(default_factory=lambda: deque(maxlen=RECENT))
    _prompts: "deque[str]" = field(default_factory=lambda: deque(maxlen=KNOWN))
    _shown: list[Completion] = field(default_factory=list)
    _stale: bool = False

    def add(self, folded: object, record: Record) -> None:
        """Remember a record if it is a group with rewards in one part. `folded` is what `RunView.fold` returned for the record."""
        if record.topic != f"{self.run}.groups":
            return
        with contextlib.suppress(Unusable):
            headers = folded if isinstance(folded, Headers) else groups.check(record, run=self.run)
            if headers.reward_mean is not None and headers.parts == 1:
                self._records.append((headers.reward_mean, record))
                self._stale = True

    def shown(self) -> list[Completion]:
        """Return the best sample of the recent group with the highest mean reward, and the first sample of the newest group."""
        if self._stale:
            self._stale = False
            best = self._read(max(self._records, key=lambda entry: entry[0])[1])
            newest = self._read(self._records[-1][1])
            self._shown = []
            if best is not None:
                sample = max(best.samples, key=lambda sample: -math.inf if sample.reward is None else sample.reward)
                self._shown.append(self._completion("best", best, sample))
            if newest is not None:
                self._shown.append(self._completion("newest", newest, newest.samples[0]))
        return self._shown

    def _read(self, record: Record) -> groups.Group | None:
        """Decode a group, and remember its prompt, with which chat templates are detected; None if it is unusable."""
        try:
            group = groups.read(record, run=self.run)[1]
        except Unusable:
            return None  # the trainer reports the record as a dead letter
        if group.prompt not in self._prompts:
            self._prompts.append(group.prompt)
        return group

    def _completion(self, which: str, group: groups.Group, sample: groups.ScoredSample) -> Completion:
        prompt = without_template(group.prompt, list(self._prompts))
        # The common prefix may include the start of the question, so an ellipsis marks the cut.
        prompt += "" if group.prompt.endswith(prompt) else "…"
        return Completion(which, sample.reward, prompt, sample.completion, reference_text(group.columns))


def without_template(prompt: str, prompts: list[str]) -> str:
    """Remove the common prefix and suffix of all prompts, which are those of a chat template, from one prompt."""
    if len(prompts) < 2:
        return prompt
    first, last = len(shared(*prompts)), len(shared(*(text[::-1] for text in prompts)))
    low = first if first >= LEAST_COMMON else 0
    high = len(prompt) - (last if last >= LEAST_COMMON else 0)
    return prompt[low:high] if low < high else prompt


def shared(*texts: str) -> str:
    """Return the common prefix of the texts in whole words: `shared("sum: 12+1", "sum: 13+2")` is "sum: "."""
    low, high = min(texts), max(texts)
    length = min(len(low), len(high))
    length = next((index for index in range(length) if low[index] != high[index]), length)
    while low[:length][-1:].isalnum() and any(text[length : length + 1].isalnum() for text in texts):
        length -= 1
    return low[:length]


def _end(text: str, limit: int) -> str:
    """Return the last words of a text, at most `limit` characters, after an ellipsis if some are left out."""
    line = " ".join(text.split())
    rest = line[len(line) - limit + 1 :]
    return line if len(line) <= limit else f"…{rest.partition(' ')[2] or rest}"
