"""What a trainer starts from: by the newest step's mark the end of the ledger and not all of it.

The rule: where the mark or what it names is missing, everything is read.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.infra.log import Log
from penstock.pipeline.learner.ledger_history import LedgerHistory, read_ledger_history
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.topic_reader import between
from penstock.pipeline.scheduling.resume_point import ResumePoint, resume_point_of
from penstock.topics import ledger, weights
from penstock.topics.ledger import Entry
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record

NEWEST = (16, 256)
"""Offsets at the end of the ledger among which the newest step's entry is looked for: first few of them, and more if it is not there."""
CHECKPOINTS = 2
"""Checkpoints a trainer can come back to without reading everything: the newest, and the one before should that be damaged."""
ANCHORS = 2
"""Versions that begin a chain, at most as new as those checkpoints, from which on manifests are read."""


@dataclass(slots=True)
class Places:
    """Where the entries and manifests stand that a later mark has to name."""

    steps: dict[int, int] = field(default_factory=dict)
    """Steps done -> offset of the entry that committed the last of them."""
    anchors: dict[int, int] = field(default_factory=dict)
    """Versions that begin a chain -> offset of the manifest."""
    rebased: int | None = None

    def checkpoints(self, saved: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """The newest checkpoints of `saved`, newest first, whose place is known; forgets the older places."""
        known = [(steps, self.steps[steps]) for steps in saved if steps in self.steps][:CHECKPOINTS]
        if known:
            self.steps = {steps: at for steps, at in self.steps.items() if steps >= known[-1][0]}
        return tuple(known)

    def anchor(self, version: int) -> tuple[int, int]:
        """(version, offset) of what begins a chain `ANCHORS` such versions before `version`, or of the first; forgets the older ones."""
        older = sorted(known for known in self.anchors if known <= version)[-ANCHORS:]
        first = older[0] if older else 0
        self.anchors = {known: at for known, at in self.anchors.items() if known >= first}
        return first, self.anchors.get(first, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What a trainer starts from."""

    past: LedgerHistory
    resume_point: ResumePoint | None = None
    """That of the newest step; None where everything was read."""
    later_stale: tuple[int, ...] = ()
    """Groups found too old after that step."""
    places: Places = field(default_factory=Places)


def read_resumed(log: Log, run: str, *, saved: Sequence[int]) -> Resumed:
    """The end of the ledger from the oldest checkpoint a trainer may go back to, or all of it. Raises `LogError`.

    `saved` are the steps of the checkpoints that exist, newest first.
    """
    topic = (f"{run}.ledger", 0)
    end = log.end_offsets([topic])[topic]
    newest_at, newest = _newest_step(log, run, end) or (0, None)
    resume_point = resume_point_of(newest) if newest is not None else None
    if newest is None or newest.step is None or resume_point is None:
        return Resumed(past=read_ledger_history(log, run))
    # A checkpoint of the newest step itself, as an orderly stop leaves it, was written behind the mark.
    known = [place for place in ((newest.step + 1, newest_at), *resume_point.checkpoints) if place[0] in saved]
    if not known:
        return Resumed(past=read_ledger_history(log, run))
    first_step, begin = known[-1]
    ledger_state, places = LedgerState(run), Places(rebased=resume_point.rebased)
    entries = [*_before(log, run, resume_point, begin, ledger_state), *_from(log, run, begin, end, first_step, ledger_state, places)]
    _read_manifests(log, run, resume_point, ledger_state, places)
    later = [entry for entry in entries if entry.kind == "stale" and entry.seq > newest.seq]
    return Resumed(
        past=LedgerHistory(entries=entries, ledger_state=ledger_state, first_step=first_step),
        resume_point=resume_point,
        later_stale=tuple(group for entry in later for group in entry.groups),
        places=places,
    )


def _newest_step(log: Log, run: str, end: int) -> tuple[int, Entry] | None:
    """The entry that committed the newest step, and its offset; None where the end of the ledger has none."""
    for offsets in NEWEST:
        newest, last_seq = None, -1
        for record, entry in _entries(log, run, end - offsets, end):
            if entry.seq > last_seq:  # not one that a broker or a stranger repeats
                last_seq = entry.seq
                newest = (record.offset, entry) if entry.kind == "step" else newest
        if newest is not None:
            return newest
    return None


def _before(log: Log, run: str, resume_point: ResumePoint, begin: int, ledger_state: LedgerState) -> list[Entry]:
    """The entries before offset `begin` that say with which arithmetic the run is computed."""
    opening = list(itertools.islice((entry for _, entry in _entries(log, run, 0, NEWEST[-1]) if entry.kind == "run-opened"), 1))
    ledger_state.opened = opening[0] if opening else None
    rebased = (
        ()
        if resume_point.rebased is None or resume_point.rebased >= begin
        else _entries(log, run, resume_point.rebased, resume_point.rebased + 1)
    )
    return [*opening, *(entry for _, entry in rebased)]


def _from(log: Log, run: str, begin: int, end: int, first_step: int, ledger_state: LedgerState, places: Places) -> Iterator[Entry]:
    """The entries behind that which committed the step before `first_step`, which stands at `begin`."""
    for record, entry in _entries(log, run, begin, end):
        if record.offset == begin:
            ledger_state.last_seq, ledger_state.steps = entry.seq - 1, first_step - 1
        if ledger_state.take(entry) is None:
            continue
        if entry.kind == "step" and entry.step is not None:
            places.steps[entry.step + 1] = record.offset
        if entry.kind == "rebased":
            places.rebased = record.offset
        if record.offset > begin:
            yield entry


def _read_manifests(log: Log, run: str, resume_point: ResumePoint, ledger_state: LedgerState, places: Places) -> None:
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
            places.anchors.setdefault(manifest.version, record.offset)


def _entries(log: Log, run: str, begin: int, end: int) -> Iterator[tuple[Record, Entry]]:
    for record in _records(log, (f"{run}.ledger", 0), begin, end):
        try:
            yield record, ledger.read(record, run=run)[1]
        except Unusable:
            continue


def _records(log: Log, at: tuple[str, int], begin: int, end: int) -> Iterable[Record]:
    begin, end = max(begin, log.beginning_offsets([at])[at]), min(end, log.end_offsets([at])[at])
    return between(log, at, begin, end)
