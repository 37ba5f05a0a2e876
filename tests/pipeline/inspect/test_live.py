"""The live view: what a person sees of a run, on a terminal and without one, and who is said to be the bottleneck."""

import dataclasses
import io
import json
from typing import Any

import pytest
from rich.console import Console

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.inspect.live.completions import Completion, without_template
from penstock.pipeline.inspect.live.frame import frame, line, missing
from penstock.pipeline.inspect.live.view import LiveView, NotebookScreen
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.run_view_types import GroupFacts, Tally
from penstock.pipeline.inspect.status import SteadyBottleneck, bottleneck, elapsed_s, to_go_s
from penstock.topics.catalogue import RUNS_SPEC, topics_of
from penstock.topics.wire.record import Outgoing
from tests.support.a_run import RUN, RecordBuilder, as_records, view_of
from tests.support.page_records import log_with, write


def shown(view: RunView, *, width: int = 120, **fields: Any) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(frame(view, **{"now_s": RecordBuilder().now_s + 60, "silent": {}, "width": width, **fields}))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def begun(*, steps: int = 5, planned: int = 10) -> tuple[RecordBuilder, list[Outgoing]]:
    builder = RecordBuilder(steps=planned)
    records = [*builder.start(), builder.version(0)]
    for step in range(steps):
        records += builder.round(step)
    return builder, records


def test_the_picture_has_a_line_for_every_worker_and_says_how_far_the_run_is() -> None:
    builder, records = begun()
    records.append(builder.measured_by("feeder", labels={"doing": "waiting for version 5"}, admitted=10.0))
    text = shown(view_of(records), now_s=builder.now_s)
    for piece in ("step 5 of 10", "50%", "0:05", "0:05 to go", "version 5", "rollout-0", "trainer", "waiting for version 5", "reward"):
        assert piece in text, piece


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_picture_fits_any_terminal(width: int) -> None:
    assert max(map(len, shown(view_of(begun()[1]), width=width).splitlines())) <= width


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_reason_of_a_bottleneck_the_evaluation_and_the_error_of_a_failed_worker_are_never_cut(width: int) -> None:
    builder, records = begun()
    measured = {
        "greedy_accuracy": 0.75, "sampled_accuracy": 0.5, "greedy_reward": 0.9, "sampled_reward": 0.875, "n": 3.0, "n_failed": 1.0,
    }  # fmt: skip
    records.append(builder.measured_by("evaluator", "eval", version=5, **measured))
    error = "reward /home/somebody/project/own_reward.py:number broke: ZeroDivisionError: division by zero (own_reward.py line 2)"
    records.append(builder.measured_by("scorer-0", kind="final", labels={"status": "failed", "error": error}))
    text = " ".join(" ".join(line.strip("│ ") for line in shown(view_of(records), width=width).splitlines()).split())
    assert f"scorer-0 failed: {error}" in text
    assert "greedy 0.900 (75% solved) · sampled 0.875 (50% solved) at version 5, 3 prompts, 1 completion without a reward" in text


def test_more_workers_than_lines_are_counted_not_shown() -> None:
    builder, records = begun()
    records += [builder.measured_by(f"rollout-{number}") for number in range(30)]
    text = shown(view_of(records), height=20)
    assert "more" in text
    assert len(text.splitlines()) <= 20


def test_a_worker_that_computes_for_long_says_so_and_is_not_called_silent() -> None:
    for activity, doing in (("start", "loading the model"), ("compute", "training step 3, group 2 of 4")):
        _, records = begun()
        view = view_of(records)
        view.workers["trainer"].labels.update(doing=doing, activity=activity)
        view.workers["trainer"].since_ns = 0
        found = shown(view, silent={"trainer": 31.0})
        assert f"{doing}, 31 s" in found
        assert "silent" not in found


def test_the_time_of_a_step_goes_on_over_its_micro_batches() -> None:
    builder, records = begun()
    records.append(builder.measured_by("trainer", labels={"doing": "training step 5, micro-batch 1 of ~5", "activity": "compute"}))
    builder.now_s += 20.0
    records.append(builder.measured_by("trainer", labels={"doing": "training step 5, micro-batch 2 of 5", "activity": "compute"}))
    view = view_of(records)
    assert "training step 5, micro-batch 2 of 5, 31 s" in shown(view, now_s=builder.now_s + 11.0)
    assert "trainer: training step 5, micro-batch 2 of 5, 31 s" in line(view, now_s=builder.now_s + 11.0)


