"""Where a trainer resumes, and its policy there: the newest usable checkpoint, then the committed steps after it, repeated from the log.

It starts from the newest step's resume point, which saves reading all of the ledger; if that or a record it names is missing, everything
is read. A repeated step must give the bits of the ledger. Any difference stops the run, or under `trainer.on_mismatch = "rebase"` is
recorded with both values, and the run continues from the repeated weights.
"""

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from penstock.infra import faults
from penstock.infra.errors import RecordMissing, Unrecoverable
from penstock.infra.log import Log
from penstock.pipeline.learner.ledger_history import LedgerHistory, read_ledger_history, read_planned
from penstock.pipeline.learner.policy_trainer import (
    Difference,
    PolicyTrainer,
    Repetition,
    arithmetic_of,
    changed_arithmetic,
    other_weights,
    rebases,
    repeat,
)
from penstock.pipeline.runtime.factories import open_store
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.topic_reader import between
from penstock.pipeline.scheduling.resume_point import ResumePoint, resume_point_of
from penstock.topics import ledger, weights
from penstock.topics.groups import Group
from penstock.topics.ledger import Entry
from penstock.topics.metrics import Activity
from penstock.topics.weights import Manifest
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record
from penstock.workers.trainer.run_writer import RunWriter


class OlderNeeded(Exception):
    """No checkpoint within the ledger entries read so far can be used, so the full ledger must be read."""


def recover(policy: PolicyTrainer, writer: RunWriter, past: LedgerHistory) -> None:
    """Bring a new policy to the last step of the ledger: load the newest usable checkpoint, and repeat the steps after it.

    Returns early if the worker is stopped. Raises `Unrecoverable` if a repeated step differs and the run does not rebase, `LogError` if
    the log cannot be read, and `OlderNeeded` if `past` starts after the first step to repeat.
    """
    done, reporter, started = past.steps_done, writer.session.reporter, time.monotonic()
    if not done:
        return
    now = arithmetic_of(policy.backend, policy.config)
    if changed := changed_arithmetic(past.entries, now):
        text = ", ".join(f"{name} {recorded} -> {here}" for name, (recorded, here) in changed.items())
        reporter.notify(f"the arithmetic differs from that of the run so far, so repeated steps may differ: {text}")
    if (store := writer.checkpoints.store) is not None:
        at_most = writer.lost.step if writer.lost is not None else None  # a lost version is sent again at its own step
        doing = partial(reporter.doing, Activity.START, now=True)
        state = policy.load_newest(store, past.recorded(), notify=reporter.notify, doing=doing, at_most=at_most)
        if state is not None:
            writer.checkpoints.saved_steps = state.steps
            reporter.values.update(step=state.steps, version=state.version)
            if writer.lost is not None and writer.lost.step == state.steps:
                writer.publish(policy.weights(), version=writer.lost.version, step=state.steps)
        policy.release_weights()
    loaded, loading_s = policy.steps_done, time.monotonic() - started
    if loaded < past.first_step:
        raise OlderNeeded(f"no checkpoint has step {past.first_step} or a later one, so earlier steps must be repeated")
    faults.reach("recovery.loaded")
    differences = _repeat(policy, writer, past.steps[loaded - past.first_step :], stop=not rebases(policy.config, changed, now))
    if policy.steps_done < done:
        return
    if differences or changed:
        writer.rebase(policy, differences=differences, changed=changed, fingerprint=now)
    took, repeated = time.monotonic() - started, done - loaded
    reporter.values.update(recovered_from_step=loaded, repeated_steps=repeated, recovery_s=took)
    origin = f"checkpoint of step {loaded} loaded in {loading_s:.1f} s" if loaded else "no checkpoint to start from"
    reporter.notify(f"recovered in {took:.1f} s: {origin}, {repeated} of {done} steps repeated from the log")


