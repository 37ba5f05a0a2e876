"""Where a trainer resumes: from the newest step's resume point, which saves reading all of the ledger.

If the resume point or a record that it names is missing, everything is read.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.infra.log import Log, Partition
from penstock.pipeline.learner.ledger_history import LedgerHistory, read_ledger_history
from penstock.pipeline.runtime.factories import open_store
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.topic_reader import between
from penstock.pipeline.scheduling import rules
from penstock.pipeline.scheduling.resume_point import ResumePoint, resume_point_of
from penstock.topics import ledger, weights
from penstock.topics.ledger import Entry
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record
from penstock.workers.trainer.group_inbox import GroupInbox

NEWEST = (16, 256)
"""Offsets at the end of the ledger among which the newest step is searched: first few of them, then more."""
CHECKPOINTS = 2
"""Checkpoints a trainer can load without reading everything: the newest, and the one before in case that is damaged."""
ANCHORS = 2
"""Anchor versions, at most as new as those checkpoints, from which on manifests are read."""


@dataclass(slots=True)
class ResumeOffsets:
    """Offsets of the entries and manifests that a later resume point names."""

    steps: dict[int, int] = field(default_factory=dict)
    """Steps done -> offset of the entry that committed the last of them."""
    anchors: dict[int, int] = field(default_factory=dict)
    """Anchor version -> offset of the manifest."""
    rebased: int | None = None

    def checkpoints(self, saved: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """The newest checkpoints of `saved` with a recorded offset, newest first; forgets older offsets."""
        recorded = [(steps, self.steps[steps]) for steps in saved if steps in self.steps][:CHECKPOINTS]
        if recorded:
            self.steps = {steps: at for steps, at in self.steps.items() if steps >= recorded[-1][0]}
        return tuple(recorded)

    def anchor(self, version: int) -> tuple[int, int]:
        """(version, offset) of the anchor that is `ANCHORS` anchors before `version`, or of the first; forgets older ones."""
        older = sorted(recorded for recorded in self.anchors if recorded <= version)[-ANCHORS:]
        first = older[0] if older else 0
        self.anchors = {recorded: at for recorded, at in self.anchors.items() if recorded >= first}
        return first, self.anchors.get(first, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """State that a trainer resumes from."""

    past: LedgerHistory
    resume_point: ResumePoint | None = None
    """That of the newest step; None if everything was read."""
    later_stale: tuple[int, ...] = ()
    """Groups that became stale after that step."""
    offsets: ResumeOffsets = field(default_factory=ResumeOffsets)


def read_resumed(log: Log, run: str, *, saved: Sequence[int]) -> Resumed:
    """The ledger from the oldest checkpoint a trainer may load on, or all of it. Raises `LogError`.

    `saved` are the steps of the existing checkpoints, newest first.
    """
    topic = (f"{run}.ledger", 0)
    end = log.end_offsets([topic])[topic]
    newest_at, newest = _newest_step(log, run, end) or (0, None)
    resume_point = resume_point_of(newest) if newest is not None else None
    if newest is None or newest.step is None or resume_point is None:
        return Resumed(past=read_ledger_history(log, run))
    # A checkpoint of the newest step itself, as an orderly stop leaves it, was written after the resume point.
    recorded = [checkpoint for checkpoint in ((newest.step + 1, newest_at), *resume_point.checkpoints) if checkpoint[0] in saved]
    if not recorded:
        return Resumed(past=read_ledger_history(log, run))
    first_step, start = recorded[-1]
    ledger_state, offsets = LedgerState(run), ResumeOffsets(rebased=resume_point.rebased)
    entries = [*_before(log, run, resume_point, start, ledger_state), *_from(log, run, start, end, first_step, ledger_state, offsets)]
    _read_manifests(log, run, resume_point, ledger_state, offsets)
    later = [entry for entry in entries if entry.kind == "stale" and entry.seq > newest.seq]
    return Resumed(
        past=LedgerHistory(entries=entries, ledger_state=ledger_state, first_step=first_step),
        resume_point=resume_point,
        later_stale=tuple(group for entry in later for group in entry.groups),
        offsets=offsets,
    )


def _newest_step(log: Log, run: str, end: int) -> tuple[int, Entry] | None:
    """The entry that committed the newest step, and its offset; None if the end of the ledger has none."""
    for offsets in NEWEST:
        newest, last_seq = None, -1
        for record, entry in _entries(log, run, end - offsets, end):
            if entry.seq > last_seq:  # no repetition
                last_seq = entry.seq
                newest = (record.offset, entry) if entry.kind == "step" else newest
        if newest is not None:
            return newest
    return None


def _before(log: Log, run: str, resume_point: ResumePoint, start: int, ledger_state: LedgerState) -> list[Entry]:
    """The entries before offset `start` that define the run's arithmetic."""
    opening = list(itertools.islice((entry for _, entry in _entries(log, run, 0, NEWEST[-1]) if entry.kind == "run-opened"), 1))
    ledger_state.opened = opening[0] if opening else None
    rebased = (
        ()
        if resume_point.rebased is None or resume_point.rebased >= start
        else _entries(log, run, resume_point.rebased, resume_point.rebased + 1)
    )
    return [*opening, *(entry for _, entry in rebased)]


