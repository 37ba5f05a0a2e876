"""The folded state of a run: the same from any interleaving, unmoved by repeats and by records that say nothing."""

from dataclasses import replace

import pytest

from penstock.pipeline.inspect.report.summary import summarise
from penstock.pipeline.inspect.run_status import closing, has_ended, last_reward, status_of, steps_planned
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.topics import weights
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record
from tests.support.a_run import CREATED_S, RUN, RecordBuilder, as_records, folded, interleaved, outgoing, stored, view_of
from tests.support.strategies import a_manifest


def test_the_state_of_a_whole_run_is_read_from_its_records() -> None:
    view = view_of(RecordBuilder(steps=4).whole())
    assert status_of(view) == "finished"
    assert has_ended(view)
    assert sorted(view.steps) == [0, 1, 2, 3]
    assert view.version == 4
    assert len(view.admitted) == 10
    assert len(view.groups) == 10
    assert sum(map(len, view.samples.values())) == 40
    assert sorted(view.evals) == [0, 4]
    assert steps_planned(view) == 4
    assert all(worker.ended for worker in view.workers.values())


@pytest.mark.parametrize("seed", range(5))
def test_topics_may_be_interleaved_in_any_way(seed: int) -> None:
    records = as_records(RecordBuilder(steps=4).whole())
    view, expected = folded(interleaved(records, seed)), folded(records)
    for name in ("record", "closed", "steps", "versions", "groups", "samples", "admitted", "evals", "workers", "rewards"):
        assert getattr(view, name) == getattr(expected, name), name


def test_a_record_that_was_seen_before_changes_nothing_and_is_counted() -> None:
    records = as_records(RecordBuilder(steps=3).whole())
    view, once = RunView(run=RUN), folded(records)
    for record in records:
        view.fold(record)
        again = view.fold(replace(record, offset=record.offset + 1000))
        assert again is None or record.topic in ("penstock.runs", f"{RUN}.run")  # the last of these counts
    for name in ("steps", "samples", "groups", "workers", "rewards"):
        assert getattr(view, name) == getattr(once, name), name
    assert sum(view.duplicates.values()) == len([record for record in records if record.topic not in ("penstock.runs", f"{RUN}.run")])
    assert not once.duplicates


def test_the_first_outcome_of_a_group_stands() -> None:
    builder = RecordBuilder()
    first = builder.group([1.0, 0.0], version=0)
    builder.next_group = 0
    second = builder.group([0.0, 0.0], version=0, outcome="filtered")
    view = view_of([*first, *second])
    assert view.groups[0].outcome == "scored"
    assert view.duplicates == {"prompts": 1, "rollouts": 2, "groups": 1}


@pytest.mark.parametrize("topic", ["ledger", "metrics", "groups", "prompts", "rollouts", "dead-letters"])
def test_an_unusable_record_is_refused_and_leaves_the_state_alone(topic: str) -> None:
    view, before = RunView(run=RUN), RunView(run=RUN)
    with pytest.raises(Unusable):
        view.fold(Record(topic=f"{RUN}.{topic}", partition=0, offset=0, timestamp_ms=0, key=None, headers=(), value=b"noise"))
    assert view == before


def test_records_of_other_runs_in_the_register_are_nobodys_business() -> None:
    other = RecordBuilder(run="other").record()
    assert RunView(run=RUN).fold(as_records([other])[0]) is None
    with pytest.raises(Unusable):
        RunView(run=RUN).fold(replace(as_records([other])[0], key=RUN.encode()))


def test_an_id_is_free_again_once_the_run_that_had_it_is_deleted() -> None:
    first, again = RecordBuilder().record("finished"), RecordBuilder(created_s=CREATED_S + 60).record()
    built = [first, replace(first, headers=(), value=b""), again]
    assert view_of(built[:2]).record is None
    assert status_of(view_of(built)) == "created"


def test_the_last_state_in_the_register_counts_whatever_its_writers_clock_says() -> None:
    late, early = RecordBuilder(created_s=CREATED_S + 300).record("stopped"), RecordBuilder().record("running")
    assert status_of(view_of([late, early])) == "running"