def test_a_role_without_which_a_run_stands_still_is_said_to_be_missing_once_the_others_have_been_there() -> None:
    builder = RecordBuilder()
    records = builder.start()
    records += [builder.measured_by(worker, uptime_s=40.0) for worker in ("rollout-0", "scorer-0", "trainer", "tracker")]
    view, now_s = view_of(records), builder.now_s
    assert missing(view, now_s=now_s, silent={}) == ["feeder"]
    assert "not here: feeder" in shown(view)
    assert missing(view, now_s=now_s, silent={"trainer": 90.0}) == ["feeder", "trainer"]
    assert missing(view_of([builder.record(), builder.measured_by("trainer", uptime_s=3.0)]), now_s=now_s, silent={}) == []


def test_nobody_is_missing_who_has_finished_or_while_workers_are_stopped() -> None:
    builder = RecordBuilder()
    records = [*builder.start(), *(builder.measured_by(name, uptime_s=40.0) for name in ("rollout-0", "scorer-0", "trainer"))]
    done = builder.measured_by("feeder", "final", labels={"doing": "done", "status": "finished"}, uptime_s=30.0)
    assert missing(view_of([*records, done]), now_s=builder.now_s + 300.0, silent={}) == []
    stopped = builder.measured_by("feeder", "final", labels={"doing": "stopping", "status": "stopped"}, uptime_s=30.0)
    assert missing(view_of([*records, stopped]), now_s=builder.now_s + 5.0, silent={}) == []
    assert missing(view_of([*records, stopped]), now_s=builder.now_s + 300.0, silent={}) == ["feeder"]


@pytest.mark.parametrize("activity", ["no_room", "full_window", "no_group", "done"])
def test_a_feeder_that_waits_is_not_the_bottleneck(activity: str) -> None:
    view, builder = shares(waits=0.8, generates=0.1, activity="no_prompts"), RecordBuilder()
    for record in as_records([builder.measured_by("feeder", labels={"doing": "group 57 waits", "activity": activity})]):
        view.fold(record)
    assert bottleneck(view).who == "turns"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("schedule", "advice"),
    [
        ({"mode": "synchronous"}, "overlap them"),
        ({"mode": "pipelined", "max_lag": None}, "overlap them"),
        ({"mode": "in_flight"}, "raise rollout.slots"),
        ({"mode": "bounded", "max_lag": 0}, "overlap them"),
    ],
)
def test_nobody_is_told_to_let_overlap_what_overlaps_already(schedule: dict[str, object], advice: str) -> None:
    view = shares(waits=0.5, generates=0.5)
    assert view.record is not None
    view.record = dataclasses.replace(view.record, config=json.dumps({"schedule": schedule}))
    assert bottleneck(view).advice.startswith(advice)  # type: ignore[union-attr]


def test_quick_rewards_are_not_what_a_run_waits_for() -> None:
    view = shares(waits=0.9, generates=0.1, scores=0.8)
    assert bottleneck(view).who == "scorer"  # type: ignore[union-attr]
    view.workers["scorer-0"].incarnations["a"]["groups"] = 1000.0
    assert bottleneck(view).who == "turns"  # type: ignore[union-attr]


def test_a_resumed_run_is_not_one_of_which_every_worker_was_started_again() -> None:
    builder, records = begun()
    records += [builder.measured_by(worker, incarnation="b") for worker in ("rollout-0", "trainer")]
    assert "started again" not in shown(view_of(records))
    records.append(builder.measured_by("trainer", incarnation="c"))
    assert "(started again 1x)" in shown(view_of(records))


@pytest.mark.parametrize("status", ["stopping", None])
def test_while_its_launcher_stops_a_run_it_is_shown_as_stopping_until_the_last_picture(status: str | None) -> None:
    live, out = terminal_view(log_with(begun()[1]))
    live.status = status
    live.poll(0.1)
    assert f"{RUN} {status or 'running'}" in out.getvalue()
    live.close(status="stopped")
    assert f"{RUN} stopped" in out.getvalue()


