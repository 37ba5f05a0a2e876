"""Formats one frame of the live view as a rich renderable, or as one plain line, from a `RunView` and the time. No I/O."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.pipeline.inspect.live.completions import Completion
from penstock.pipeline.inspect.report import figures
from penstock.pipeline.inspect.report.figures import episodes, evaluations, held_out, held_out_prompts, ordered, step_sizes
from penstock.pipeline.inspect.report.formats import CURVE_WIDTH, duration, sparkline
from penstock.pipeline.inspect.report.headline import RECENT_GROUPS, advice, learned, missing_rewards, named, wastes
from penstock.pipeline.inspect.report.summary import reward_ends
from penstock.pipeline.inspect.report.text import STATUS_STYLES
from penstock.pipeline.inspect.run_status import (
    closing,
    config_of,
    end_reason,
    has_ended,
    last_reward,
    resumptions,
    status_of,
    steps_per_version,
    steps_planned,
)
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.run_view_types import StepFacts, WorkerView
from penstock.pipeline.inspect.stall import SILENT_S
from penstock.pipeline.inspect.status import RECENT_STEPS, SteadyBottleneck, bottleneck, elapsed_s, recent_steps, to_go_s
from penstock.pipeline.runtime.reporting.log_lines import counted
from penstock.pipeline.runtime.roles import ROLES, generating_roles
from penstock.topics.metrics import Activity, activity_of

GONE_S, PATIENCE_S = 60.0, 20.0
"""A worker without a report for `GONE_S` is missing. A worker may start up to `PATIENCE_S` later than the others."""
HEADER_LINES = 12
FAILURES = 2
BORDER, LEAST_CURVE = 4, 8
WIDE, NARROW = 96, 72
"""Terminal widths in columns from which all numbers of a worker are shown, or some."""
COLUMNS = ("version", "lag", "groups/s", "samples/s", "tokens/s", "cpu")


def frame(
    view: RunView,
    *,
    now_s: float,
    silent: Mapping[str, float],
    outage_s: float = 0.0,
    width: int = 120,
    height: int = 40,
    completions: Sequence[Completion] = (),
    status: str | None = None,
    steady: SteadyBottleneck | None = None,
) -> RenderableType:
    """Return the frame for a terminal of `width` columns and `height` lines; reward, remaining time and bottleneck are in its first lines.

    `silent` maps a worker to the seconds since its last report; `status`, if not None, is shown instead of the status in the log; `steady`
    delays a changed bottleneck, and is None for a single frame.
    """
    status = status or status_of(view)
    live = status in ("created", "running")
    slowest = bottleneck(view) if live else None
    slowest = slowest if steady is None else steady.update(slowest, now_s=now_s)
    ended = end_reason(closing(view).get("reason"))
    parts: list[RenderableType] = [Text(f"{status}: {ended}")] if ended else []
    parts += [_learning(view, width=width - BORDER), _progress(view, now_s=now_s, over=not live)]
    if slowest is not None:
        parts.append(Text.assemble((named(slowest.who), "bold"), (f" ({slowest.why})", "dim")))
    parts += _held_out(view)
    parts.append(_health(view, outage_s=outage_s, live=live))
    errors, last = figures.failures(view)[:FAILURES], _last(view)
    truncated, ess = None if last is None else last.metrics.get("truncated_share"), figures.mean([*view.steps.values()], "ess")
    causes = [*missing_rewards(view)[:FAILURES], *advice(truncated, ess), *map(str, wastes(view, last=RECENT_GROUPS))]
    parts += [Text(cause, style="yellow") for cause in causes]
    parts += [Text(completion.line(width - BORDER), style="dim", no_wrap=True, overflow="ellipsis") for completion in completions]
    absent = missing(view, now_s=now_s, silent=silent) if live else []
    parts += [Text(f"not here: {', '.join(absent)}", style="yellow")] if absent else []
    parts += [Text(error, style="red") for error in errors]
    rows = max(4, height - HEADER_LINES - 2 * len(causes) - len(completions) - bool(absent) - 2 * len(errors))
    parts += [Text(""), _workers(view, now_s=now_s, silent=silent, rows=rows, width=width)]
    schedule = config_of(view).get("schedule", {})
    subtitle = f"[dim]{schedule.get('mode', '')} · {step_sizes(schedule)}[/]" if schedule else None
    title = f"[bold]penstock[/] {view.run} [{STATUS_STYLES.get(status, 'dim')}]{status}[/]"
    return Panel(
        Group(*parts), title=title, title_align="left", subtitle=subtitle, subtitle_align="right", border_style="dim", padding=(0, 1)
    )


def line(view: RunView, *, now_s: float) -> str:
    """Format the state in one line, for output that is not a terminal."""
    parts = [f"step {view.steps_done}/{steps_planned(view) or '?'}"]
    if last_reward(view) is not None:
        parts.append(f"reward {last_reward(view):.3f}")
    if view.version is not None:
        parts.append(f"version {view.version}")
    step = _last(view)
    if step is not None and "lag_mean" in step.metrics:
        parts.append(f"lag {step.metrics['lag_mean']:.1f}")
    for name in ("samples", "tokens"):
        roles = generating_roles() if name == "samples" else ["rollout"]
        if rate := sum(worker.rate(name) or 0.0 for worker in view.workers.values() if worker.role in roles):
            parts.append(f"{rate:.1f} {name}/s" if rate < 100 else f"{rate:,.0f} {name}/s")
    if (elapsed := elapsed_s(view, now_s=now_s)) is not None:
        to_go = to_go_s(view)
        parts.append(duration(elapsed) + (f", {duration(to_go)} to go" if to_go is not None else ""))
    parts += _news(view, now_s=now_s)
    if view.dead_letters:
        parts.append(counted(len(view.dead_letters), "dead letter"))
    return "  ".join(parts)


def _news(view: RunView, *, now_s: float) -> list[str]:
    """Return the most important text about a run: activities before the first step and at the end, a long step, waste, or bottleneck."""
    if view.closed is not None:
        return [f"{worker.worker}: {doing(worker, now_s=now_s)}" for worker in ordered(view) if not worker.ended]
    if not recent_steps(view):
        return [waiting_for(view, now_s=now_s)]
    if (computing := _computing(view, now_s=now_s)) is not None:
        return [computing]
    if causes := wastes(view, last=RECENT_GROUPS):
        return [", ".join(f"{waste.share:.0%} of the groups {waste.status}" for waste in causes)]
    return [named(slowest.who)] if (slowest := bottleneck(view)) is not None else []


def waiting_for(view: RunView, *, now_s: float) -> str:
    """Return the activity of every worker except the tracker, in one line."""
    if not view.workers:
        return "waiting for the workers"
    return "; ".join(f"{worker.worker}: {doing(worker, now_s=now_s)}" for worker in ordered(view) if worker.role != "tracker")


def doing(worker: WorkerView, *, now_s: float, silent_s: float = 0.0) -> str:
    """Format a worker's activity, with the time since its last report if long: "training step 3, micro-batch 2 of 5, 31 s"."""
    text = worker.labels.get("doing", "starting")
    lasts_s = max(silent_s, now_s - worker.since_ns / 1e9 if worker.since_ns else 0.0)
    return f"{text}, {lasts_s:.0f} s" if not activity_of(worker.labels).reports and lasts_s > SILENT_S else text