def _repeat(policy: PolicyTrainer, writer: RunWriter, steps: list[Entry], *, stop: bool) -> list[tuple[Entry, Difference]]:
    """Repeat these steps; return (step's entry, difference) for all differences from the ledger, or with `stop` raise `Unrecoverable`."""
    reporter, mismatches = writer.session.reporter, list[tuple[Entry, Difference]]()
    for entry in steps:
        if writer.session.stop.is_set():
            break
        reporter.doing(Activity.START, f"repeating step {entry.step} of {writer.state.steps}")
        reporter.status()
        repetition = repeat(policy, entry, _groups_of(entry, writer))
        differences = _all_differences(policy, writer, repetition)
        if differences and stop:
            command = f"penstock run --resume {writer.session.run} --set trainer.on_mismatch=rebase"
            raise Unrecoverable(
                f"step {entry.step} repeated from the log gave {' and '.join(map(str, differences))}. Restore the arithmetic "
                f"(package versions, threads, device), or continue with the difference recorded: {command}"
            )
        mismatches += [(entry, difference) for difference in differences]
        if not mismatches:
            writer.after_step(policy)
        policy.release_weights()
        faults.reach("recovery.repeated")
    return mismatches


def _groups_of(entry: Entry, writer: RunWriter) -> list[Group]:
    """Read the groups that a step was trained on. Raises `Unrecoverable` if they were deleted."""
    session = writer.session
    try:
        return read_planned(session.log, session.run, entry.plan)
    except RecordMissing as error:
        raise Unrecoverable(
            f"step {entry.step} must be repeated, because no later checkpoint can be read here, but its groups were deleted from the log "
            f"({error}): restore the run's checkpoints, or continue from a published version: penstock fork {session.run}"
        ) from error


def _all_differences(policy: PolicyTrainer, writer: RunWriter, repetition: Repetition) -> list[Difference]:
    """Differences of a repeated step from its ledger entry or, if that has no weights digest, from the version published after the step."""
    published, differences, done = writer.state.manifests.get(policy.version), list(repetition.differences), policy.steps_done
    unchecked = repetition.entry.digest is None and published is not None and published.step == done
    if unchecked and published is not None and (here := repetition.weights.digest) != published.digest:
        differences.append(other_weights(here, published.digest))
    return differences


NEWEST = (16, 256)
"""Offsets at the end of the ledger among which the newest step is searched: first few of them, then more."""
CHECKPOINTS = 2
"""Checkpoints a trainer can load without reading everything: the newest, and the one before in case that is damaged."""
ANCHORS = 2
"""Anchor versions, at most as new as those checkpoints, from which on manifests are read."""


