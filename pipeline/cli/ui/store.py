"""Runs as the pages of `penstock ui` show them: each view is brought up to date by one thread at a time, and no run waits for another."""

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from penstock.infra.errors import LogError
from penstock.infra.log import Log, Partition, Start, Tail, read_to_current_end
from penstock.pipeline.archive.index.group_rows import STEPS
from penstock.pipeline.archive.index.queries import Filters, GroupList
from penstock.pipeline.archive.index.run_index import RunIndex
from penstock.pipeline.archive.index.segments import index_folder
from penstock.pipeline.inspect.live.completions import without_template
from penstock.pipeline.inspect.live.saved_view import newest
from penstock.pipeline.inspect.records.browse import TopicRow
from penstock.pipeline.inspect.report.summary import summarise
from penstock.pipeline.inspect.run_status import config_of, has_ended, last_reward, status_of
from penstock.pipeline.inspect.run_view import RunView, read_view
from penstock.pipeline.inspect.run_view_types import StepFacts
from penstock.pipeline.inspect.status import WATCHED, SteadyBottleneck, bottleneck
from penstock.pipeline.inspect.tables.run_tables import Advantages
from penstock.pipeline.inspect.tables.token_texts import TokenTexts
from penstock.pipeline.inspect.web import run_facts
from penstock.pipeline.inspect.web.build import Limits, index_of
from penstock.pipeline.inspect.web.groups import newest_groups
from penstock.pipeline.learner.ledger_history import with_later_parts
from penstock.pipeline.runtime.topic_reader import RunReader
from penstock.topics import groups
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.groups import Group
from penstock.topics.rollouts import generated
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import Record

PAGE = 100
"""Groups of a page of the list."""
SCANNED = 64
PAUSE = 25
"""The page of a live run is computed again after this many times the seconds that it took, so that it costs the run little."""
SEARCH_S = 3.0
"""Longest time of one search in texts; its result has the group after which to continue."""
OPEN_RUNS = 12
"""Most runs that are followed at a time; each takes memory for the offsets of its groups."""
MANY = 20_000
"""A run with so many groups is opened from the view that its tracker has saved, and the steps and offsets of its index."""
EXCERPT = 240
DETAILED_TOKENS = 40_000
"""Tokens of a group that are sent one by one; of a larger group the samples after that are sent when they are opened."""


class PayloadFilter(NamedTuple):
    """Conditions on a sample for which its payload must be read; "" matches every sample."""

    finish: str = ""
    worker: str = ""
    text: str = ""

    def fits(self, group: Group) -> bool:
        """True if a sample of the group meets all conditions; `text` may also be in the prompt."""
        text = self.text.lower()
        return any(
            (not self.finish or sample.rollout.finish == self.finish)
            and (not self.worker or sample.rollout.worker == self.worker)
            and (not text or text in sample.completion.lower() or text in group.prompt.lower())
            for sample in group.samples
        )