@pytest.mark.parametrize(("terminal", "lines"), [(True, ["trainer: stopping: writes", "a checkpoint"]), (False, None)])
def test_a_long_line_is_broken_between_words_and_only_on_a_terminal(terminal: bool, lines: list[str] | None) -> None:
    said, out = "trainer: stopping: writes a checkpoint", io.StringIO()
    live = LiveView(log_with(), RUN, console=Console(file=out, width=26, force_terminal=terminal), plain=True)
    live.tell(said)
    assert [line.rstrip() for line in out.getvalue().splitlines()] == (lines or [said])


def test_the_best_and_the_newest_completion_are_shown_without_what_all_prompts_share() -> None:
    builder, records = begun()
    live, out = terminal_view(log_with([*records, *builder.group([0.0, 0.25], version=5)]), width=100)
    live.poll(0.1)
    live.close()
    last = out.getvalue().rpartition("╭")[2]
    assert "best 0.444  '3 4' → '5'" in last
    assert "newest 0.000  '3 4' → '5'" in last


def test_what_a_chat_template_adds_to_every_prompt_is_left_out() -> None:
    prompts = [f"<|user|>Answer in one word: what is {sum_}?<|end|><|assistant|>" for sum_ in ("1+1", "2+3", "10+3")]
    assert [without_template(prompt, prompts) for prompt in prompts] == ["1+1", "2+3", "10+3"]
    assert without_template(prompts[0], prompts[:1]) == prompts[0]


def test_no_word_is_cut_where_prompts_begin_to_differ_or_a_line_ends() -> None:
    prompts = [f"Question: what is {first} plus {second}? Answer with a number." for first, second in ((1, 13), (12, 3), (14, 23))]
    assert [without_template(prompt, prompts) for prompt in prompts] == ["1 plus 13", "12 plus 3", "14 plus 23"]
    assert "'…plus 13?'" in Completion("best", 1.0, "What is 12 plus 13?", "x", None).line(40)


def test_of_a_long_completion_the_end_is_shown_beside_the_answer() -> None:
    line = Completion("best", 1.0, "x" * 200 + " How many?", "y" * 200 + " So 15", "15").line(80)
    assert line.count("…") == 2 and len(line) <= 80
    assert "How many?'" in line and "So 15', answer 15" in line


def test_a_notebooks_cell_shows_the_same_picture_and_replaces_it() -> None:
    shown_ = []

    class Handle:
        def update(self, data: dict[str, str], *, raw: bool) -> None:
            shown_.append(data["text/html"])

    screen = NotebookScreen(lambda _data, **_: Handle())
    live = LiveView(log_with(begun()[1]), RUN, console=Console(file=io.StringIO()), plain=True, screen=screen)
    live.poll(0.1)
    live.close()
    assert shown_[-1].startswith("<pre") and "step" in shown_[-1] and "rollout-0" in shown_[-1]


def test_truncated_samples_are_advised_on() -> None:
    state = view_of(begun()[1])
    assert "truncated" not in shown(state)
    state.steps[4].metrics["truncated_share"] = 0.9
    assert "90 % of the last step's samples are truncated" in shown(state)


def test_columns_without_a_number_leave_their_room_to_what_workers_do() -> None:
    _, records = begun()
    view = view_of(records)
    for worker in view.workers.values():
        worker.values.clear()
        worker.labels["doing"] = "waiting for a version that is not there"
    for width in (60, 80, 120):
        found = shown(view, width=width)
        assert "waiting for a version that is not there"[: 30 if width == 60 else None] in found
        assert max(map(len, found.splitlines())) <= width


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"status": "stopped"}, "demo-1 stopped"),
        ({"silent": {"trainer": 9.0}}, "silent for 9 s"),
        ({"outage_s": 7.0}, "the broker has not responded for 7 s"),
    ],
)
def test_the_picture_shows_a_run_that_was_stopped_a_silent_worker_and_an_outage(state: dict[str, Any], text: str) -> None:
    assert text in shown(view_of(begun()[1]), **state)


def test_time_to_go_follows_the_pace_of_the_last_steps() -> None:
    _, records = begun(steps=3, planned=10)
    assert to_go_s(view_of(records)) == pytest.approx(7.0)
    builder, records = begun(steps=3, planned=10)
    builder.now_s += 1000.0  # stopped, and resumed much later
    records += builder.round(3)
    assert to_go_s(view_of(records)) == pytest.approx(6.0)
    _, records = begun(steps=1)
    assert to_go_s(view_of(records)) is None


