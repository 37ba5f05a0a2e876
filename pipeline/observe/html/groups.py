"""Groups of a run as columns for the page: numbers of the newest ones, texts and tokens of the newest of those.

Headers alone decide which groups are listed. At most one chunk of details is in memory uncompressed.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.pipeline.observe.html.advantages import Advantages
from penstock.pipeline.observe.html.chunks import Chunks, Place
from penstock.pipeline.observe.html.token_texts import TokenTexts
from penstock.pipeline.observe.live.completions import shared
from penstock.pipeline.observe.run_status import fates
from penstock.pipeline.observe.run_view import RunView
from penstock.pipeline.runtime.topic_reader import RunReader
from penstock.topics.groups import Group
from penstock.topics.prompts import Prompt
from penstock.topics.rollouts import Rollout
from penstock.topics.samples import generated

EXCERPT = 2000
"""Characters of a prompt that are kept for the list until it is known what all prompts begin with."""


class Wanted(NamedTuple):
    """Groups whose numbers, texts and tokens go into a page, each a subset of the one before."""

    listed: frozenset[int]
    texts: frozenset[int]
    tokens: frozenset[int]


class Drawn(NamedTuple):
    """What stays of a sample in memory."""

    sample: int
    tokens: int
    finish: str
    worker: str
    version_min: int
    version_max: int
    started_ns: int
    ended_ns: int

    @classmethod
    def of(cls, rollout: Rollout) -> "Drawn":
        """The numbers of a sample."""
        return cls(
            rollout.sample,
            len(generated(rollout)),
            rollout.finish,
            rollout.worker,
            rollout.version_min,
            rollout.version_max,
            rollout.started_ns,
            rollout.ended_ns,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One group's line in the list."""

    group: int
    prompt: str
    """Its first characters."""
    reason: str | None
    scorer: str
    created_ns: int
    scored_ns: int
    reward_ns: int | None
    rollouts: tuple[Drawn, ...]
    rewards: npt.NDArray[np.float64]
    components: tuple[tuple[float | None, ...], ...]
    advantages: npt.NDArray[np.float32]
    place: Place | None


@dataclass(slots=True, kw_only=True)
class GroupPages:
    """Reads the wanted groups of a run; `rows` and `chunks` hold them afterwards."""

    reader: RunReader
    view: RunView
    wanted: Wanted
    texts: TokenTexts
    advantages: Advantages
    rows: list[Row] = field(default_factory=list)
    chunks: Chunks = field(default_factory=Chunks)
    reward_names: tuple[str, ...] = ()
    reward_weights: tuple[float, ...] = ()
    common: str | None = None
    """What all prompts begin with."""

    def read(self) -> None:
        """Groups with samples come from `groups`, the others from `prompts` and `rollouts`."""
        left = set(self.wanted.listed)
        unscored: dict[int, tuple[str, Group]] = {}
        for outcome in self.reader.groups(only=self.wanted.listed):
            group, worker = outcome.payload, (outcome.headers and outcome.headers.worker) or ""
            if group is None:
                continue
            if group.samples:
                left.discard(group.group)
                self._scored(group, worker)
            else:
                unscored[group.group] = worker, group
        if left:
            self._unscored(left, unscored)
        self.chunks.close()
        self.rows.sort(key=lambda row: row.group)

    def _scored(self, group: Group, worker: str) -> None:
        self.reward_names = self.reward_names or group.reward_names
        self.reward_weights = self.reward_weights or group.reward_weights
        drawn = [sample.rollout for sample in group.samples]
        place = self._detail(group.group, group.prompt, group.columns, [sample.completion for sample in group.samples], drawn)
        self._row(
            group.group,
            group.prompt,
            [Drawn.of(rollout) for rollout in drawn],
            reason=group.reason,
            scorer=worker,
            created_ns=group.created_ns,
            scored_ns=group.scored_ns,
            reward_ns=group.reward_ns,
            rewards=np.array([sample.reward for sample in group.samples], np.float64),
            components=tuple(sample.components for sample in group.samples),
            advantages=self.advantages.of(group),
            place=place,
        )

    def _unscored(self, left: AbstractSet[int], outcomes: Mapping[int, tuple[str, Group]]) -> None:
        """Groups without rewards: their prompts, and the samples that were drawn for them, whole only where tokens are wanted."""
        prompts = {read.payload.group: read.payload for read in self.reader.prompts(only=left) if read.payload is not None}
        drawn: dict[int, dict[int, tuple[Drawn, Rollout | None]]] = {}
        for read in self.reader.samples(only={group for group in left if self.view.samples.get(group)}):
            if (rollout := read.payload) is not None:
                kept = rollout if rollout.group in self.wanted.texts else None
                drawn.setdefault(rollout.group, {})[rollout.sample] = Drawn.of(rollout), kept
        for number in sorted(left):
            prompt, (worker, group) = prompts.get(number), outcomes.get(number, ("", None))
            samples = [sample for _, sample in sorted(drawn.get(number, {}).items())]
            if prompt is None and group is None and not samples:
                continue
            text = prompt.prompt if prompt else group.prompt if group else ""
            self._row(
                number,
                text,
                [numbers for numbers, _ in samples],
                reason=group.reason if group else None,
                scorer=worker,
                created_ns=prompt.created_ns if prompt else 0,
                scored_ns=group.scored_ns if group else 0,
                reward_ns=None,
                rewards=np.full(len(samples), np.nan),
                components=((),) * len(samples),
                advantages=np.full(len(samples), np.nan, np.float32),
                place=self._undecoded(number, text, prompt, [whole for _, whole in samples if whole is not None]),
            )

    def _undecoded(self, number: int, text: str, prompt: Prompt | None, drawn: list[Rollout]) -> Place | None:
        completions = [self.texts.completion(generated(rollout)) for rollout in drawn]
        return self._detail(number, text, prompt.columns if prompt else "{}", completions, drawn)

    def _detail(self, number: int, prompt: str, columns: str, completions: Sequence[str | None], drawn: list[Rollout]) -> Place | None:
        if number not in self.wanted.texts:
            return None
        return self.chunks.add(prompt, columns, completions, drawn if number in self.wanted.tokens else [])

    def _row(self, number: int, prompt: str, drawn: list[Drawn], **fields: Any) -> None:
        if prompt:
            self.common = prompt if self.common is None else shared(self.common, prompt)
        self.rows.append(Row(group=number, prompt=prompt[:EXCERPT], rollouts=tuple(drawn), **fields))


def choose(view: RunView, *, samples: int, tokens: int, text_tokens: int) -> Wanted:
    """The newest groups that have together at most so many samples, tokens with texts, and tokens with every detail.

    Only groups that the report counts are listed.
    """
    listed: set[int] = set()
    texts: set[int] = set()
    detailed: set[int] = set()
    for number in sorted(fates(view), reverse=True):
        drawn = view.samples.get(number, {})
        outcome = view.groups.get(number)
        samples -= max(1, len(drawn))
        size = max(sum(drawn.values()), outcome.tokens if outcome else 0)
        tokens, text_tokens = tokens - size, text_tokens - size
        if samples < 0:
            break
        listed.add(number)
        if text_tokens >= 0:
            texts.add(number)
        if tokens >= 0 and text_tokens >= 0:
            detailed.add(number)
    return Wanted(frozenset(listed), frozenset(texts), frozenset(detailed))
