"""Reports what is stuck when a run has not advanced for `run.stall_s`, and again when the diagnosis changes.

It ends nothing but transactions whose end marker the cluster has lost, as they were decided.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from penstock.infra.errors import LogError
from penstock.infra.kafka.hanging import end_hanging, hanging_transactions
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Log, drain
from penstock.pipeline.inspect.live.frame import waiting_for as waits_of_workers
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.stall import Generated, RunSnapshot, Stuck, find, waiting_for
from penstock.topics import rollouts
from penstock.topics.wire.errors import Unusable

LOOK_EVERY_S = 15.0
"""Interval between diagnoses of a stalled run; each reads the samples of one group."""
READ_LIMIT_S = 10.0
UNBLOCK_AFTER_S = 20.0
"""A run that has not advanced for this long may wait for a hanging transaction; a search costs a few requests."""


@dataclass(slots=True)
class Watchdog:
    """Tracks when a run last made progress; the launcher calls `check` in a loop."""

    log: Log
    stall_s: float
    notify: Callable[[str], None]
    unblock: Callable[[], None] = lambda: None
    """Ends transactions whose end was lost; runs on a thread of its own."""
    _unblocked_s: float = 0.0
    _moved_ms: int = -1
    _moved_s: float = 0.0
    _looked_s: float = 0.0
    _notified: Stuck | None = None

    def check(self, view: RunView, *, silent: Mapping[str, float], outage_s: float, notes: Mapping[str, str]) -> None:
        """Report what is stuck if the run has not made progress for too long."""
        now_s = time.monotonic()
        if view.moved_ms != self._moved_ms:
            if self._notified is not None:
                self.notify(f"the run makes progress again, after {now_s - self._moved_s:.0f} s")
            self._moved_ms, self._moved_s, self._notified = view.moved_ms, now_s, None
        still_s = now_s - self._moved_s
        if still_s > UNBLOCK_AFTER_S and not outage_s and now_s - self._unblocked_s > LOOK_EVERY_S + UNBLOCK_AFTER_S:
            self._unblocked_s = now_s
            threading.Thread(target=self.unblock, daemon=True, name="unblock").start()
        if still_s < self.stall_s or now_s - self._looked_s < min(LOOK_EVERY_S, self.stall_s):
            return
        self._looked_s = now_s
        snapshot = RunSnapshot(view=view, now_s=time.time(), silent=silent, outage_s=outage_s, notes=notes)
        stuck = examine(self.log, snapshot)
        if stuck is not None and not stuck.same_as(self._notified):
            self._notified = stuck
            self.notify(f"{describe(stuck, still_s=still_s)}\n  meanwhile: {waits_of_workers(view, now_s=snapshot.now_s)}")


def unblock(log: KafkaLog, run: str, notify: Callable[[str], None]) -> None:
    """Write the missing end markers of transactions in a run's topics, if the decision on each is recorded."""
    try:
        for transaction in hanging_transactions(log, log.topics(f"{run}.")):
            if transaction.committed is None:
                notify(f"{transaction}. End it with: penstock topics unblock {run}")
            else:
                end_hanging(log, transaction, commit=transaction.committed)
                notify(f"{transaction}; the end marker has now been written")
    except LogError as error:
        notify(f"cannot search for hanging transactions, which may block the run: {error}")


def examine(log: Log, snapshot: RunSnapshot) -> Stuck | None:
    """Diagnose what the run waits for; reads the samples of the group that the next step needs."""
    group = None if snapshot.outage_s else waiting_for(snapshot.view)
    opened = None if group is None else snapshot.view.open.get(group)
    if group is not None and opened is not None:
        with contextlib.suppress(LogError):  # diagnose without the samples, from the workers' reports
            snapshot = replace(snapshot, generated=_samples(log, snapshot.view.run, group, opened.partition))
    return find(snapshot)


def describe(stuck: Stuck, *, still_s: float) -> str:
    """The diagnosis as two lines for the user."""
    where = stuck.stage if stuck.group is None else f"{stuck.stage}, group {stuck.group}"
    return f"the run has made no progress for {still_s:.0f} s; stuck: {where}\n  {stuck.reason}"


def _samples(log: Log, run: str, group: int, partition: int) -> Generated:
    """The number of a group's samples in the log, and the time of the newest, read from the scorer's committed offset on."""
    partition_read = (f"{run}.rollouts", partition)
    with contextlib.closing(log.tail({partition_read: "earliest"}, group=f"{run}.scorer")) as tail:
        committed = tail.committed(READ_LIMIT_S)[partition_read].offset
        if committed is not None:
            tail.seek(partition_read, committed)
        key = str(group).encode()
        ends = log.end_offsets([partition_read])
        records = [record for record in drain(tail, ends, silence_s=READ_LIMIT_S) if record.key == key]
    numbers = set[int]()
    for record in records:
        with contextlib.suppress(Unusable):
            numbers |= rollouts.tokens_of(rollouts.check(record, run=run)).keys()
    return Generated(samples=len(numbers), newest_s=max((record.timestamp_ms / 1000 for record in records), default=None))
