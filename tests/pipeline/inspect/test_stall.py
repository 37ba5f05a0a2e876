"""Who is stuck, told from a run's records alone."""

from collections.abc import Iterable
from typing import Any

import pytest

from penstock.pipeline.inspect import stall
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.stall import Generated, RunSnapshot, Stuck
from penstock.topics.wire.record import Outgoing
from tests.support.a_run import CREATED_S, RecordBuilder, view_of

WORKERS = ("feeder", "rollout-0", "rollout-1", "scorer-0", "trainer")


class Told:
    """A run told up to some point, and who is stuck there."""

    def __init__(self, **schedule: Any) -> None:
        base = {"mode": "pipelined", "prompts_per_step": 2, "samples_per_prompt": 4, "steps_per_version": 1}
        self.builder = RecordBuilder(config={"schedule": {**base, **schedule}})
        self.records: list[Outgoing] = [self.builder.record()]

    def begun(self, *, version: bool = True, workers: Iterable[str] = WORKERS) -> "Told":
        self.records.append(self.builder.opened())
        if version:
            self.records.append(self.builder.version(0))
        return self.report(*workers)

    def report(self, *workers: str, doing: str = "working", **labels: str) -> "Told":
        self.records += [self.builder.measured_by(worker, labels={"doing": doing, **labels}) for worker in workers]
        return self

    def prompts(self, count: int) -> "Told":
        """Groups without an outcome yet."""
        for _ in range(count):
            prompt, *_ = self.builder.group([1.0] * 4, version=0)
            self.records.append(prompt)
        return self

    def group(self, outcome: str = "scored") -> "Told":
        self.records += self.builder.group([0.0, 1.0, 0.0, 1.0], version=0, outcome=outcome)
        return self

    def step(self, step: int, members: list[int]) -> "Told":
        self.records.append(self.builder.step(step, members, begun_s=CREATED_S))
        return self

    @property
    def view(self) -> RunView:
        return view_of(self.records)

    def stuck(self, **more: Any) -> Stuck:
        view = self.view
        now_s = view.moved_ms / 1000 + 312.0
        found = stall.find(RunSnapshot(view=view, now_s=now_s, silent=more.pop("silent", {}), **more))
        assert found is not None
        return found


def test_an_incomplete_group_names_the_silent_rollout_worker_that_owns_its_partition():
    built = Told().begun().report("rollout-0", partitions="1,2").report("rollout-1", doing="generating", partitions="0,3").prompts(2)
    found = built.stuck(silent={"rollout-1": 305.0, "rollout-0": 0.4}, generated=Generated(samples=3, newest_s=CREATED_S))
    assert (found.stage, found.group) == ("rollout", 0)
    assert "group 0 (partition 0): prompt admitted 313 s ago, 3 of 4 samples there" in found.reason
    assert "rollout-1 has not reported for 305 s (last activity: generating)" in found.reason
    assert "rollout-0" not in found.reason


def test_a_complete_group_without_an_outcome_names_its_scorer():
    built = Told().begun().report("scorer-0", doing="scoring").prompts(2)
    found = built.stuck(generated=Generated(samples=4, newest_s=built.view.moved_ms / 1000))
    assert (found.stage, found.group) == ("scorer", 0)
    assert "complete since 312 s; scorer-0: scoring" in found.reason


def test_the_lowest_unsettled_group_is_named_past_those_that_are_scored_or_dropped():
    built = Told().begun().group().group("filtered").prompts(2)
    assert built.stuck().group == 2
    assert built.stuck().reason.startswith("step 0 waits for group 2")


def test_a_group_beyond_the_next_step_is_not_what_it_waits_for():
    built = Told().begun().report("trainer", doing="training step 0").group().group().prompts(1)
    assert built.stuck() == Stuck(stage="trainer", group=None, reason="step 0 has all its groups; trainer: training step 0")


def test_under_arrival_order_any_scored_groups_make_a_step():
    built = Told(order="arrival").begun().prompts(1).group().group()
    assert built.stuck().stage == "trainer"
    assert Told(order="arrival").begun().prompts(1).group().stuck().group == 0


def test_a_round_that_must_be_scored_whole_waits_beyond_its_first_step():
    built = Told(mode="synchronous", steps_per_version=2).begun().group().group().prompts(2)
    assert built.stuck().group == 2


def test_a_version_that_is_due_names_the_trainer():
    built = Told().begun().group().group().step(0, [0, 1]).report("trainer", doing="loading the model")
    assert built.stuck() == Stuck(stage="trainer", group=None, reason="waiting for version 1; trainer: loading the model")
    assert Told().begun(version=False).stuck().reason == "waiting for version 0; trainer: working"


@pytest.mark.parametrize(
    ("workers", "stage", "reason"),
    [
        (("rollout-0", "scorer-0", "trainer"), "feeder", "step 0 waits for the prompt of group 0; no feeder"),
        (("feeder", "scorer-0", "trainer"), "rollout", "no rollout worker"),
        (("feeder", "rollout-0", "scorer-0"), "trainer", "waiting for version 0; no trainer"),
    ],
)
def test_a_role_that_nobody_fills_is_named(workers: tuple[str, ...], stage: str, reason: str):
    assert Told().begun(version="trainer" in workers, workers=workers).stuck() == Stuck(stage=stage, group=None, reason=reason)


def test_a_scorer_that_is_missing_is_named_once_the_group_is_complete_and_with_the_cause_if_it_failed():
    built = Told().begun(workers=("feeder", "rollout-0", "trainer")).prompts(2)
    complete = Generated(samples=4, newest_s=None)
    assert built.stuck(generated=complete).reason.endswith("complete; no scorer")
    built.records.append(built.builder.measured_by("scorer-0", "final", labels={"error": "no space left"}))
    assert built.stuck(generated=complete).reason.endswith("complete; no scorer; scorer-0 failed: no space left")


def test_a_partition_without_an_owner_is_named():
    built = Told().begun(workers=("feeder", "scorer-0", "trainer")).report("rollout-0", "rollout-1", partitions="5,6").prompts(2)
    assert "no rollout worker owns the partition yet; rollout-0: working; rollout-1: working" in built.stuck().reason


def test_an_outage_is_named_before_anything_else():
    assert Told().begun().prompts(2).stuck(outage_s=290.0).reason == "the broker has not responded for 290 s"


def test_what_the_launcher_knows_of_a_worker_goes_before_its_silence():
    built = Told().begun(workers=("feeder", "scorer-0", "trainer", "rollout-0")).prompts(2)
    found = built.stuck(silent={"rollout-0": 40.0}, notes={"rollout-0": "was killed by SIGKILL, to be started again"})
    assert found.reason.endswith("rollout-0 was killed by SIGKILL, to be started again")


def test_the_same_picture_some_seconds_later_is_the_same():
    built = Told().begun().report("rollout-1", partitions="0").prompts(2)
    one, two = (built.stuck(silent={"rollout-1": silent_s}) for silent_s in (305.0, 320.0))
    assert one != two
    assert one.same_as(two)
    assert not built.stuck(outage_s=3.0).same_as(one)


def test_a_worker_that_only_reports_does_not_move_the_run_and_one_that_works_does():
    built = Told().begun()
    before = built.view.moved_ms
    assert built.report(*WORKERS, doing="waiting").view.moved_ms == before
    built.records.append(built.builder.measured_by("rollout-0", samples=1.0))
    assert built.view.moved_ms > before


def test_a_run_in_which_nothing_has_happened_yet_stands_still_since_it_was_registered():
    view = Told().view
    assert view.record is not None
    assert view.moved_ms == view.record.updated_ns // 1_000_000 > 0