@dataclass(slots=True)
class WatchedRun:
    """One run: its view, and where the records of its groups are."""

    log: Log
    run: str
    lock: threading.RLock = field(default_factory=threading.RLock)
    _timeline: threading.Lock = field(default_factory=threading.Lock)
    view: RunView = field(init=False)
    _tail: Tail | None = None
    _closed: bool = False
    _restored: bool = False
    """True if the view is one that the tracker has saved, and what was folded after it."""
    _offsets: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Group -> partition and offset of its outcome's first part."""
    _index: RunIndex | None = None
    _list: tuple[int, GroupList] | None = None
    _bottleneck: SteadyBottleneck = field(default_factory=SteadyBottleneck)
    _texts: TokenTexts | None = None
    _advantages: Advantages | None = None
    _page: tuple[float, run_facts.Facts] | None = None
    _columns: tuple[float, int, bytes] | None = None
    topics_before: tuple[float, Mapping[str, TopicRow]] = (0.0, MappingProxyType({}))

    def __post_init__(self) -> None:
        self.view = RunView(run=self.run)

    def update(self) -> RunView:
        """Read the records since the last call, and return the run's view. Raises `LogError`."""
        with self.lock:
            if self._closed:  # a page that is being made shows the last state
                return self.view
            opened = self._tail is None
            if self._tail is None:
                names = [RUNS_TOPIC, f"{self.run}.run", *(f"{self.run}.{topic}" for topic in WATCHED)]
                starts: dict[Partition, Start] = {(name, at): "earliest" for name in names for at in range(self.log.partitions(name) or 0)}
                saved, since = newest(self.log, self.run)
                if len(saved.admitted) >= MANY:
                    self.view, self._restored, starts = saved, True, {**starts, **since}
                self._tail = self.log.tail(starts)
            for record in read_to_current_end(self.log, self._tail):
                with contextlib.suppress(Unusable):  # the role that owns reading the topic sends it to the dead letters
                    self._note(self.view.fold(record), record)
            if opened and self._restored:
                self._recall_steps()
            return self.view

    def _recall_steps(self) -> None:
        """Read the steps that a saved view no longer lists back from the index.

        Steps whose groups are in the view's totals keep no groups, which would be counted twice; the last step is still being counted.
        """
        table = self._indexed().steps()
        for row in table.set_column(table.column_names.index("committed"), "committed", table["committed"].cast("int64")).to_pylist():
            step, version, time_ns = row["step"], row["version"] or 0, row["committed"]
            if step not in self.view.steps:
                metrics = {name: value for name, value in row.items() if name not in STEPS.names and value is not None}
                self.view.steps[step] = StepFacts(step, version, time_ns / 1e9, (), metrics)
                self.view.past.steps -= 1
        for step in sorted(self.view.steps)[:-1]:
            if step < self.view.past.counted_steps:
                self.view.steps[step] = self.view.steps[step]._replace(groups=())

    def _note(self, folded: object, record: Record) -> None:
        """Remember where the outcome of a group is. `folded` is what `RunView.fold` returned for the record."""
        if isinstance(folded, Headers) and folded.group is not None and record.topic.endswith(".groups") and not folded.part:
            self._offsets.setdefault(folded.group, (record.partition, record.offset))

    def page(self) -> run_facts.Facts:
        """What the run's page shows; computed again at most once a second, and less often if that takes long."""
        with self.lock:
            started = time.monotonic()
            view = self.update()
            if self._page is None or (started >= self._page[0] and (self._page[1]["live"] or not has_ended(view))):
                slowest = self._bottleneck.update(bottleneck(view), now_s=time.time())
                page = run_facts.run_facts(view, summarise(view), now_s=time.time(), slowest=slowest)
                shown = list(self.read(newest_groups(view)).values())
                page |= {"cards": run_facts.cards(shown), "curves": run_facts.curves(view)}
                took = time.monotonic() - started
                self._page = time.monotonic() + max(1.0, PAUSE * took), page
            return self._page[1]

    def read(self, numbers: Sequence[int]) -> dict[int, Group]:
        """Decode the outcomes of these groups: number -> group, in the order of `numbers`, without deleted and undecodable ones."""
        positions = self._positions(numbers)
        wanted: dict[int, list[int]] = {}
        for partition, offset in positions.values():
            wanted.setdefault(partition, []).append(offset)
        records: dict[tuple[int, int], Record] = {}
        for partition, offsets in wanted.items():
            with contextlib.suppress(LogError):
                for record in self.log.read(f"{self.run}.groups", partition, sorted(offsets)):
                    records[partition, record.offset] = record
        decoded: dict[int, Group] = {}
        for number, position in positions.items():
            with contextlib.suppress(Unusable, ValueError, LogError):
                if position in records:
                    decoded[number] = groups.read(with_later_parts(self.log, self.run, records[position]), run=self.run)[1]
        return decoded

    def _positions(self, numbers: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Return group -> (partition, offset) of its outcome, in the order of `numbers`; groups before a saved view are in the index."""
        positions = {number: self._offsets[number] for number in numbers if number in self._offsets}
        if len(positions) < len(numbers) and self._restored:
            listed = self.groups()
            rows = np.flatnonzero(np.isin(listed.numbers("group"), numbers) & ~np.isnan(listed.numbers("offset")))
            columns = [listed.numbers(name)[rows].astype(int).tolist() for name in ("group", "partition", "offset")]
            positions |= {number: (partition, offset) for number, partition, offset in zip(*columns, strict=True)}
        return {number: positions[number] for number in numbers if number in positions}

    def groups(self) -> GroupList:
        """The groups of the run, from its index; computed again only if the run has moved on."""
        with self.lock:
            view = self.update()
            if self._list is None or self._list[0] != view.moved_ms:
                index = self._indexed()
                self._list = view.moved_ms, GroupList(index.groups(ended=has_ended(view)), dead_letters=index.dead_letters)
            return self._list[1]

    def _indexed(self) -> RunIndex:
        """The index of the run on this machine's disk, with all records up to now."""
        if self._index is None:
            created_ns = self.view.record.created_ns if self.view.record else 0
            self._index = RunIndex(self.run, directory=index_folder(self.run), created_ns=created_ns)
        self._index.catch_up(self.log)
        return self._index

    def row(self, number: int) -> dict[str, Any] | None:
        """The row of a group in the index; None if it was never admitted."""
        return next(iter(self.groups().page(Filters(group=(number, number)))["rows"]), None)

    def list_groups(self, where: Filters, payload: PayloadFilter, *, order: str = "newest", after: str | None = None) -> dict[str, Any]:
        """A page of the list, for JSON: `rows`, `matched` of `total` groups or those `searched`, and `next`, after which to continue."""
        listed = self.groups()
        if not any(payload):
            page = listed.page(where, order=order, after=after, limit=PAGE)
            return {"rows": _rows(page["rows"]), "matched": page["matching"], "searched": 0, "total": page["groups"], "next": page["next"]}
        matches: list[dict[str, Any]] = []
        searched, deadline = 0, time.monotonic() + SEARCH_S
        while True:
            page = listed.page(where, order=order, after=after, limit=SCANNED)
            with self.lock:
                read = self.read([row["group"] for row in page["rows"]])
            matches += [row for row in page["rows"] if row["group"] in read and payload.fits(read[row["group"]])]
            after, searched = page["next"], searched + len(page["rows"])
            if after is None or len(matches) >= PAGE or time.monotonic() > deadline:
                return {"rows": _rows(matches), "matched": None, "searched": searched, "total": page["groups"], "next": after}

    def detail(self, number: int, *, sample: int | None = None) -> dict[str, Any]:
        """A group with its texts, for JSON, {} if unknown; tokens are those of `sample`, or else of as many samples as are not too many."""
        with self.lock:
            view = self.update()
            row = self.row(number)
            if row is None:
                return {}
            if self._texts is None:
                self._texts, self._advantages = TokenTexts.of(view), Advantages(config_of(view), trust_code=False)
            group = self.read([number]).get(number)
            known = {"group": number, "status": row["status"], "step": row["step"], "run": self.run, "no_texts": self._texts.why_not}
            if group is None:
                return {**known, "prompt": row["prompt"], "columns": "{}", "samples": [], "reason": None}
            assert self._advantages is not None
            return {**known, **_group(group, self._texts, self._advantages, sample=sample)}

    def columns(self) -> bytes:
        """The columns of the timeline, as the one-file report contains them; read again when the run has moved on."""
        progress = self.update().moved_ms
        with self._timeline:  # the other pages of the run do not wait for it
            if self._columns is None or (self._columns[1] != progress and time.monotonic() > self._columns[0]):
                started = time.monotonic()
                packed = index_of(self.log, self.run, limits=Limits(tokens=0, text_tokens=0)).encode()
                took = time.monotonic() - started
                self._columns = time.monotonic() + 10 * took, progress, packed
            return self._columns[2]

    def close(self) -> None:
        with self.lock:
            self._closed = True
            if self._tail is not None:
                self._tail.close()
                self._tail = None


def _rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the index as the list of groups shows them: the start of each prompt, without the chat template."""
    prompts = sorted({row["prompt"] for row in rows})
    return [
        {
            **{name: row[name] for name in ("group", "step", "rewards", "status")},
            "reward": row["reward_mean"],
            "version": row["policy_version_min"],
            "prompt": without_template(row["prompt"], prompts)[:EXCERPT],
        }
        for row in rows
    ]


def _group(group: Group, texts: TokenTexts, advantages: Advantages, *, sample: int | None) -> dict[str, Any]:
    """Convert a group to plain data with texts and tokens; an unknown number is NaN, which the server sends as null."""
    samples, budget, ids = list[dict[str, Any]](), DETAILED_TOKENS, set[int]()
    for scored, advantage in zip(group.samples, advantages.of(group).tolist(), strict=True):
        rollout = scored.rollout
        budget -= len(rollout.token_ids) if sample is None else 0
        detailed = rollout.sample == sample if sample is not None else budget >= 0 or not samples
        ids.update(rollout.token_ids.tolist() if detailed else ())
        samples.append(
            {
                "sample": rollout.sample,
                "reward": scored.reward,
                "error": scored.reward_error,
                "components": list(scored.components),
                "advantage": advantage,
                "completion": scored.completion,
                "finish": rollout.finish,
                "worker": rollout.worker,
                "tokens": len(generated(rollout)),
                "versions": [rollout.version_min, rollout.version_max],
                "times": [rollout.started_ns // 1_000_000, rollout.ended_ns // 1_000_000],
                "turns": [[turn.source, turn.start, turn.end] for turn in rollout.turns] if rollout.turns else None,
                "detail": {
                    "ids": rollout.token_ids.tolist(),
                    "logprobs": [round(float(value), 3) for value in rollout.behaviour_logprobs],
                    "spans": [[int(at), int(version)] for at, version in zip(rollout.span_starts, rollout.span_versions, strict=True)],
                    "masked": [] if rollout.loss_mask.all() else (~rollout.loss_mask).nonzero()[0].tolist(),
                }
                if detailed
                else None,
            }
        )
    ordered = sorted(ids)
    words = dict(zip(ordered, texts.one_by_one(ordered), strict=True)) if texts.why_not is None else None
    return {
        "prompt": group.prompt,
        "columns": group.columns,
        "reason": group.reason,
        "row": group.row,
        "epoch": group.epoch,
        "created_ms": group.created_ns // 1_000_000,
        "scored_ms": group.scored_ns // 1_000_000,
        "reward_names": [name.rpartition(":")[2] for name in group.reward_names],
        "reward_weights": list(group.reward_weights),
        "advantage": {"name": advantages.name, "why_not": advantages.why_not},
        "samples": samples,
        "words": words,
    }


class Summary(NamedTuple):
    """Facts of a run in the list of runs."""

    status: str
    reward: float | None
    curve: list[float | None]
    solved: list[float | None]
    """Greedy accuracy on held-out data by evaluation."""


@dataclass(slots=True)
class Runs:
    """The runs of a log: those opened last with the offsets of their groups, the others as their trackers saved them."""

    log: Log
    _opened: OrderedDict[str, WatchedRun] = field(default_factory=OrderedDict)
    _ended: dict[str, Summary] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __getitem__(self, run: str) -> WatchedRun:
        """Return the run, opened if it is not; if too many are open, the least recently used one is closed."""
        with self._lock:
            watched = self._opened.setdefault(run, WatchedRun(self.log, run))
            self._opened.move_to_end(run)
            replaced = self._opened.popitem(last=False)[1] if len(self._opened) > OPEN_RUNS else None
        if replaced is not None:
            replaced.close()
        return watched

    def summary(self, run: str) -> Summary:
        """Facts of a run for the list, read without opening it. Raises `LogError`."""
        if run in self._opened:
            view = self[run].update()
        elif run in self._ended:
            return self._ended[run]
        else:
            saved, since = newest(self.log, run)
            view = saved if saved.closed else read_view(RunReader(self.log, run), topics=WATCHED, view=saved, since=since)
        rewards = [view.rewards[version].mean for version in sorted(view.rewards)]
        solved = [measured.values.get("greedy_accuracy") for _, measured in sorted(view.evals.items())]
        summary = Summary(status_of(view), last_reward(view), rewards, solved)
        if has_ended(view):
            self._ended[run] = summary
        return summary

    def close(self) -> None:
        for watched in self._opened.values():
            watched.close()
