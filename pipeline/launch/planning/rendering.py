"""A plan as text, as plain data, and as a plot of trained tokens per second against the number of rollout accelerators."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from penstock.pipeline.inspect.report.text import printed
from penstock.pipeline.launch.planning.search import NEAR_BEST, Candidate, Plan

WIDTH = 120


def reasons(plan: Plan) -> list[str]:
    """Reasons for the best split, one sentence each."""
    best, outcome = plan.best, plan.best.outcome
    busy, waiting = outcome.rollout_busy_share, outcome.trainer_waiting_ratio
    lines = []
    if waiting < 0.1:
        lines.append(f"Training is the limit: the trainer waits {waiting:.0%} of its time, so more rollout accelerators gain nothing.")
    elif busy > 0.9:
        lines.append(
            f"Rollout is the limit: engines generate {busy:.0%} of the time and the trainer waits {waiting:.0%}; one more accelerator for "
            "rollouts would slow training down by more than it gains."
        )
    else:
        lines.append(f"Rollout and training wait for each other: engines generate {busy:.0%} of the time, the trainer waits {waiting:.0%}.")
    lines += [
        f"{candidate.generating} for rollouts instead of {best.generating}: "
        f"{round(candidate.tokens_per_s / best.tokens_per_s - 1, 2) + 0.0:+.0%} tokens/s."  # never -0%
        for candidate in neighbours(plan)
    ]
    if len(plan.by_step_size) > 1:
        lines.append(
            f"prompts_per_step = {best.prompts_per_step} is the smallest that reaches {NEAR_BEST:.0%} of the best speed: "
            "larger steps learn less from each sample."
        )
    if best.max_lag:
        lines.append(
            f"Trained groups are {outcome.lag_mean:.1f} versions old on average, {outcome.lag_max} at most; "
            f"a token {outcome.token_lag_mean:.1f} on average."
        )
    if plan.cluster.settings is not None:
        values = ", ".join(f"{key} = {json.dumps(value)}" for key, value in plan.cluster.settings[best.training].items())
        fitting = " or ".join(map(str, sorted(plan.cluster.settings)))
        lines.append(f"Training fits into the memory of {fitting} accelerators; the settings for {best.training}: {values}.")
    dropped = {cause: count for cause, count in outcome.dropped.items() if count}
    generated = outcome.samples // plan.cluster.base.schedule.samples_per_prompt + sum(dropped.values())
    if sum(dropped.values()) > 0.05 * generated:
        causes = " and ".join(f"{count / generated:.0%} {cause}" for cause, count in dropped.items())
        lines.append(f"Of the generated groups {causes}: a smaller rollout.concurrency or a larger lag bound would waste less.")
    return lines


def neighbours(plan: Plan) -> list[Candidate]:
    """The candidates of the best mode with the next smaller and the next larger number of rollout accelerators."""
    ordered = [candidate for candidate in plan.simulated if candidate.mode == plan.best.mode]
    index = ordered.index(plan.best)
    return [ordered[other] for other in (index - 1, index + 1) if 0 <= other < len(ordered)]


def plan_as_text(plan: Plan) -> str:
    """The recommendation, its reasons, and the table of modes."""
    best, base = plan.best, plan.cluster.base.schedule
    steps = f"prompts_per_step = {best.prompts_per_step}, samples_per_prompt = {base.samples_per_prompt}, max_lag = {best.max_lag}"
    head = [
        f"best of {plan.cluster.accelerators}: {best.generating} for rollouts, {best.training} for training; mode = {best.mode}, {steps}",
        f"{best.tokens_per_s:,.0f} trained tokens/s: {plan.speedup:.2f}x synchronous at its best split "
        f"({plan.synchronous.generating} + {plan.synchronous.training}), {best.tokens_per_s / plan.alternating.tokens_per_s:.2f}x "
        "all accelerators alternately",
        *reasons(plan),
        "",
    ]
    columns = ("mode", "rollout", "training", "U", "tokens/s", "speed-up", "trainer waits", "engines busy", "lag", "max lag", "dropped")
    rows = [_row(candidate, base=plan.synchronous) for candidate in plan.by_mode]
    rows.append(("in turns", *_row(plan.alternating, base=plan.synchronous)[1:]))
    sizes = [_row(candidate, base=plan.synchronous) for candidate in plan.by_step_size] if len(plan.by_step_size) > 1 else []
    return "\n".join(head) + "\n" + table(columns, rows, sizes)


def table(columns: Sequence[str], *sections: Sequence[Sequence[str]]) -> str:
    """Sections of rows below these columns, as text."""
    view = Table(box=None, pad_edge=False)
    for number, name in enumerate(columns):
        view.add_column(name, justify="right" if number else "left", no_wrap=True)
    for section in filter(None, sections):
        for row in section:
            view.add_row(*row)
        view.add_section()
    return printed(view, width=WIDTH)


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data: the best candidate, its reasons, and the candidates it is compared with."""
    return {
        "accelerators": plan.cluster.accelerators,
        "best": candidate_as_json(plan.best),
        "speedup": plan.speedup,
        "speedup_over_in_turns": plan.best.tokens_per_s / plan.alternating.tokens_per_s,
        "reasons": reasons(plan),
        "by_mode": [candidate_as_json(candidate) for candidate in plan.by_mode],
        "by_prompts_per_step": [candidate_as_json(candidate) for candidate in plan.by_step_size],
        "in_turns": candidate_as_json(plan.alternating),
        "simulated": [candidate_as_json(candidate) for candidate in plan.simulated],
    }