def test_the_clock_stops_when_the_run_is_closed() -> None:
    builder, records = begun(steps=2, planned=2)
    view = view_of([*records, builder.closed()])
    assert elapsed_s(view, now_s=builder.now_s + 1000) == pytest.approx(2.0)


def test_one_line_tells_the_same_without_a_terminal() -> None:
    builder, records = begun()
    text = line(view_of(records), now_s=builder.now_s)
    for piece in ("step 5/10", "version 5", "lag 0.0", "samples/s", "0:05, 0:05 to go"):
        assert piece in text, piece
    assert "waiting for the workers" in line(view_of([RecordBuilder().record()]), now_s=0.0)


def shares(*, waits: float, generates: float | None, scores: float | None = None, activity: str = "busy") -> RunView:
    """A run whose roles are busy for these shares of the time."""
    builder = RecordBuilder()
    records = builder.start()
    for second in range(5):
        if generates is not None:
            records.append(builder.measured_by("rollout-0", labels={"doing": "", "activity": activity}, generate_s=generates * second))
        if scores is not None:
            records.append(builder.measured_by("scorer-0", reward_busy_s=scores * second))
        records.append(builder.entry("step", step=second, version=second, metrics={"wait_s": waits, "compute_s": 1 - waits}))
        builder.now_s += 1
    return view_of(records)


@pytest.mark.parametrize(
    ("state", "who"),
    [
        (shares(waits=0.1, generates=0.9), "trainer"),
        (shares(waits=0.8, generates=0.9), "rollout"),
        (shares(waits=0.8, generates=0.5, scores=0.95), "scorer"),
        (shares(waits=0.8, generates=0.1, activity="no_prompts"), "feeder"),
        (shares(waits=0.5, generates=0.5), "turns"),
    ],
)
def test_the_bottleneck_is_the_role_whose_busy_time_says_so(state: RunView, who: str) -> None:
    assert bottleneck(state).who == who  # type: ignore[union-attr]


def test_no_bottleneck_is_named_before_there_is_anything_to_tell_it_from() -> None:
    assert bottleneck(view_of([RecordBuilder().record()])) is None
    assert bottleneck(shares(waits=0.8, generates=None)) is None
    filling = shares(waits=0.8, generates=0.9)
    for step in (2, 3, 4):
        del filling.steps[step]
    assert bottleneck(filling) is None


def test_a_resumed_run_shows_no_bottleneck_and_no_rate_of_the_steps_before_it_was_stopped() -> None:
    state = shares(waits=0.8, generates=0.9)
    assert bottleneck(state) is not None and "starting" not in shown(state)
    state.worked.stop(max(step.time_s for step in state.steps.values()) + 0.1)
    assert bottleneck(state) is None and "starting" in shown(state)
    state.workers["rollout-0"].labels["activity"] = "start"
    assert "starting, not ready yet: rollout-0" in shown(state)
    assert "starting" not in shown(state, status="stopped")


def test_a_bottleneck_that_changes_at_every_look_is_shown_as_one_until_another_has_held() -> None:
    rollout, trainer = (bottleneck(shares(waits=waits, generates=0.9)) for waits in (0.8, 0.1))
    steady = SteadyBottleneck()
    shown = [steady.update((rollout, trainer)[second % 2], now_s=float(second)) for second in range(61)]
    assert shown == [rollout] * 61
    assert [steady.update(trainer, now_s=100.0), steady.update(trainer, now_s=111.0)] == [rollout, trainer]
    assert steady.update(None, now_s=112.0) is None


@pytest.mark.parametrize("width", [60, 120])
def test_the_first_lines_answer_whether_it_learns_how_long_it_takes_and_what_holds_it_up(width: int) -> None:
    view = shares(waits=0.8, generates=0.9)
    view.rewards = {version: Tally(8, 8 * version / 20) for version in range(20)}
    lines = shown(view, width=width).splitlines()
    text = "\n".join(lines[:6])
    assert "It learned: reward" in lines[1] and "to go" in text and "rollout is the bottleneck (busy 90%" in text
    over = shown(view, width=width, status="stopped")  # by the launcher, before the log has it
    assert "to go" not in over and "bottleneck" not in over


