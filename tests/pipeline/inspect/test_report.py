"""The report: every figure against a run whose numbers are known, and its text."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pipeline.inspect.report.formats import BARS, duration, sparkline
from penstock.pipeline.inspect.report.headline import headline
from penstock.pipeline.inspect.report.summary import summarise
from penstock.pipeline.inspect.report.text import as_text, episodes_lines
from penstock.pipeline.inspect.run_status import tenth
from penstock.pipeline.rewards.scoring import MOST_CAUSES, NO_FUNCTION, MissingRewards, fault_of
from penstock.topics.wire.record import Outgoing
from tests.support.a_run import RUN, RecordBuilder, view_of

REASONS = (NO_FUNCTION, "reward f.py:f broke: KeyError: 'x1' (f.py line 3)", "reward f.py:f broke: KeyError: 'x2' (f.py line 3)", "killed")


def report_of(built: Iterable[Outgoing]) -> dict[str, Any]:
    return summarise(view_of(built))


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of(RecordBuilder(steps=10).whole())


def test_a_report_of_a_run_whose_first_records_were_deleted_says_so_and_names_three_places() -> None:
    view = view_of(RecordBuilder(steps=2).whole())
    gone = [f"{RUN}.groups/{partition}: the records at offsets 0 to 41 were deleted" for partition in range(5)]
    found = summarise(view, gone=gone)
    assert found["gone"] == gone
    lines = " ".join(as_text(found, full=True).split())
    assert "and 3 more (--full)" in as_text(found)
    assert "deleted figures do not include deleted records; groups shown as open or unused may have ended" in lines
    assert gone[2] in lines and gone[3] not in lines and "and in 2 more partitions" in lines
    assert "deleted" not in as_text(summarise(view))


def test_every_admitted_group_has_exactly_one_fate(report: dict[str, Any]) -> None:
    assert report["groups"] == {
        "admitted": 22, "trained": 20, "filtered": 1, "stale": 0, "failed": 0, "abandoned": 0, "unused": 1, "open": 0
    }  # fmt: skip


def test_the_reward_is_a_mean_over_all_scored_samples_before_the_filter(report: dict[str, Any]) -> None:
    assert report["reward"]["first"] == pytest.approx(0.0)
    # The unused group of the last version was scored, so it counts.
    assert report["reward"]["last"] == pytest.approx(1.0)
    assert len(report["reward"]["curve"]) == 10
    assert report["reward_trained"] == {"first": pytest.approx(0.0), "last": pytest.approx(1.0)}


def test_the_last_reward_of_a_short_run_whose_samples_are_all_older_is_that_of_its_newest_version() -> None:
    builder = RecordBuilder(steps=10)
    built = [*builder.start(), builder.version(0)]
    for step in range(10):
        number = builder.next_group
        built += builder.group([step / 10] * 4, version=min(step, 6))
        built.append(builder.step(step, [number], begun_s=builder.now_s))
    assert report_of([*built, builder.closed()])["reward"]["last"] == pytest.approx(0.75)


def test_what_restarted_workers_did_is_added_up_once_and_their_restarts_are_counted() -> None:
    builder = RecordBuilder(steps=2)
    built = list(builder.whole())
    before = report_of(built)
    again = [
        builder.measured_by("rollout-0", incarnation="b", generate_s=0.25),
        builder.measured_by("rollout-0", "eval", incarnation="b", version=0),  # not a counter: adds nothing
        builder.measured_by("rollout-0", incarnation="b", generate_s=1.0),
        builder.measured_by("rollout-0", "final", incarnation="c", generate_s=0.5),
        builder.measured_by("rollout-1", generate_s=2.0),
        builder.measured_by("trainer", incarnation="b"),
    ]
    found = report_of([*built, *again, *again])
    assert found["time"]["generate_s"] == pytest.approx(before["time"]["generate_s"] + 1.0 + 0.5 + 2.0)
    assert (before["restarts"], found["restarts"]) == ({}, {"rollout": 2, "trainer": 1})
    assert "restarts" not in as_text(before)
    assert "rollout 2 · trainer 1" in as_text(found)


def test_the_load_of_reward_services_is_told_over_the_time_of_the_scorers() -> None:
    builder = RecordBuilder(steps=2)
    load = {"service_requests": 30.0, "service_retries": 3.0, "service_busy_s": 4.0, "service_request_s": 15.0}
    found = report_of([*builder.whole(), builder.measured_by("scorer-0", "final", groups=20.0, uptime_s=10.0, **load)])
    services = {"requests": 30, "retries": 3, "request_s_mean": 0.5, "utilisation": 0.4, "in_flight": 1.5}
    assert found["scoring"]["services"] == pytest.approx(services)
    line = "services busy 40 % of the time, 1.5 of 30 requests in flight, 0.50 s each, 3 failed"
    assert line in " ".join(as_text(found, full=True).split())


def test_the_last_words_of_a_worker_that_was_started_again_are_no_longer_its_own() -> None:
    builder = RecordBuilder()
    built = [builder.record(), builder.measured_by("scorer-0", "final", labels={"status": "failed", "error": "no memory"})]
    worker = view_of([*built, builder.measured_by("scorer-0", incarnation="b")]).workers["scorer-0"]
    assert (worker.labels, worker.ended) == ({"doing": "working"}, False)


def test_samples_weigh_the_same_in_groups_of_any_size() -> None:
    builder = RecordBuilder(steps=1)
    built = [*builder.start(), *builder.group([1.0], version=0), *builder.group([0.0] * 3, version=0, outcome="filtered")]
    found = report_of([*built, builder.step(0, [0], begun_s=builder.now_s)])
    assert found["reward"]["first"] == pytest.approx(0.25)
    assert found["groups"]["open"] == 0
    assert found["groups"]["trained"] == 1


def test_versions_map_to_the_steps_they_were_drawn_for_when_several_steps_share_one() -> None:
    builder = RecordBuilder(steps=20, config={"schedule": {"mode": "pipelined", "steps_per_version": 5, "prompts_per_step": 1}})
    built = builder.start()
    for version in range(4):
        built += builder.group([float(version)] * 2, version=version)
    built += [builder.step(step, [], begun_s=builder.now_s) for step in range(20)]
    found = report_of(built)
    # The first and the last two of 20 steps lie within versions 0 and 3.
    assert (found["reward"]["first"], found["reward"]["last"]) == (0.0, 3.0)


def test_times_run_from_creation_to_the_end(report: dict[str, Any]) -> None:
    time = report["time"]
    assert (time["wall_s"], time["start_s"], time["train_s"]) == (pytest.approx(12.0), pytest.approx(2.0), pytest.approx(10.0))
    assert time["rollout_to_train_end_s"] == [pytest.approx(1.0)] * 10
    assert time["trainer_waiting_ratio"] == pytest.approx(0.6)
    assert report["throughput"]["samples_per_s"] == pytest.approx(88 / 10)


def test_the_cost_of_the_topics_is_shared_among_the_samples(report: dict[str, Any]) -> None:
    # Four workers on a sample's way paid 0.1 s each, for 88 samples and 40 s of CPU time; the evaluator pays for nothing.
    assert report["samples"] == 88
    assert report["time"]["topics_overhead_ms_per_sample"] == pytest.approx(400 / 88)
    assert report["time"]["topics_overhead_ratio"] == pytest.approx(0.4 / 40)


def test_an_overlapping_round_is_one_whose_training_began_before_its_last_sample_ended(report: dict[str, Any]) -> None:
    assert report["overlap"] == {"rounds": 10, "first_backward_before_last_sample": 10, "share": 1.0}


def test_lengths_are_told_by_what_became_of_the_samples(report: dict[str, Any]) -> None:
    assert report["length"]["trained"] == 3.0
    assert report["length"]["unused"] == 9.0
    assert report["length"]["admitted"] == pytest.approx((84 * 3 + 4 * 9) / 88)
    assert report["length"]["stale"] is None
    assert report["tokens"] == 84 * 3 + 4 * 9


def test_the_mean_the_95_percent_quantile_and_the_longest_are_told_of_groups_with_every_fate() -> None:
    builder = RecordBuilder(steps=1)
    built = [*builder.start(), builder.version(0)]
    for tokens in range(20, 0, -1):
        built += builder.group([0.5], version=0, tokens=tokens)
    for outcome, lengths in {"filtered": (4, 4), "failed": (7,), "abandoned": (40, 10, 10, 10), "scored": (30, 60, 5)}.items():
        for tokens in lengths:
            built += builder.group([0.5], version=0, outcome=outcome, tokens=tokens)
    unused = builder.next_group - 1
    built += [builder.step(0, list(range(20)), begun_s=builder.now_s), builder.entry("stale", step=0, groups=(unused - 2, unused - 1))]
    report = report_of([*built, builder.closed()])
    assert {fate: tuple(report[name][fate] for name in ("length", "length_p95", "length_max")) for fate in report["length"]} == {
        "admitted": (pytest.approx((210 + 8 + 7 + 70 + 95) / 30), 40, 60),
        "trained": (10.5, 19, 20),
        "filtered": (4.0, 4, 4),
        "stale": (45.0, 60, 60),
        "failed": (7.0, 7, 7),
        "abandoned": (17.5, 40, 40),
        "unused": (5.0, 5, 5),
    }
    nothing = report_of(RecordBuilder().start())
    assert {value for name in ("length", "length_p95", "length_max") for value in nothing[name].values()} == {None}


def test_filtered_groups_are_told_apart_by_whether_all_samples_or_none_solved_them() -> None:
    builder = RecordBuilder()
    built = [*builder.start(), builder.version(0)]
    for rewards in ([0.0] * 4, [1.0] * 4, [1.0] * 4, [0.5] * 4):
        built += builder.group(rewards, version=0, outcome="filtered")
    report = report_of(built)
    assert report["filtered"] == {"solved_all": 2, "solved_none": 1, "between": 1}
    assert "2 solved by every sample, 1 by none, 1 rewarded alike between" in " ".join(as_text(report, full=True).split())


def test_weights_evaluations_and_lag_are_reported(report: dict[str, Any]) -> None:
    built = {"versions": 11, "bytes": 11_000, "digest": f"{10:064x}"}
    assert report["weights"] == {**built, "delta_bytes_median": None, "adapter_bytes_median": None, "full_bytes": None}
    assert (report["steps"], report["versions"]) == (10, 10)
    assert [(found["version"], found["greedy_accuracy"]) for found in report["eval"]] == [(0, 0.0), (10, 0.9)]
    assert (report["lag"]["mean"], report["lag"]["max"]) == (0.0, 0.0)
    assert report["lag"]["tokens"]["shares"] == {}
    assert report["engines"] == dict.fromkeys(report["engines"]) | {"swaps": 0.0, "aborted_groups": 0.0}


def test_what_was_refused_is_counted_once_and_by_kind() -> None:
    builder = RecordBuilder(steps=2)
    built = [*builder.whole(), builder.letter(offset=1), builder.letter(offset=1), builder.letter(offset=2, kind="foreign-run")]
    found = report_of(built)
    counts = {"total": 2, "by_kind": {"foreign-run": 1, "undecodable": 1}, "by_topic": {"groups": 2}}
    assert found["dead_letters"] == counts
    assert found["duplicates"] == 1


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.lists(st.sampled_from(REASONS), max_size=4)), max_size=12))
def test_samples_without_a_reward_are_said_by_cause_over_all_processes_of_the_scorers(groups: list[tuple[str, int, list[str]]]) -> None:
    counts, builder, processes = Counter[str](), RecordBuilder(steps=1), defaultdict[str, MissingRewards](MissingRewards)
    built, warned = list(builder.whole()), Counter[tuple[str, str]]()
    for process, group, reasons in groups:
        counts.update(map(fault_of, reasons))
        warned.update((process, fault_of(reason)) for reason in processes[process].add(group, reasons))
        labels = {"missing_rewards": json.dumps(processes[process].causes)}
        built.append(builder.measured_by("scorer-0", incarnation=process, labels=labels))
    assert set(warned.values()) <= {1}
    found = report_of(built)["missing_rewards"]
    for cause, samples in counts.items():
        first = min(group for _, group, reasons in groups if cause in map(fault_of, reasons))
        told = [line for line in found if fault_of(line.partition(": ")[2]) == cause]
        assert len(told) == 1 and told[0].startswith(f"{samples} sample"), told
        assert first <= int(re.findall(r"group (\d+):", told[0])[0])
    assert len(found) == len(counts)
    assert all(line in " ".join(as_text(report_of(built), full=True).split()) for line in found)


FOREIGN = [{"a": 1}, {"a": [1, 2]}, {"a": ["x", 0, "b"]}, {"a": [1e999, 0, "b"]}]


@pytest.mark.parametrize("label", ["nonsense", "[]", "[" * 50_000, *map(json.dumps, FOREIGN)])
def test_a_label_that_no_scorer_writes_is_no_reason(label: str) -> None:
    builder = RecordBuilder(steps=1)
    built = [*builder.whole(), builder.measured_by("scorer-0", labels={"missing_rewards": label})]
    assert report_of(built)["missing_rewards"] == []


def test_causes_that_name_something_new_each_time_are_counted_together_after_the_first_few() -> None:
    missing = MissingRewards()
    first = [reason for group in range(50) for reason in missing.add(group, [f"no {chr(97 + group)}", "no a"])]
    assert len(first) == len(missing.causes) == MOST_CAUSES + 1
    assert sum(samples for samples, _, _ in missing.causes.values()) == 100


def test_a_stale_group_is_stale_although_it_was_scored() -> None:
    builder = RecordBuilder(steps=2)
    built = [*builder.start(), *builder.group([1.0], version=0), builder.entry("stale", groups=(0,), step=1)]
    assert report_of(built)["groups"]["stale"] == 1


def test_a_run_that_has_hardly_begun_has_a_report_of_what_is_known() -> None:
    found = report_of([RecordBuilder().record()])
    assert found["status"] == "created"
    assert found["reward"] == {"first": None, "last": None, "curve": []}
    assert found["time"]["trainer_waiting_ratio"] is None
    assert "no sample has a reward  0 of 10 steps" in as_text(found)


def test_the_report_is_strict_json_even_when_a_loss_was_not_a_number() -> None:
    builder = RecordBuilder(steps=1)
    built = [*builder.start(), builder.step(0, [], begun_s=float("nan")), builder.closed()]
    json.dumps(report_of(built), allow_nan=False)


def test_the_text_says_what_was_learned_and_where_to_look_next(report: dict[str, Any]) -> None:
    report = {**report, "mlflow_uri": "sqlite:////state/mlflow.db", "mlflow_run_id": "abc"}
    text = as_text(report)
    assert text.splitlines()[0] == f"Run {RUN} finished in 0:12. It learned: reward 0.00 -> 1.00, held-out accuracy 0 % -> 90 %."
    assert "10 steps, pipelined, 2 prompts × 4 samples" in text
    assert "greedy 0 % -> 90 %" in text
    assert "22: 20 trained, 1 filtered (all rewards equal), 0 stale, 0 failed, 1 unused" in text
    assert "mlflow ui --backend-store-uri sqlite:////state/mlflow.db" in as_text(report, full=True)
    assert f"penstock explain {RUN} 21" in text
    assert max(map(len, text.splitlines())) <= 110


def test_a_run_with_every_kind_of_trouble_is_told_on_one_screen_with_each_of_them(report: dict[str, Any]) -> None:
    errors = [f"{9 - line} samples without a reward, first in group 1: ZeroDivisionError (rew.py line {line})" for line in range(6)]
    change = {"what": "reward rew.py:score", "steps": 3, "before": "1" * 64, "after": "2" * 64}
    rebase = {"steps": 4, "entry": 9, "changed": {"torch": ("2.8", "2.9")}, "differences": []}
    troubled = report | {
        "status": "failed",
        "reason": "the loss of step 7 is not finite",
        "groups": report["groups"] | {"failed": 17},
        "dead_letters": {"total": 30, "by_kind": {"reward-failed": 27, "undecodable": 3}, "by_topic": {}},
        "missing_rewards": errors,
        "restarts": {"rollout": 2, "trainer": 1},
        "resumed": 2,
        "gone": [f"{RUN}.groups/{partition}: the records at offsets 0 to 41 were deleted" for partition in range(8)],
        "changed": [change] * 5,
        "rebased": [rebase] * 6,
        "empty_steps": 2,
        "no_reward": 11,
        "eval": [],
        "waste": [{"status": "stale", "share": 0.4, "why": "40% of the groups are stale", "advice": "raise schedule.max_lag"}],
    }
    text = as_text(troubled, directory=Path("/state/runs") / RUN)
    assert len(text.splitlines()) <= 30
    for piece in (
        "failed: the loss of step 7 is not finite", "17 failed", "while the run was stopped: rewards before and",
        "30 (27 reward-failed, 3 undecodable)", "9 samples without a reward, first in group 1: ZeroDivisionError",
        "rollout 2 · trainer 1", "resumed 2 times",
        "were deleted", "rebased after 4 steps", "2 of 10 steps had no trained token", "11 without a reward",
        "not evaluated; set eval.source",
        "raise schedule.max_lag",
    ):  # fmt: skip
        assert piece in text, piece
    assert "not evaluated yet" in as_text({**troubled, "evaluates": True})
    changed = "Changed while the run was stopped: reward rew.py:score. Rewards before and after may not be comparable."
    assert changed in headline(troubled)  # of a page and a notebook
    assert not [line for line in headline(report) if "Changed" in line]


def test_a_stopped_run_says_how_to_resume_it(report: dict[str, Any]) -> None:
    assert f"penstock run --resume {RUN}" in as_text(report | {"status": "stopped"})


def test_the_cause_of_a_failed_run_stands_in_its_text() -> None:
    builder = RecordBuilder(steps=5)
    built = [*builder.start(), builder.closed("failed", steps=0, reason="too many groups were filtered")]
    assert "failed: too many groups were filtered" in as_text(report_of(built))


@pytest.mark.parametrize(("steps", "window"), [(0, 0), (1, 1), (10, 1), (11, 2), (60, 6)])
def test_the_first_and_last_tenth_are_rounded_up(steps: int, window: int) -> None:
    assert tenth(steps) == window


@given(st.lists(st.none() | st.floats(-1e6, 1e6), max_size=200), st.integers(1, 80))
def test_a_sparkline_fits_its_width_and_spans_all_bars(values: list[float | None], width: int) -> None:
    found = sparkline(values, width=width)
    known = [value for value in values if value is not None]
    assert len(found) == min(width, len(known))
    assert set(found) <= set(BARS)
    if len(known) > 1 and width >= len(known) and max(known) > min(known):
        assert {BARS[0], BARS[-1]} <= set(found)


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (61, "1:01"), (3725, "1:02:05")])
def test_durations_read_as_clocks_do(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("cut", "shown"), [(0, False), (1_234, True)])
def test_results_of_tools_that_were_cut_are_counted_with_the_setting_that_cuts_them(cut: int, shown: bool) -> None:
    counts = {"trajectories": 4, "turns_mean": 2.0, "segments_mean": 1.0, "environment_s": 1.0, "engine_idle_s": 0.5}
    (line,) = episodes_lines({"episodes": {**counts, "results_cut": cut, "dropped": 0, "losses": 0, "broken": 0, "causes": {}}})
    assert ("1,234 results cut at environment.max_result_tokens" in line) == shown