def missing(view: RunView, *, now_s: float, silent: Mapping[str, float]) -> list[str]:
    """Return the roles that a run needs and that have no worker; [] while workers are starting (`PATIENCE_S`) or stopping."""
    workers = list(view.workers.values())
    there = [worker for worker in workers if not worker.ended and silent.get(worker.worker, 0.0) < GONE_S]
    stopping = any(worker.ended and now_s - worker.time_ns / 1e9 < GONE_S for worker in workers)
    if stopping or max((worker.values.get("uptime_s", 0.0) for worker in there), default=0.0) < PATIENCE_S:
        return []
    apart = config_of(view).get("environment", {}).get("carrier") == "log"
    roles = {worker.role for worker in [*there, *(done for done in workers if done.labels.get("status") == "finished")]}
    roles |= set() if apart else {"environment"}
    return [role.name for role in ROLES.values() if role.on_sample_path and role.name not in roles]


def _computing(view: RunView, *, now_s: float) -> str | None:
    """Return what the trainer computes and for how long; None unless it has computed for more than `SILENT_S`."""
    trainer = next((worker for worker in view.workers.values() if worker.role == "trainer" and not worker.ended), None)
    if trainer is None or activity_of(trainer.labels) != Activity.COMPUTE:
        return None
    text = doing(trainer, now_s=now_s)
    return f"trainer: {text}" if text.endswith(" s") else None


