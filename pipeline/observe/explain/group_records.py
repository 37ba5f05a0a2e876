"""All that a run's topics hold about one group: the records that count, those that say the same again, and those nobody could use.

The rule: of records that say the same twice the first counts, as for the workers; what has killed its readers is not decoded here.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.infra.errors import LogError
from penstock.infra.log import Log
from penstock.pipeline.config.load import Config, ConfigError, from_json
from penstock.pipeline.learner.ledger_history import Past, read_past
from penstock.pipeline.runtime.run_registry import find
from penstock.pipeline.runtime.topic_reader import scan
from penstock.topics import dead_letters, groups, prompts, rollouts
from penstock.topics.dead_letters import DeadLetter
from penstock.topics.groups import Group
from penstock.topics.prompts import Prompt
from penstock.topics.rollouts import Rollout
from penstock.topics.runs import RunRecord
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import Record

Place = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A dead letter and where it stands; without the payload of the refused record, which may be large."""

    offset: int
    letter: DeadLetter

    @property
    def place(self) -> Place:
        """Where the refused record stands."""
        return self.letter.topic, self.letter.partition, self.letter.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A group's outcome, from the records of all its parts."""

    records: tuple[Record, ...]
    headers: Headers
    group: Group | None
    """None where its payload cannot be decoded; the headers are beyond doubt then."""


@dataclass(slots=True, kw_only=True)
class Run:
    """What stands in the small topics of a run."""

    run: str
    record: RunRecord | None
    config: Config
    past: Past
    letters: list[Letter]

    @property
    def killers(self) -> set[Place]:
        """Places of records that have ended the processes which decoded them."""
        return {found.place for found in self.letters if found.letter.kind == "killer"}

    @property
    def rescored_from(self) -> str | None:
        """The run whose prompts and samples it holds, if `penstock replay score` wrote it."""
        info = json.loads(self.record.info) if self.record is not None else {}
        return info.get("rescored_from", {}).get("run")

    @property
    def ended(self) -> bool:
        """Whether nothing more is to come."""
        return self.past.story.closed is not None or (self.record is not None and self.record.status in ("finished", "stopped", "failed"))