def test_a_restarted_worker_keeps_its_totals_and_is_not_ended() -> None:
    builder = RecordBuilder()
    built = [builder.measured_by("rollout-0", samples=5.0), builder.measured_by("rollout-0", "final", samples=7.0)]
    builder.now_s -= 3600  # it begins again on a machine whose clock is an hour behind
    built.append(builder.measured_by("rollout-0", incarnation="b", samples=2.0))
    built.append(builder.measured_by("rollout-0", samples=7.0))  # a word of the first that comes late
    worker = view_of(built).workers["rollout-0"]
    assert worker.total("samples") == 9.0
    assert worker.values["samples"] == 2.0
    assert not worker.ended


def test_a_rate_is_taken_over_the_time_between_statuses() -> None:
    builder, built = RecordBuilder(), []
    for count in range(4):
        built.append(builder.measured_by("rollout-0", samples=10.0 * count))
        builder.now_s += 0.5
    worker = view_of(built).workers["rollout-0"]
    assert worker.rate("samples") == pytest.approx(20.0)
    assert worker.rate("nothing") is None


def test_the_status_comes_from_the_ledger_before_the_register() -> None:
    builder = RecordBuilder()
    assert status_of(view_of([builder.record()])) == "created"
    opened = builder.opened()
    assert status_of(view_of([builder.record(), opened])) == "running"
    assert status_of(view_of([builder.record("failed")])) == "failed"
    view = view_of([builder.record("running"), opened, builder.closed("stopped", steps=1, reason="asked to")])
    assert (status_of(view), closing(view)["reason"]) == ("stopped", "asked to")


def test_an_entry_beyond_a_gap_is_refused_and_the_true_ones_count_all_the_same() -> None:
    builder = RecordBuilder()
    built = [builder.opened(), builder.version(0)]
    builder.seq = 900
    forged = builder.entry("stale", groups=(1, 2, 3))
    builder.seq = 2
    built += [builder.step(0, [0, 1], begun_s=builder.now_s), builder.closed()]
    records = as_records([*built[:2], forged, *built[2:]])
    view, state = RunView(run=RUN), LedgerState(RUN)
    for apply in (view.fold, state.apply):
        for place, record in enumerate(records):
            if place == 2:
                with pytest.raises(Unusable, match="entry 900 follows entry 1") as error:
                    apply(record)
                assert error.value.kind == "mismatch"
            else:
                assert apply(record) is not None
    assert status_of(view) == "finished"
    assert (list(view.steps), view.stale, state.steps, state.stale) == ([0], set(), 1, set())


def test_a_measurement_numbered_far_ahead_does_not_silence_its_worker() -> None:
    builder = RecordBuilder()
    built = [builder.measured_by("rollout-0", samples=1.0)]
    builder.measured["rollout-0a"] = 10**12
    built.append(builder.measured_by("rollout-0", samples=2.0))
    builder.measured["rollout-0a"] = 1
    built += [builder.measured_by("rollout-0", samples=3.0), built[0], built[1]]
    view = view_of(built)
    assert view.workers["rollout-0"].values["samples"] == 3.0
    assert view.duplicates["metrics"] == 2


def test_a_version_that_was_not_published_is_refused() -> None:
    def manifest(version: int) -> Record:
        return stored(outgoing(weights, replace(a_manifest(), version=version)), version)

    state = LedgerState(RUN)
    for version in (900, 1):
        with pytest.raises(Unusable, match=f"version {version} follows -1"):
            state.apply(manifest(version))
    assert [state.apply(manifest(version)) is not None for version in (0, 1, 1, 0)] == [True, True, False, False]
    assert state.newest_version == 1


def test_the_last_reward_is_that_of_the_last_tenth_of_the_steps_as_in_the_report() -> None:
    view = view_of(RecordBuilder(steps=30).whole())
    assert last_reward(view) == summarise(view)["reward"]["last"]
    assert view.rewards[29].mean == 1.0
    assert (last_reward(view) or 0.0) < 1.0