def terminal_view(log: MemoryLog, *, width: int = 120) -> tuple[LiveView, io.StringIO]:
    out = io.StringIO()
    return LiveView(log, RUN, console=Console(file=out, width=width, force_terminal=True, color_system=None), plain=False), out


def plain_view(log: MemoryLog, monkeypatch: pytest.MonkeyPatch, *, plain: bool = True) -> tuple[LiveView, io.StringIO]:
    monkeypatch.setattr("penstock.pipeline.inspect.live.view.LINE_EVERY_S", 0.0)
    out = io.StringIO()
    return LiveView(log, RUN, console=Console(file=out, width=200), plain=plain), out


@pytest.mark.parametrize("plain", [True, False], ids=["asked for", "no terminal"])
def test_plain_lines_follow_the_run_and_name_evaluations_and_dead_letters(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_with()
    live, out = plain_view(log, monkeypatch, plain=plain)
    builder, records = begun(steps=2)
    write(log, records)
    live.poll(0.1)
    assert out.getvalue().startswith("step 2/10")
    write(log, [builder.measured_by("evaluator", "eval", version=2, greedy_accuracy=0.25, greedy_reward=0.4), builder.letter()])
    live.poll(0.1)
    write(log, builder.round(2))
    live.close()
    text = out.getvalue()
    assert "version 2: held out greedy 0.400 (25% solved)" in text
    assert "dead letter: groups/0/0 undecodable: not Arrow" in text
    assert "\x1b" not in text


def test_many_dead_letters_of_a_kind_take_a_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_with()
    live, out = plain_view(log, monkeypatch)
    builder, records = begun(steps=1)
    write(log, records)
    live.poll(0.1)
    write(log, [builder.letter(offset=offset) for offset in range(150)])
    live.poll(0.1)
    live.close()
    lines = [line for line in out.getvalue().splitlines() if line.startswith("dead letter")]
    assert [line.partition(":")[0] for line in lines] == ["dead letter"] * 3 + ["dead letters"] * 2
    assert lines[-1] == "dead letters: 100 of kind undecodable; the newest: not Arrow"


def test_a_run_that_trains_on_few_of_its_groups_is_told_why_instead_of_who_is_slow() -> None:
    view = view_of(begun()[1])
    view.groups |= {1000 + number: GroupFacts("filtered", 4, 40, 0.0, 0) for number in range(90)}
    assert "of the groups filtered" in line(view, now_s=RecordBuilder().now_s + 60)
    assert "use easier prompts" in shown(view, width=200)


def test_noise_in_the_topics_does_not_disturb_the_view(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("ledger", "metrics", "groups")
    noise = [Outgoing(topic=f"{RUN}.{name}", partition=0, key=None, headers=(), value=b"\0" * 100) for name in names]
    live, out = plain_view(log_with([*noise, *begun(steps=1)[1]]), monkeypatch)
    live.poll(0.1)
    live.close()
    assert "step 1/10" in out.getvalue()


def test_a_view_that_is_opened_before_its_run_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryLog()
    live, out = plain_view(log, monkeypatch)
    live.poll(0.01)
    log.create_topics({RUNS_SPEC.name: RUNS_SPEC, **topics_of(RUN, partitions=1)})
    write(log, begun(steps=1)[1])
    live.poll(0.1)
    live.close()
    assert "step 1/10" in out.getvalue()


def test_on_a_terminal_the_last_picture_stays_on_the_screen() -> None:
    out = io.StringIO()
    live = LiveView(log_with(begun()[1]), RUN, console=Console(file=out, width=120, force_terminal=True), plain=False)
    live.poll(0.1)
    live.close()
    assert "step " in out.getvalue()
    assert out.getvalue().rstrip().endswith("╯\x1b[0m")


def test_one_line_tells_who_still_works_once_the_last_step_is_done() -> None:
    builder, records = begun(steps=2, planned=2)
    records.append(builder.measured_by("trainer", "final"))
    records.append(builder.closed())
    records.append(builder.measured_by("tracker", labels={"doing": "waiting for MLflow, at most 55 s more"}))
    assert "tracker: waiting for MLflow, at most 55 s more" in line(view_of(records), now_s=builder.now_s)
