"""Plots trained tokens per second against the number of rollout accelerators, one line per schedule."""

from pathlib import Path

from penstock.pipeline.launch.planning.search import Plan
from penstock.pipeline.launch.planning.text import modes_of

FORMATS = (".png", ".svg")
COLOURS = ("#666666", "#0b7285", "#e8590c", "#2f9e44", "#7048e8")


def check_path(path: Path) -> None:
    """Raises `ValueError` for a path that no plot can be written to."""
    if path.suffix not in FORMATS:
        raise ValueError(f"--plot {path}: expected a name that ends in {' or '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: the folder does not exist")


def plot(plan: Plan, path: Path) -> None:
    """Write the plot as .png or .svg. Raises `ValueError` and `OSError`."""
    check_path(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    canvas = (FigureCanvasSVG if path.suffix == ".svg" else FigureCanvasAgg)(figure)
    axes = figure.add_subplot()
    for colour, mode in zip(COLOURS, modes_of(plan.simulated), strict=False):
        points = [candidate for candidate in plan.simulated if candidate.mode == mode]
        axes.plot(
            [point.generating for point in points], [point.tokens_per_s for point in points], marker="o", ms=4, color=colour, label=mode
        )
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
    axes.axhline(plan.alternating.tokens_per_s, color="#666666", ls=":", lw=1, label="all accelerators alternately")
    axes.set_xlabel(f"accelerators for rollouts, of {plan.cluster.accelerators}")
    axes.set_ylabel("trained tokens per second")
    axes.set_title(f"prompts_per_step = {best.prompts_per_step}, lag of at most {plan.cluster.max_lag} versions", fontsize=10)
    axes.set_ylim(bottom=0, top=1.12 * max(best.tokens_per_s, plan.alternating.tokens_per_s))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="lower right", framealpha=0.8)
    canvas.print_figure(path, dpi=150)