def _from(log: Log, run: str, start: int, end: int, first_step: int, ledger_state: LedgerState, offsets: ResumeOffsets) -> Iterator[Entry]:
    """The entries after the one at `start`, which committed the step before `first_step`."""
    for record, entry in _entries(log, run, start, end):
        if record.offset == start:
            ledger_state.last_seq, ledger_state.steps = entry.seq - 1, first_step - 1
        if ledger_state.take(entry) is None:
            continue
        if entry.kind == "step" and entry.step is not None:
            offsets.steps[entry.step + 1] = record.offset
        if entry.kind == "rebased":
            offsets.rebased = record.offset
        if record.offset > start:
            yield entry


def _read_manifests(log: Log, run: str, resume_point: ResumePoint, ledger_state: LedgerState, offsets: ResumeOffsets) -> None:
    topic = (f"{run}.weights", 0)
    end = log.end_offsets([topic])[topic]
    first = list(itertools.islice(_records(log, topic, 0, end), 1)) if resume_point.manifests else []
    for record in first:
        ledger_state.apply(record)
    if resume_point.manifests:
        ledger_state.newest_version = resume_point.version - 1
    for record in _records(log, topic, resume_point.manifests, end):
        try:
            manifest = weights.read(record, run=run)[1]
            ledger_state.take(manifest)
        except Unusable:
            continue
        if manifest.begins_chain:
            offsets.anchors.setdefault(manifest.version, record.offset)


def _entries(log: Log, run: str, start: int, end: int) -> Iterator[tuple[Record, Entry]]:
    for record in _records(log, (f"{run}.ledger", 0), start, end):
        try:
            yield record, ledger.read(record, run=run)[1]
        except Unusable:
            continue


def _records(log: Log, at: tuple[str, int], start: int, end: int) -> Iterable[Record]:
    start, end = max(start, log.beginning_offsets([at])[at]), min(end, log.end_offsets([at])[at])
    return between(log, at, start, end)


def resume_point_at(
    session: Session, inbox: GroupInbox, offsets: ResumeOffsets, positions: Mapping[Partition, int], *, saved: Sequence[int]
) -> ResumePoint:
    """The resume point of a step that is about to be committed; `positions` are those of the trainer's tail."""
    selector, checkpoints = inbox.selector, offsets.checkpoints(saved)
    oldest = checkpoints[-1][0] if checkpoints else 0
    version, manifests = offsets.anchor(rules.version_after(oldest, steps_per_version=session.schedule.steps_per_version))
    open_groups = {(session.topic("groups"), partition): offset for partition, offset in inbox.restart_offsets().items()}
    return ResumePoint(
        below=selector.below,
        settled=tuple(sorted(selector.settled)),
        drops=selector.drops_to_resume,
        dropped=selector.drops,
        positions={partition_key(session, at): open_groups.get(at, position) for at, position in positions.items()},
        checkpoints=checkpoints,
        manifests=manifests,
        version=version,
        rebased=offsets.rebased,
        rewards=(inbox.scale.low, inbox.scale.high) if inbox.scale.low <= inbox.scale.high else (),
    )


def note_anchor(offsets: ResumeOffsets, record: Record, state: LedgerState) -> None:
    """Record the offset of an anchor's manifest."""
    with contextlib.suppress(Unusable):
        manifest = state.manifests.get(weights.check(record, run=state.run).policy_version_min or 0)
        if manifest is not None and manifest.begins_chain:
            offsets.anchors.setdefault(manifest.version, record.offset)


def saved_steps(session: Session) -> list[int]:
    """Steps of the existing checkpoints, newest first."""
    store = open_store(session.config, session.run)
    return [] if store is None else store.steps()


def partition_key(session: Session, at: Partition) -> str:
    """A partition's name in a resume point.

    Example:
        partition_key(session, ("demo.groups", 3))  # -> "groups/3"
    """
    return f"{at[0].removeprefix(f'{session.run}.')}/{at[1]}"