@dataclass(slots=True)
class ResumeOffsets:
    """Offsets of checkpoint entries and anchor manifests, which later resume points refer to."""

    steps: dict[int, int] = field(default_factory=dict)
    """Steps done -> offset of the entry that committed the last of them."""
    anchors: dict[int, int] = field(default_factory=dict)
    """Anchor version -> offset of its first manifest."""
    manifests: dict[int, int] = field(default_factory=dict)
    """Version since the oldest of these anchors -> offset of its first manifest."""
    rebased: int | None = None

    def checkpoints(self, saved: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """The newest checkpoints of `saved` with a recorded offset, newest first; forgets older offsets."""
        recorded = [(steps, self.steps[steps]) for steps in saved if steps in self.steps][:CHECKPOINTS]
        if recorded:
            self.steps = {steps: at for steps, at in self.steps.items() if steps >= recorded[-1][0]}
        return tuple(recorded)

    def note_manifest(self, manifest: Manifest | None, offset: int) -> None:
        """Record the offset of a version's first manifest, and that it is an anchor, from which on versions can be read."""
        if manifest is not None:
            first = self.manifests.setdefault(manifest.version, offset)
            if manifest.begins_chain:
                self.anchors.setdefault(manifest.version, first)

    def anchor(self, version: int) -> tuple[int, int]:
        """(version, offset) of the anchor that is `ANCHORS` anchors before `version`, or of the first; forgets older ones."""
        older = sorted(recorded for recorded in self.anchors if recorded <= version)[-ANCHORS:]
        first = older[0] if older else 0
        self.anchors, self.manifests = ({n: at for n, at in noted.items() if n >= first} for noted in (self.anchors, self.manifests))
        return first, self.anchors.get(first, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """State from which a trainer resumes: ledger, resume point and offsets."""

    past: LedgerHistory
    resume_point: ResumePoint | None = None
    """That of the newest step; None if everything was read."""
    later_stale: tuple[int, ...] = ()
    """Groups that became stale after that step."""
    offsets: ResumeOffsets = field(default_factory=ResumeOffsets)


def read_resumed(log: Log, run: str, *, saved: Sequence[int]) -> Resumed:
    """Read the ledger from the oldest usable checkpoint on, or all of it. Raises `LogError`.

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
    """Ledger offset and entry of the newest committed step; None if it is not among the last offsets before `end`."""
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
    """The entries before offset `start` that describe the arithmetic of the run: its opening, and the newest change."""
    opening = list(itertools.islice((entry for _, entry in _entries(log, run, 0, NEWEST[-1]) if entry.kind == "run-opened"), 1))
    ledger_state.opened = opening[0] if opening else None
    rebased = start if resume_point.rebased is None else resume_point.rebased
    return [*opening, *(entry for _, entry in _entries(log, run, rebased, min(rebased + 1, start)))]


def _from(log: Log, run: str, start: int, end: int, first_step: int, ledger_state: LedgerState, offsets: ResumeOffsets) -> Iterator[Entry]:
    """Apply the entries from `start`, the offset of step `first_step - 1`, to the state and to `offsets`; yield those after it."""
    for record, entry in _entries(log, run, start, end):
        if record.offset == start:
            ledger_state.last_seq, ledger_state.steps = entry.seq - 1, first_step - 1
        if ledger_state.take(entry) is None:
            continue
        ledger_state.head = ledger.digest(record.value)
        if entry.kind == "step" and entry.step is not None:
            offsets.steps[entry.step + 1] = record.offset
        if entry.kind == "rebased":
            offsets.rebased = record.offset
        if record.offset > start:
            yield entry


def _read_manifests(log: Log, run: str, resume_point: ResumePoint, ledger_state: LedgerState, offsets: ResumeOffsets) -> None:
    """Apply the manifests that a resume point needs, and that of version 0, to the ledger state and to `offsets`."""
    topic = (f"{run}.weights", 0)
    end = log.end_offsets([topic])[topic]
    if resume_point.manifests:
        for record in itertools.islice(_records(log, topic, 0, end), 1):
            ledger_state.apply(record)
        ledger_state.newest_version = resume_point.version - 1
    for record in _records(log, topic, resume_point.manifests, end):
        with contextlib.suppress(Unusable):
            manifest = weights.read(record, run=run)[1]
            ledger_state.take(manifest)
            offsets.note_manifest(manifest, record.offset)


def _entries(log: Log, run: str, start: int, end: int) -> Iterator[tuple[Record, Entry]]:
    """Yield the usable ledger entries at these offsets, each with its record; a repeated entry too."""
    for record in _records(log, (f"{run}.ledger", 0), start, end):
        with contextlib.suppress(Unusable):
            yield record, ledger.read(record, run=run)[1]


def _records(log: Log, at: tuple[str, int], start: int, end: int) -> Iterable[Record]:
    """The records of a partition from `start` to before `end`, as far as these offsets exist."""
    start, end = max(start, log.beginning_offsets([at])[at]), min(end, log.end_offsets([at])[at])
    return between(log, at, start, end)


def saved_steps(session: Session) -> list[int]:
    """Steps of the existing checkpoints, newest first."""
    store = open_store(session.config, session.run)
    return [] if store is None else store.steps()
