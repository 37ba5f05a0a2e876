"""The time of every role: each second has one use, the uses add up to the whole, and the bottleneck says what to change."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.inspect.report import figures
from penstock.pipeline.inspect.report.summary import summarise
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.run_view_types import StepFacts
from penstock.pipeline.inspect.status import bottleneck, recent_steps, trainer_waiting_ratio
from penstock.pipeline.runtime.reporting.reporter import USES, Reporter, split, use_of
from penstock.topics import metrics
from penstock.topics.catalogue import topics_of
from penstock.topics.metrics import Activity, activity_of
from tests.support.a_run import RUN, RecordBuilder, as_records, folded, view_of


@pytest.mark.parametrize(
    ("activity", "use", "kind"),
    [
        (Activity.START, "start", "load"),
        (Activity.BUSY, "busy", "work"),
        (Activity.COMPUTE, "busy", "work"),
        (Activity.STOP, "busy", "work"),
        (Activity.SAVE, "save", "work"),
        (Activity.LOAD, "no_weights", "load"),
        (Activity.NO_WEIGHTS, "no_weights", "wait"),
        (Activity.NO_PROMPTS, "no_prompts", "wait"),
        (Activity.NO_CALLS, "no_prompts", "wait"),
        (Activity.NO_SAMPLES, "no_samples", "wait"),
        (Activity.NO_GROUP, "no_group", "wait"),
        (Activity.FULL_WINDOW, "full_window", "wait"),
        (Activity.NO_ROOM, "no_room", "wait"),
        (Activity.NO_DEVICE, "no_device", "wait"),
        (Activity.DONE, "done", "wait"),
    ],
)
def test_every_activity_has_one_use_and_one_kind(activity: Activity, use: str, kind: str) -> None:
    assert (use_of(activity), activity.kind) == (use, kind)
    assert use in USES


def test_a_status_without_an_activity_or_with_an_unknown_one_counts_as_busy() -> None:
    assert {activity_of(labels) for labels in ({}, {"doing": "waiting for prompts"}, {"activity": "of-a-newer-release"})} == {Activity.BUSY}


def reporter_on(log: MemoryLog, role: str, *, outage=lambda: 0.0) -> Reporter:
    log.create_topics(topics_of(RUN, partitions=1))
    return Reporter(run=RUN, role=role, worker=role, log=log, producer=log.producer(), outage=outage)


@pytest.mark.parametrize("text", ["waiting for prompts", "no prompt has arrived", "generating", ""])
def test_the_wording_of_a_status_changes_no_figure(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now, log = [100.0], MemoryLog()
    monkeypatch.setattr("penstock.pipeline.runtime.reporting.reporter.time.monotonic", lambda: now[0])
    reporter = reporter_on(log, "rollout")
    reporter.doing(Activity.NO_PROMPTS, text)
    now[0] += 5.0
    reporter.close(status="finished")
    assert (reporter.values["time_no_prompts_s"], reporter.values.get("time_busy_s", 0.0)) == (5.0, 0.0)
    (status,) = (metrics.read(record, run=RUN)[1] for record in log.tail({(f"{RUN}.metrics", 0): "earliest"}).read_to_end())
    assert activity_of(status.labels) == Activity.NO_PROMPTS


def test_a_workers_uses_add_up_to_its_time_and_an_outage_counts_as_the_brokers() -> None:
    log, away = MemoryLog(), [0.0]
    reporter = reporter_on(log, "rollout", outage=lambda: away[0])
    pause = threading.Event()
    for activity, outage in ((Activity.BUSY, 0.0), (Activity.NO_PROMPTS, 0.0), (Activity.BUSY, 3.0), (Activity.NO_WEIGHTS, 0.0)):
        reporter.doing(activity, "")
        away[0] = outage
        pause.wait(0.02)
        reporter.status(force=True)
    reporter.close(status="finished")
    view = folded(log.tail({(f"{RUN}.metrics", 0): "earliest"}).read_to_end(5.0))
    seconds = figures.by_role(view)["rollout"]
    uses = {name: value for name, value in seconds.items() if name not in ("workers", "total_s")}
    assert set(uses) >= {"busy_s", "no_prompts_s", "broker_s", "no_weights_s"}
    assert all(value >= 0.02 for name, value in uses.items() if name != "start_s")
    assert sum(uses.values()) == pytest.approx(seconds["total_s"], rel=0.01)


def test_a_rounds_parts_add_up_to_its_time() -> None:
    steps = []
    for number in range(4):
        begun = 10.0 * number
        metrics = {"started_at": begun, "wait_s": 4.0, "compute_s": 5.0, "first_sample_at": begun + 0.5, "last_sample_at": begun + 6.0}
        steps.append(StepFacts(number, number // 2, begun + 10.0, (number,), metrics | {"first_backward_at": begun + 4.0}))
    first, second = figures.rounds(steps, per_version=2)
    for one in (first, second):
        assert sum(one[name] or 0.0 for name in ("wait_s", "compute_s", "other_s")) == pytest.approx(20.0)
        assert one["waiting_ratio"] == pytest.approx(8 / 20)
        assert one["rollout_to_train_end_s"] == pytest.approx(19.5)
        assert one["first_dispatch_s"] == pytest.approx(3.5)
        assert one["rollout_s"] == pytest.approx(15.5)
    assert figures.rounds(steps[1:], per_version=2)[1] == second  # although the first step has been deleted


SECONDS = st.fixed_dictionaries({f"time_{use}_s": st.floats(0.0, 1e6) for use in USES})


@given(uses=SECONDS, computed=st.floats(0.0, 1e6))
def test_whoever_tells_how_long_the_trainer_waited_tells_the_same(uses: dict[str, float], computed: float) -> None:
    builder = RecordBuilder()
    records = [*builder.start(), builder.entry("step", step=0, version=0, metrics={"compute_s": computed})]
    view = view_of([*records, builder.measured_by("trainer", "final", uptime_s=sum(uses.values()), **uses)])
    report = summarise(view)
    time, share = report["time"], trainer_waiting_ratio(view)
    assert time["trainer_waiting_ratio"] == share
    if share is not None:
        shown = report["time_spent"]["trainer"]["shares"]
        assert share == pytest.approx(shown.get("no_group", 0.0) + shown.get("no_device", 0.0))
        assert 0.0 <= share <= 1.0 + 1e-9
        at_work = sum(seconds for use, seconds in uses.items() if use not in ("time_start_s", "time_done_s", "time_suspended_s"))
        parts = sum(time[f"trainer_{part}_s"] for part in ("wait", "compute", "other"))
        assert parts == pytest.approx(max(at_work, time["trainer_wait_s"] + computed))


def test_the_waiting_of_the_last_steps_is_their_share_of_all_the_trainers_time() -> None:
    builder, view = RecordBuilder(), RunView(run=RUN)
    records = builder.start()
    for step in range(30):  # each of 10 s: 3 s of waiting, 4 s of computing, 3 s of digests, the ledger and publishing
        begun_s, builder.now_s = builder.now_s, builder.now_s + 10.0
        records.append(builder.entry("step", step=step, version=step, metrics={"started_at": begun_s, "wait_s": 3.0, "compute_s": 4.0}))
    for number, record in enumerate(as_records(records)):
        view.fold(record)
        if number > 2:
            assert trainer_waiting_ratio(view, recent_steps(view)) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("use", "seconds", "parts"),
    [
        ("no_group", 75.0, {"no_group": 1.0, "suspended": 74.0}),
        ("no_prompts", 3600.0, {"no_prompts": 1.0, "suspended": 3599.0}),
        ("no_group", 60.0, {"no_group": 60.0}),
        ("busy", 600.0, {"busy": 600.0}),  # a micro-batch may take minutes
        ("no_weights", 600.0, {"no_weights": 600.0}),  # so may loading a version
        ("save", 600.0, {"save": 600.0}),
        ("start", 600.0, {"start": 600.0}),
        ("broker", 600.0, {"broker": 600.0}),
    ],
)
def test_a_suspension_is_no_waiting(use: str, seconds: float, parts: dict[str, float]) -> None:
    assert split(use, seconds) == parts


def test_a_worker_that_was_suspended_while_it_waited_has_waited_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("penstock.pipeline.runtime.reporting.reporter.time.monotonic", lambda: now[0])
    reporter = reporter_on(MemoryLog(), "trainer")
    for seconds, activity in ((2.0, Activity.NO_GROUP), (75.0, Activity.COMPUTE), (90.0, Activity.NO_GROUP)):
        reporter.doing(activity, "")
        now[0] += seconds
        reporter.waited_s()
    assert reporter.waited_s() == 2.0 + 1.0
    assert (reporter.values["time_busy_s"], reporter.values["time_suspended_s"]) == (75.0, 89.0)


def trained_in(order: list[int], lengths: dict[int, int]) -> float | None:
    view = RunView(run=RUN)
    view.samples = {group: {0: length, 1: length + 2} for group, length in lengths.items()}
    view.steps = {number: StepFacts(number, 0, float(number), (group,), {}) for number, group in enumerate(order)}
    return figures.length_order_correlation(view)


def test_training_in_order_of_length_is_told_from_training_in_order_of_submission() -> None:
    lengths = {0: 90, 1: 10, 2: 80, 3: 20, 4: 70, 5: 30}
    assert trained_in([0, 1, 2, 3, 4, 5], lengths) == 0.0
    assert (trained_in([1, 3, 5, 4, 2, 0], lengths) or 0.0) > 0.6
    assert trained_in([0, 1], lengths) is None


def test_the_bottleneck_of_a_whole_run_is_told_after_its_end_with_what_to_change() -> None:
    builder = RecordBuilder()
    records = builder.start()
    records.append(builder.measured_by("rollout-0", "final", generate_s=9.5, uptime_s=12.0, time_start_s=2.0))
    records.append(builder.entry("step", step=0, version=0, metrics={"wait_s": 7.0, "compute_s": 3.0}))
    records.append(builder.measured_by("trainer", "final", uptime_s=12.0, time_start_s=2.0, time_busy_s=3.0, time_no_group_s=7.0))
    view = view_of([*records, builder.entry("run-closed")])
    found = bottleneck(view, whole=True)
    assert found is not None
    assert found.who == "rollout" and "95%" in found.why and "more rollout workers" in found.advice
    assert bottleneck(view) is None
