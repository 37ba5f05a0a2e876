"""A plan as a picture: trained tokens per second by the number of rollout accelerators, a line for each mode.

The rule: the points are those that were simulated; the format follows from the file's name.
"""

from pathlib import Path

from penstock.pipeline.planning.search import Plan
from penstock.pipeline.planning.text import modes_of

FORMATS = (".png", ".svg")
COLOURS = ("#666666", "#0b7285", "#e8590c", "#2f9e44", "#7048e8")


def check_path(path: Path) -> None:
    """Raises `ValueError` for a path that no picture can be written to."""
    if path.suffix not in FORMATS:
        raise ValueError(f"--plot {path}: a picture ends in {' or '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: there is no such folder")


def draw(plan: Plan, path: Path) -> None:
    """Write the picture. Raises `ValueError` and `OSError`."""
    check_path(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    canvas = (FigureCanvasSVG if path.suffix == ".svg" else FigureCanvasAgg)(figure)
    axes = figure.add_subplot()
    for colour, mode in zip(COLOURS, modes_of(plan.simulated), strict=False):
        points = [one for one in plan.simulated if one.mode == mode]
        axes.plot([one.generating for one in points], [one.tokens_per_s for one in points], marker="o", ms=4, color=colour, label=mode)
    best = plan.best
    axes.plot(best.generating, best.tokens_per_s, marker="o", ms=11, mfc="none", mec="black", ls="none")
    axes.annotate(
        f"{best.mode}: {best.generating} + {best.training}, {best.tokens_per_s:,.0f} tokens/s",
        (best.generating, best.tokens_per_s),
        textcoords="offset points",
        xytext=(0, 9),
        ha="center",
        fontsize=9,
    )
    axes.axhline(plan.in_turns.tokens_per_s, color="#666666", ls=":", lw=1, label="all accelerators in turns")
    axes.set_xlabel(f"accelerators for rollouts, of {plan.cluster.accelerators}")
    axes.set_ylabel("trained tokens per second")
    axes.set_title(f"prompts_per_step = {best.prompts_per_step}, lag of at most {plan.cluster.max_lag} versions", fontsize=10)
    axes.set_ylim(bottom=0, top=1.12 * max(best.tokens_per_s, plan.in_turns.tokens_per_s))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="lower right", framealpha=0.8)
    canvas.print_figure(path, dpi=150)