def _progress(view: RunView, *, now_s: float, over: bool) -> Table:
    """Return the line with steps, progress bar, elapsed time and, unless the run is over, remaining time."""
    done, planned = view.steps_done, steps_planned(view)
    grid = Table.grid(expand=True, padding=(0, 2))
    for _ in range(2):
        grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    for _ in range(2):
        grid.add_column(no_wrap=True, justify="right")
    elapsed, to_go = elapsed_s(view, now_s=now_s), None if over else to_go_s(view)
    grid.add_row(
        Text.assemble("step ", (f"{done:,}", "bold"), f" of {planned:,}" if planned else ""),
        f"{done / planned:.0%}" if planned else "",
        ProgressBar(total=planned or 1, completed=done, complete_style="green", finished_style="green"),
        duration(elapsed) if elapsed is not None else "",
        f"{duration(to_go)} to go" if to_go is not None else "",
    )
    return grid


def _learning(view: RunView, *, width: int) -> Text:
    """Format the reward as a sentence, followed by its curve if there is room."""
    if last_reward(view) is None:
        return Text("no sample has been scored yet", style="dim")
    reward = reward_ends(view, steps=view.steps_done, per_version=steps_per_version(view))
    if not view.steps:
        return Text(f"no step yet; reward {last_reward(view):.3f}")
    sentence = learned({"steps": view.steps_done, "reward": reward, "eval": evaluations(view)})
    room = width - len(sentence) - 1
    curve = sparkline(reward["curve"], width=min(room, CURVE_WIDTH)) if room >= LEAST_CURVE else ""
    return Text.assemble((sentence, "bold"), " ", (curve, "green"))


def _held_out(view: RunView) -> list[Text]:
    if not view.evals:
        return []
    version = max(view.evals)
    values = view.evals[version].values
    scores = [score for name in ("greedy", "sampled") if (score := held_out(values, name)) is not None]
    prompts = f", {held_out_prompts(values)}" if values.get("n") else ""
    return [Text.assemble(("eval   ", "dim"), (" · ".join(scores), "bold"), (f" at version {version}{prompts}", "dim"))]


def _episodes(view: RunView) -> list[str]:
    """Return parts of a line about trajectories in environments; [] if the run has none."""
    figures = episodes(view)
    if figures is None:
        return []
    broken = [f"{figures['broken']} environments broken"] if figures["broken"] else []
    return [f"{figures['turns_mean']:.1f} turns", f"environment {1000 * figures['environment_s_mean']:.0f} ms", *broken]


def _health(view: RunView, *, outage_s: float, live: bool) -> Text:
    """Return the line with version, lag, engines and dead letters, or about an outage of the broker."""
    if outage_s > 1.0:
        return Text(f"the broker has not responded for {outage_s:.0f} s; all workers wait, and nothing is lost", style="red")
    step = _last(view)
    parts = [f"version {view.version if view.version is not None else '-'}"]
    if step is not None and "lag_mean" in step.metrics:
        parts.append(f"lag mean {step.metrics['lag_mean']:.1f}, max {step.metrics['lag_max']:.0f}")
        if step.metrics["lag_max"] and "ess" in step.metrics:
            parts.append(f"ESS {step.metrics['ess']:.2f}")
    engines = figures.engines(view)
    if engines["swap_stall_ms_mean"] is not None:
        parts.append(f"swap {engines['swap_stall_ms_mean']:.0f} ms")
    if engines["occupancy"]:
        parts.append(f"batch {engines['occupancy']:.0%} full")
    parts += _episodes(view)
    text = Text(" · ".join(parts))
    if live and not recent_steps(view):
        loading = [worker.worker for worker in ordered(view) if not worker.ended and activity_of(worker.labels) == Activity.START]
        text.append(f" · starting, not ready yet: {', '.join(loading)}" if loading else " · starting", style="dim")
    if view.dead_letters:
        text.append(f" · {counted(len(view.dead_letters), 'dead letter')}", style="yellow")
    return text


