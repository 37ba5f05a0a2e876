"""A run's groups as columns for a page, read record by record: numbers of the newest ones, texts and tokens of the newest of those.

The rule: which groups are listed follows from headers alone, before a payload is read; no more than one piece of details is unpacked
in memory at any time.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.infra.log import Log
from penstock.pipeline.observe.html.advantages import Advantages
from penstock.pipeline.observe.html.chunks import Chunks, Place
from penstock.pipeline.observe.html.reading import Alive, watched
from penstock.pipeline.observe.html.token_texts import TokenTexts
from penstock.pipeline.observe.run_view import RunView
from penstock.pipeline.runtime.topic_reader import scan
from penstock.topics import groups, prompts, rollouts
from penstock.topics.groups import Group
from penstock.topics.prompts import Prompt
from penstock.topics.rollouts import Rollout
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.headers import Headers

Found = TypeVar("Found")
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
    def of(cls, one: Rollout) -> "Drawn":
        """The numbers of a sample."""
        return cls(one.sample, len(one.token_ids), one.finish, one.worker, one.version_min, one.version_max, one.started_ns, one.ended_ns)


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
    rollouts: tuple[Drawn, ...]
    rewards: npt.NDArray[np.float64]
    components: tuple[tuple[float | None, ...], ...]
    advantages: npt.NDArray[np.float32]
    place: Place | None


@dataclass(slots=True, kw_only=True)
class Reader:
    """Reads the wanted groups of a run; `rows` and `chunks` hold them afterwards."""

    log: Log
    view: RunView
    wanted: Wanted
    texts: TokenTexts
    advantages: Advantages
    alive: Alive
    rows: list[Row] = field(default_factory=list)
    chunks: Chunks = field(default_factory=Chunks)
    reward_names: tuple[str, ...] = ()
    reward_weights: tuple[float, ...] = ()
    common: str | None = None
    """What all prompts begin with."""

    def read(self) -> None:
        """Groups with samples come from `groups`, the others from `prompts` and `rollouts`."""
        left = set(self.wanted.listed)
        told: dict[int, tuple[Headers, Group]] = {}
        for headers, group in whole_groups(self.log, self.view.run, wanted=self.wanted.listed, alive=self.alive):
            if group.samples:
                left.discard(group.group)
                self._scored(headers, group)
            else:
                told[group.group] = headers, group
        if left:
            self._unscored(left, told)
        self.chunks.close()
        self.rows.sort(key=lambda row: row.group)

    def _scored(self, headers: Headers, group: Group) -> None:
        self.reward_names = self.reward_names or group.reward_names
        self.reward_weights = self.reward_weights or group.reward_weights
        drawn = [sample.rollout for sample in group.samples]
        place = self._detail(group.group, group.prompt, group.columns, [sample.completion for sample in group.samples], drawn)
        self._row(
            group.group,
            group.prompt,
            [Drawn.of(rollout) for rollout in drawn],
            reason=group.reason,
            scorer=headers.worker or "",
            created_ns=group.created_ns,
            scored_ns=group.scored_ns,
            rewards=np.array(group.rewards),
            components=tuple(sample.components for sample in group.samples),
            advantages=self.advantages.of(group),
            place=place,
        )

    def _unscored(self, left: set[int], told: Mapping[int, tuple[Headers, Group]]) -> None:
        """Groups without rewards: their prompts, and the samples that were drawn for them, whole only where tokens are wanted."""
        run = self.view.run
        asked = {prompt.group: prompt for prompt in self._of(left, "prompts", prompts.read)}
        drawn: dict[int, dict[int, tuple[Drawn, Rollout | None]]] = {}
        for rollout in self._of({group for group in left if self.view.samples.get(group)}, "rollouts", rollouts.read):
            kept = rollout if rollout.group in self.wanted.texts else None
            drawn.setdefault(rollout.group, {}).setdefault(rollout.sample, (Drawn.of(rollout), kept))
        for number in sorted(left):
            prompt, (headers, group) = asked.get(number), told.get(number, (Headers(run=run, schema=""), None))
            samples = [found for _, found in sorted(drawn.get(number, {}).items())]
            if prompt is None and group is None and not samples:
                continue
            text = prompt.prompt if prompt else group.prompt if group else ""
            self._row(
                number,
                text,
                [facts for facts, _ in samples],
                reason=group.reason if group else None,
                scorer=headers.worker or "",
                created_ns=prompt.created_ns if prompt else 0,
                scored_ns=group.scored_ns if group else 0,
                rewards=np.full(len(samples), np.nan),
                components=((),) * len(samples),
                advantages=np.full(len(samples), np.nan, np.float32),
                place=self._undecoded(number, text, prompt, [whole for _, whole in samples if whole is not None]),
            )

    def _of(self, left: Iterable[int], topic: str, reader: Callable[..., tuple[Headers, Found]]) -> Iterator[Found]:
        wanted = {str(group).encode() for group in left}
        if not wanted:
            return
        for record in watched(scan(self.log, f"{self.view.run}.{topic}"), self.alive):
            if record.key in wanted:
                with contextlib.suppress(Unusable):
                    yield reader(record, run=self.view.run)[1]

    def _undecoded(self, number: int, text: str, prompt: Prompt | None, drawn: list[Rollout]) -> Place | None:
        completions = [self.texts.completion(rollout.token_ids) for rollout in drawn]
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
    """The newest groups that have together at most so many samples, tokens with texts, and tokens with every detail."""
    listed: set[int] = set()
    texts: set[int] = set()
    detailed: set[int] = set()
    for number in sorted(view.admitted | view.groups.keys() | view.samples.keys(), reverse=True):
        drawn = view.samples.get(number, {})
        facts = view.groups.get(number)
        samples -= max(1, len(drawn))
        size = max(sum(drawn.values()), facts.tokens if facts else 0)
        tokens, text_tokens = tokens - size, text_tokens - size
        if samples < 0:
            break
        listed.add(number)
        if text_tokens >= 0:
            texts.add(number)
        if tokens >= 0 and text_tokens >= 0:
            detailed.add(number)
    return Wanted(frozenset(listed), frozenset(texts), frozenset(detailed))


def whole_groups(log: Log, run: str, *, wanted: frozenset[int], alive: Alive) -> Iterator[tuple[Headers, Group]]:
    """The first whole outcome of each wanted group."""
    parts, seen = groups.Parts(), set[int]()
    for record in watched(scan(log, f"{run}.groups"), alive):
        try:
            facts = groups.check(record, run=run)
            if facts.group not in wanted or facts.group in seen or (records := parts.add(record, facts)) is None:
                continue
            found = groups.read(records, run=run)
            seen.add(found[1].group)
            yield found
        except Unusable:
            continue


def shared(first: str, second: str) -> str:
    """What two texts begin with.

    Example:
        shared("ask: 1+1", "ask: 2+2")  # -> "ask: "
    """
    length = min(len(first), len(second))
    for place in range(length):
        if first[place] != second[place]:
            return first[:place]
    return first[:length]


def short(name: str) -> str:
    """A reward function's name without where it lies.

    Example:
        short("/home/me/judge.py:digits")  # -> "digits"
    """
    return name.rpartition(":")[2]
