"""Groups of a run as columns for the page: numbers of the newest ones, texts and tokens of the newest of those."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.pipeline.inspect.live.completions import shared
from penstock.pipeline.inspect.run_status import group_statuses
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.tables.run_tables import Advantages
from penstock.pipeline.inspect.tables.timeline import SampleNumbers
from penstock.pipeline.inspect.tables.token_texts import TokenTexts
from penstock.pipeline.inspect.web.chunks import Chunks, ChunkSlot
from penstock.pipeline.runtime.topic_reader import RunReader
from penstock.topics.groups import Group
from penstock.topics.rollouts import Rollout, generated

NEWEST = 64
"""Most groups from which the newest samples are chosen."""
EXCERPT = 2000
"""Characters of a prompt that are held in memory until the common prefix of all prompts has been computed."""


class Selection(NamedTuple):
    """Groups whose numbers, texts and tokens go into a page, each a subset of the one before."""

    listed: frozenset[int]
    texts: frozenset[int]
    tokens: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One group's line in the list."""

    group: int
    prompt: str
    reason: str | None
    scorer: str
    created_ns: int
    scored_ns: int
    reward_ns: int | None
    rollouts: tuple[SampleNumbers, ...]
    rewards: npt.NDArray[np.float64]
    components: tuple[tuple[float | None, ...], ...]
    advantages: npt.NDArray[np.float32]
    chunk_slot: ChunkSlot | None


@dataclass(slots=True, kw_only=True)
class GroupPages:
    """Reads the selected groups of a run into `rows` and `chunks`."""

    reader: RunReader
    view: RunView
    selection: Selection
    texts: TokenTexts
    advantages: Advantages
    rows: list[Row] = field(default_factory=list)
    chunks: Chunks = field(default_factory=Chunks)
    reward_names: tuple[str, ...] = ()
    reward_weights: tuple[float, ...] = ()
    common: str | None = None
    newest: list[Group] = field(default_factory=list)
    """Those of `newest_groups`."""

    def read(self) -> None:
        """Read groups with samples from `groups`, the others from `prompts` and `rollouts`."""
        unread, newest = set(self.selection.listed), set(newest_groups(self.view))
        unscored: dict[int, tuple[str, Group]] = {}
        for outcome in self.reader.groups(only=self.selection.listed):
            group, worker = outcome.payload, (outcome.headers and outcome.headers.worker) or ""
            if group is None:
                continue
            if group.samples:
                unread.discard(group.group)
                self._scored(group, worker)
                self.newest += [group] if group.group in newest else []
            else:
                unscored[group.group] = worker, group
        if unread:
            self._unscored(unread, unscored)
        self.chunks.close()
        self.rows.sort(key=lambda row: row.group)

    def _scored(self, group: Group, worker: str) -> None:
        """Add a group with rewards, which `worker` has scored."""
        self.reward_names = self.reward_names or group.reward_names
        self.reward_weights = self.reward_weights or group.reward_weights
        rollouts = [sample.rollout for sample in group.samples]
        self._row(
            group.group,
            group.prompt,
            group.columns,
            [SampleNumbers.of(rollout) for rollout in rollouts],
            [sample.completion for sample in group.samples],
            rollouts,
            reason=group.reason,
            scorer=worker,
            created_ns=group.created_ns,
            scored_ns=group.scored_ns,
            reward_ns=group.reward_ns,
            rewards=np.array([sample.reward for sample in group.samples], np.float64),
            components=tuple(sample.components for sample in group.samples),
            advantages=self.advantages.of(group),
        )

    def _unscored(self, unread: AbstractSet[int], outcomes: Mapping[int, tuple[str, Group]]) -> None:
        """Add groups without rewards: prompts and samples; rollouts stay in memory only for groups with texts."""
        prompts = {read.payload.group: read.payload for read in self.reader.prompts(only=unread) if read.payload is not None}
        samples_of: dict[int, dict[int, tuple[SampleNumbers, Rollout | None]]] = {}
        for read in self.reader.samples(only={group for group in unread if self.view.samples.get(group)}):
            if (rollout := read.payload) is not None:
                full_rollout = rollout if rollout.group in self.selection.texts else None
                samples_of.setdefault(rollout.group, {})[rollout.sample] = SampleNumbers.of(rollout), full_rollout
        for number in sorted(unread):
            prompt, (worker, group) = prompts.get(number), outcomes.get(number, ("", None))
            samples = [sample for _, sample in sorted(samples_of.get(number, {}).items())]
            if prompt is None and group is None and not samples:
                continue
            text = prompt.prompt if prompt else group.prompt if group else ""
            rollouts = [full for _, full in samples if full is not None]
            self._row(
                number,
                text,
                prompt.columns if prompt else "{}",
                [numbers for numbers, _ in samples],
                [self.texts.completion(generated(rollout)) for rollout in rollouts],
                rollouts,
                reason=group.reason if group else None,
                scorer=worker,
                created_ns=prompt.created_ns if prompt else 0,
                scored_ns=group.scored_ns if group else 0,
                reward_ns=None,
                rewards=np.full(len(samples), np.nan),
                components=((),) * len(samples),
                advantages=np.full(len(samples), np.nan, np.float32),
            )

    def _row(
        self, number: int, prompt: str, columns: str, samples: list[SampleNumbers], completions: list[str | None], rollouts: list[Rollout],
        **fields: Any,
    ) -> None:  # fmt: skip
        """Add a group: its line, its texts and tokens if they are selected, and its prompt to the prefix `common` of all prompts."""
        if prompt:
            self.common = prompt if self.common is None else shared(self.common, prompt)
        tokens = rollouts if number in self.selection.tokens else []
        chunk_slot = self.chunks.add(prompt, columns, completions, tokens) if number in self.selection.texts else None
        self.rows.append(Row(group=number, prompt=prompt[:EXCERPT], rollouts=tuple(samples), chunk_slot=chunk_slot, **fields))


def newest_groups(view: RunView) -> list[int]:
    """Return the groups of the newest step, or before the first one those with rewards; of more than `NEWEST` the last."""
    scored = (group for group, facts in view.groups.items() if facts.reward_mean is not None)
    return sorted(view.steps[max(view.steps)].groups if view.steps else scored)[-NEWEST:]


def choose(view: RunView, *, samples: int, tokens: int, text_tokens: int) -> Selection:
    """Select the newest groups for a page: at most `samples` are listed, `text_tokens` have texts, and `tokens` are shown one by one."""
    listed, texts, detailed = set[int](), set[int](), set[int]()
    for number in sorted(group_statuses(view), reverse=True):
        sample_tokens = view.samples.get(number, {})
        outcome = view.groups.get(number)
        samples -= max(1, len(sample_tokens))
        size = max(sum(sample_tokens.values()), outcome.tokens if outcome else 0)
        tokens, text_tokens = tokens - size, text_tokens - size
        if samples < 0:
            break
        listed.add(number)
        if text_tokens >= 0:
            texts.add(number)
        if tokens >= 0 and text_tokens >= 0:
            detailed.add(number)
    return Selection(frozenset(listed), frozenset(texts), frozenset(detailed))