def _workers(view: RunView, *, now_s: float, silent: Mapping[str, float], rows: int, width: int) -> Table:
    """Return the table of the first `rows` workers, with the columns that fit into `width` and are not empty."""
    table = Table(box=None, expand=True, padding=(0, 1), header_style="dim", pad_edge=False)
    table.add_column("worker", no_wrap=True)
    table.add_column("now", ratio=1, no_wrap=True, overflow="ellipsis")
    workers = ordered(view)
    lines = [(worker, _row(view, worker, now_s=now_s, silent_s=silent.get(worker.worker, 0.0))) for worker in workers[:rows]]
    shown = COLUMNS if width >= WIDE else ("version", "tokens/s") if width >= NARROW else ()
    candidates = [number for number, name in enumerate(COLUMNS) if name in shown]
    columns = [number for number in candidates if any(cells[number + 2] for _, cells in lines)]  # leave out empty columns
    for number in columns:
        table.add_column(COLUMNS[number], justify="right", no_wrap=True)
    for worker, (name, activity, *numbers) in lines:
        table.add_row(name, activity, *(numbers[number] for number in columns), style="dim" if worker.ended else "")
    if len(workers) > rows:
        table.add_row(f"and {len(workers) - rows} more", style="dim")
    return table


def _row(view: RunView, worker: WorkerView, *, now_s: float, silent_s: float) -> Sequence[RenderableType]:
    """Return the cells of a worker: name, activity, and one for each of `COLUMNS`, "" if unknown."""
    activity = Text(doing(worker, now_s=now_s, silent_s=silent_s))
    if worker.ended:
        activity = Text("ended" if "error" not in worker.labels else "failed")
    elif silent_s > SILENT_S and activity_of(worker.labels).reports:
        activity = Text(f"silent for {silent_s:.0f} s", style="red")
    if (again := len(worker.incarnations) - 1 - resumptions(view)) > 0:
        activity.append(f" (started again {again}x)", style="dim")
    version, lag = worker.values.get("version"), None
    rates: Sequence[float | None]
    if worker.role == "trainer":
        step = _last(view)
        lag = step.metrics.get("lag_mean") if step else None
        rates = _step_rates(view)
    else:
        lag = view.version - version if version is not None and view.version is not None else None
        rates = (worker.rate("admitted" if worker.role == "feeder" else "groups"), worker.rate("samples"), worker.rate("tokens"))
    cpu = worker.rate("cpu_s") if silent_s <= SILENT_S else None  # outdated if the worker is silent
    return (
        Text(worker.worker, style=ROLES[worker.role].colour if worker.role in ROLES else ""),
        activity,
        _number(version, digits=0),
        _number(lag, digits=0 if worker.role != "trainer" else 1),
        *(_number(rate) for rate in rates),
        "" if cpu is None else f"{cpu:.0%}",
    )


def _step_rates(view: RunView) -> tuple[float | None, float | None, float | None]:
    """Return groups, samples and tokens per second that were trained in the last steps."""
    recent = recent_steps(view)[-RECENT_STEPS - 1 :]
    span = recent[-1].time_s - recent[0].time_s if len(recent) > 1 else 0.0
    if span <= 0 or has_ended(view):
        return None, None, None
    groups, samples, tokens = (sum(step.metrics.get(name, 0.0) for step in recent[1:]) / span for name in ("groups", "samples", "tokens"))
    return groups, samples, tokens


def _last(view: RunView) -> StepFacts | None:
    return view.steps[max(view.steps)] if view.steps else None


def _number(value: float | None, *, digits: int = 1) -> str:
    if value is None:
        return ""
    return f"{value:,.{digits}f}" if value < 1000 else f"{value:,.0f}"