@dataclass(slots=True, kw_only=True)
class GroupRecords:
    """What stands about one group, each kind in the order of the log."""

    group: int
    partition: int
    prompts: list[tuple[Record, Prompt]] = field(default_factory=list)
    samples: list[tuple[Record, Rollout]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    unusable: list[tuple[Record, Unusable]] = field(default_factory=list)

    @property
    def drawn(self) -> dict[int, tuple[Record, Rollout]]:
        """Sample -> its first record."""
        found: dict[int, tuple[Record, Rollout]] = {}
        for record, rollout in self.samples:
            found.setdefault(rollout.sample, (record, rollout))
        return dict(sorted(found.items()))


def read_run(log: Log, run: str) -> Run:
    """The run's configuration, ledger, versions and dead letters. Raises `ValueError` for an unknown run, `LogError`."""
    _check_kept(log, run)
    record, past = find(log, run), read_past(log, run)
    opened = past.story.opened
    if record is None and opened is None:
        raise ValueError(f"no run {run!r} on this broker; see `penstock runs`")
    told = record.config if record is not None else json.dumps(json.loads((opened and opened.details) or "{}").get("config", {}))
    letters = []
    for found in scan(log, f"{run}.dead-letters"):
        try:
            letter = dead_letters.read(found, run=run)[1]
        except Unusable:
            continue
        letters.append(Letter(offset=found.offset, letter=replace(letter, value=b"")))
    return Run(run=run, record=record, config=from_json(told), past=past, letters=letters)


def _check_kept(log: Log, run: str) -> None:
    """Raise `LogError` where the ledger has lost its beginning: without it every group would look as if it waited."""
    place = (f"{run}.ledger", 0)
    begin = log.begin_offsets([place])[place] if log.partitions(place[0]) else 0
    if begin:
        raise LogError(f"{run}.ledger/0 has lost its offsets 0 to {begin - 1}: what became of the groups of {run} stands there")


def read_group(log: Log, found: Run, group: int, *, say: Callable[[str], None]) -> GroupRecords:
    """Everything about one group. Raises `ConfigError` for one that was never admitted, `LogError` for one whose prompt is gone."""
    say(f"reading the prompts of {found.run}")
    mine: GroupRecords | None = None
    for record in scan(log, f"{found.run}.prompts"):
        if claims(record, group):
            mine = mine or GroupRecords(group=group, partition=record.partition)
            _take_prompt(mine, record, found)
    if mine is None or not (mine.prompts or mine.unusable):
        raise missing(log, found.run, group)
    if mine.prompts:
        mine.partition = mine.prompts[0][0].partition
    say(f"reading partition {mine.partition} of rollouts and groups")
    for record in scan(log, f"{found.run}.rollouts", partitions=[mine.partition]):
        if claims(record, group):
            _take_sample(mine, record, found)
    mine.outcomes = list(_outcomes(log, found, mine))
    return mine


def claims(record: Record, group: int) -> bool:
    """Whether a record says that it is about this group, by key or header: a look that tells most of the others apart before any check."""
    return record.key == b"%d" % group or any(name == "group" and value == b"%d" % group for name, value in record.headers)


def missing(log: Log, run: str, group: int) -> Exception:
    """Why there is no prompt of this group: the broker has deleted it, or it was never admitted."""
    name, highest = f"{run}.prompts", -1
    for record in scan(log, name):
        with contextlib.suppress(Unusable):
            highest = max(highest, prompts.check(record, run=run).group or 0)
    begins = log.begin_offsets([(name, partition) for partition in range(log.partitions(name) or 0)])
    gone = [f"{topic}/{partition} begins at offset {offset}" for (topic, partition), offset in begins.items() if offset]
    if gone and group <= highest:
        return LogError(f"the prompt of group {group} is gone: the broker has deleted the beginning of the topic ({', '.join(gone)})")
    if highest < 0:
        return ConfigError(f"group {group} was never admitted: run {run} has no prompt yet")
    return ConfigError(f"group {group} was never admitted: the highest group of run {run} is {highest}")


def _take_prompt(mine: GroupRecords, record: Record, found: Run) -> None:
    try:
        if prompts.check(record, run=found.run).group == mine.group:
            mine.prompts.append((record, _decoded(prompts.read, record, found)))
    except Unusable as error:
        mine.unusable.append((record, error))


def _take_sample(mine: GroupRecords, record: Record, found: Run) -> None:
    try:
        if rollouts.check(record, run=found.run).group == mine.group:
            mine.samples.append((record, _decoded(rollouts.read, record, found)))
    except Unusable as error:
        mine.unusable.append((record, error))


def _outcomes(log: Log, found: Run, mine: GroupRecords) -> Iterator[Outcome]:
    """Each whole outcome."""
    parts = groups.Parts()
    for record in scan(log, f"{found.run}.groups", partitions=[mine.partition]):
        if not claims(record, mine.group):
            continue
        try:
            headers = groups.check(record, run=found.run)
        except Unusable as error:
            mine.unusable.append((record, error))
            continue
        if headers.group != mine.group:
            continue
        if (whole := parts.add(record, headers)) is None:
            continue
        try:
            group = _decoded(groups.read, whole, found)
        except Unusable as error:
            mine.unusable.append((whole[-1], error))
            group = None
        yield Outcome(records=tuple(whole), headers=headers, group=group)


def _decoded(reader: Callable[..., tuple[Any, Any]], records: Any, found: Run) -> Any:
    held = [records] if isinstance(records, Record) else records
    for record in held:
        if (record.topic, record.partition, record.offset) in found.killers:
            raise Unusable("it has ended the processes that decoded it", kind="killer")
    return reader(records, run=found.run)[1]


def place_of(record: Record | DeadLetter) -> str:
    """Where a record stands, for a person.

    Example:
        place_of(record)  # -> "rollouts/3/17"
    """
    return f"{record.topic.rpartition('.')[2]}/{record.partition}/{record.offset}"


def told_by(headers: Mapping[str, str], key: bytes | None) -> int | None:
    """The group that a refused record says it is about, None where it names none."""
    said = headers.get("group") or (key or b"").decode("ascii", "replace")
    return int(said) if said.isascii() and said.isdigit() and len(said) < 19 else None