def candidate_as_json(candidate: Candidate) -> dict[str, Any]:
    """A candidate as plain data: split, schedule and measurements."""
    choice = {name: getattr(candidate, name) for name in ("mode", "generating", "training", "prompts_per_step", "max_lag")}
    return {**choice, **candidate.outcome.as_json(), "tokens_per_s": candidate.tokens_per_s}


def _row(candidate: Candidate, *, base: Candidate) -> tuple[str, ...]:
    """A row of the table of modes; the speed-up is that over `base`."""
    outcome = candidate.outcome
    return (
        candidate.mode,
        str(candidate.generating),
        str(candidate.training),
        str(candidate.prompts_per_step),
        f"{candidate.tokens_per_s:,.0f}",
        f"{candidate.tokens_per_s / base.tokens_per_s:.2f}",
        f"{outcome.trainer_waiting_ratio:.0%}",
        f"{outcome.rollout_busy_share:.0%}",
        f"{outcome.lag_mean:.1f}",
        str(outcome.lag_max),
        str(sum(outcome.dropped.values())),
    )


FORMATS = (".png", ".svg")
COLOURS = ("#666666", "#0b7285", "#e8590c", "#2f9e44", "#7048e8")


def check_path(path: Path) -> None:
    """Raise `ValueError` for a path to which no plot can be written."""
    if path.suffix not in FORMATS:
        raise ValueError(f"--plot {path}: expected a name that ends in {' or '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: the folder does not exist")


def plot(plan: Plan, path: Path) -> None:
    """Write the plot as .png or .svg. Raises `ValueError` or `OSError`."""
    check_path(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    canvas = (FigureCanvasSVG if path.suffix == ".svg" else FigureCanvasAgg)(figure)
    axes = figure.add_subplot()
    for colour, mode in zip(COLOURS, dict.fromkeys(candidate.mode for candidate in plan.simulated), strict=False):
        points = [candidate for candidate in plan.simulated if candidate.mode == mode]
        axes.plot(
            [point.generating for point in points], [point.tokens_per_s for point in points], marker="o", ms=4, color=colour, label=mode
        )
    best = plan.best
    axes.plot(best.generating, best.tokens_per_s, marker="o", ms=11, mfc="none", mec="black", ls="none")
    axes.annotate(
        f"{best.mode}: {best.generating} + {best.training}, {best.tokens_per_s:,.0f} tokens/s", (best.generating, best.tokens_per_s),
        textcoords="offset points", xytext=(0, 9), ha="center", fontsize=9,
    )  # fmt: skip
    axes.axhline(plan.alternating.tokens_per_s, color="#666666", ls=":", lw=1, label="all accelerators alternately")
    axes.set_xlabel(f"accelerators for rollouts, of {plan.cluster.accelerators}")
    axes.set_ylabel("trained tokens per second")
    axes.set_title(f"prompts_per_step = {best.prompts_per_step}, lag of at most {plan.cluster.max_lag} versions", fontsize=10)
    axes.set_ylim(bottom=0, top=1.12 * max(best.tokens_per_s, plan.alternating.tokens_per_s))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="lower right", framealpha=0.8)
    canvas.print_figure(path, dpi=150)
