"""Time in which no rollout worker is there costs a group nothing; a late prompt and a late marker cost no sample and no second outcome."""

import time
from collections import Counter
from typing import Any

import pytest

from penstock.infra.errors import LogError
from penstock.infra.log import Records
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.scheduling import rules
from penstock.pipeline.scheduling.rules import SILENT_S, Presence, WorkingClock, update_presence
from penstock.topics import groups, metrics
from penstock.workers.feeder.worker import Admission
from penstock.workers.scorer.worker import Scorer
from tests.support.a_run import RecordBuilder
from tests.support.scorers import PARTITIONS, HeldPool, Impatient, config_of, filled, outcomes, scorer_of
from tests.support.worker_set import records_of

RUN, TURN_S = "absent", 20.0


class Away:
    """A run whose scorer works on while rollout workers come and go, on a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.log, self.builder = time.monotonic(), MemoryLog(), RecordBuilder(RUN)
        monkeypatch.setattr(rules.time, "monotonic", lambda: self.now_s)
        filled(self.log, RUN, topics=("prompts",))
        self.feeder = Admission(RUN, PARTITIONS, LedgerState(RUN))
        self.pool = HeldPool()
        self.scorer = quiet(scorer_of(self.log, RUN, 0, self.pool, config_of()), longest_turn_s=TURN_S)
        self.reports = self.log.tail({(f"{RUN}.metrics", 0): "earliest"})
        self.scorer.turn()

    def passes(self, hours: float, *, reporting: bool) -> None:
        for _ in range(int(hours * 3600 / TURN_S)):
            self.now_s += TURN_S
            if reporting:
                labels = {"partitions": ",".join(map(str, range(PARTITIONS)))}
                self.log.producer().send(self.builder.measured_by("rollout-0", labels=labels, slots=16.0))
            self.feeder.presence.now_s = self.now_s
            for record in self.reports.poll(0.0):
                self.feeder.apply(record)
            self.scorer.turn()

    def ended(self) -> Counter[str]:
        found = (groups.check(record, run=RUN).outcome for record in records_of(self.log, f"{RUN}.groups"))
        return Counter(outcome for outcome in found if outcome is not None)


def quiet(scorer: Scorer, *, longest_turn_s: float = 1.0) -> Scorer:
    scorer.member = Impatient(scorer.member)  # type: ignore[assignment]
    scorer.reports.clock = WorkingClock(longest_turn_s=longest_turn_s)
    return scorer


@pytest.mark.parametrize("hours", [6, 24])
def test_a_group_is_not_abandoned_however_long_the_rollout_workers_are_away(monkeypatch: pytest.MonkeyPatch, hours: float) -> None:
    away = Away(monkeypatch)
    away.passes(0.1, reporting=True)
    away.passes(hours, reporting=False)  # killed: it has said nothing of its end
    assert away.ended() == {}
    owners, slots = away.feeder.presence.owners, away.feeder.presence.slots
    assert rules.choose_partition(unfinished=[0] * PARTITIONS, slots=slots, owners=owners) is None  # nobody to admit for
    away.passes(0.1, reporting=True)
    assert away.scorer.session.reporter.values["oldest_open_s"] > 60, "its alarm is for a person to set"
    filled(away.log, RUN, topics=("rollouts",))
    for _ in range(30):
        away.scorer.turn()
        away.pool.end(0)
    assert away.ended() == {"scored": 12}
    assert away.scorer.session.reporter.values["oldest_open_s"] == 0


def test_the_clock_of_a_group_runs_while_its_partitions_owner_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    away = Away(monkeypatch)
    away.passes(0.9, reporting=True)
    away.passes(6, reporting=False)
    away.passes(0.05, reporting=True)
    assert away.ended() == {}
    away.passes(0.1, reporting=True)
    assert away.ended() == {"abandoned": 12}


def test_an_owner_lasts_as_long_as_its_reports_and_a_final_one_ends_it_at_once() -> None:
    known = Presence(3)
    known.update("a", [0, 1], slots=4)
    known.update("b", [2], slots=4)
    assert (known.owners, known.slots) == (["a", "a", "b"], [2, 2, 4])
    known.now_s += SILENT_S
    known.update("b", [1], slots=4)
    assert known.owners == ["a", "b", None]
    known.now_s += 1
    assert known.owners == [None, "b", None]
    known.update("b", [], slots=4)
    assert known.owners == [None, None, None]


def says(known: Presence, incarnation: str, owned: str, kind: Any = "status") -> None:
    """A report of one of the processes named rollout-0."""
    report = RecordBuilder(RUN).measured_by("rollout-0", kind, incarnation=incarnation, labels={"partitions": owned})
    update_presence(known, metrics.decode(report.value))


def test_two_workers_of_one_name_keep_their_partitions_and_each_is_forgotten_when_it_ends() -> None:
    known = Presence(4)
    for _ in range(3):
        says(known, "here", "0,1")
        says(known, "there", "2,3")
        assert None not in known.owners
        known.now_s += SILENT_S / 2
    assert len(set(known.owners)) == 2
    says(known, "here", "0,1", kind="final")
    assert [owner is None for owner in known.owners] == [True, True, False, False]
    known.now_s += SILENT_S + 1  # killed: it has said nothing of its end
    says(known, "again", "2")
    assert [owner is None for owner in known.owners] == [True, True, False, True]


class WithoutPrompts(Impatient):
    """A member to whom the leader of `prompts` sends nothing, while that of `rollouts` does."""

    away = True

    def take(self, timeout_s: float) -> Any:
        events = super().take(timeout_s)
        if not self.away:
            return events
        held = [event for event in events if isinstance(event, Records)]
        prompts = [record for event in held for record in event.records if record.topic.endswith(".prompts")]
        self.kept = getattr(self, "kept", []) + prompts
        rest = [record for event in held for record in event.records if not record.topic.endswith(".prompts")]
        return [event for event in events if not isinstance(event, Records)] + [Records(records=rest)]


@pytest.mark.parametrize("log_answers", [True, False])
def test_samples_whose_prompts_are_late_are_no_orphans(monkeypatch: pytest.MonkeyPatch, log_answers: bool) -> None:
    log, now = MemoryLog(), [time.monotonic()]
    monkeypatch.setattr(rules.time, "monotonic", lambda: now[0])
    filled(log, RUN)
    pool = HeldPool()
    scorer = scorer_of(log, RUN, 0, pool, config_of())
    member = WithoutPrompts(scorer.member)
    scorer.member = member  # type: ignore[assignment]
    tail = log.tail

    def unanswered(*_: Any, **__: Any) -> Any:
        raise LogError("the partition has no leader")

    scorer.turn()
    if not log_answers:
        monkeypatch.setattr(log, "tail", unanswered)
    for _ in range(100):
        now[0] += 1.0
        scorer.turn()
    monkeypatch.setattr(log, "tail", tail)
    assert records_of(log, f"{RUN}.dead-letters") == []
    member.away = False
    for record in member.kept:
        scorer._received(record)
    for _ in range(30):
        scorer.turn()
        pool.end(0)
    assert outcomes(log, RUN) == Counter(range(12))


def test_a_sample_whose_prompt_is_not_in_the_log_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    log, now = MemoryLog(), [time.monotonic()]
    monkeypatch.setattr(rules.time, "monotonic", lambda: now[0])
    filled(log, RUN, topics=("rollouts",))
    scorer = quiet(scorer_of(log, RUN, 0, HeldPool(), config_of()))
    for _ in range(40):
        now[0] += 1.0
        scorer.turn()
    assert len(records_of(log, f"{RUN}.dead-letters")) == 24


def test_a_new_owner_waits_for_outcomes_that_its_predecessor_has_committed_and_nobody_can_read_yet() -> None:
    log = MemoryLog(markers_late_s=0.3)
    filled(log, RUN)
    old_pool, new_pool = HeldPool(), HeldPool()
    old = quiet(scorer_of(log, RUN, 0, old_pool, config_of()))
    old.turn()
    old_pool.end([group for _, _, group in old_pool.held].index(8))  # groups 0 and 4 of its partition are open: all three are read again
    old.turn()  # its commit returns; offsets are there, the marker in `groups` is late
    old.member.close()
    new = quiet(scorer_of(log, RUN, 1, new_pool, config_of()))
    for _ in range(30):
        new.turn()
        new_pool.end(0)
    tail = log.tail({(f"{RUN}.groups", partition): "earliest" for partition in range(PARTITIONS)})
    tail.read_to_end(include_open=True)
    assert outcomes(log, RUN) == Counter(range(12))
