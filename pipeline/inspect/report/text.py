"""Text of a report: one table of rows, of which `penstock report` prints the first ones and `--full` prints all.

A row without lines is left out, and so is a figure that is unknown. Rows compute nothing: their figures are those of `report --json`.
"""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.pipeline.inspect.report.details import DETAILS, mlflow_commands
from penstock.pipeline.inspect.report.evaluations import SAME
from penstock.pipeline.inspect.report.formats import Figure, Report, Row, change, duration, figures, joined, percent, sparkline, use_text
from penstock.pipeline.inspect.report.headline import learned, next_steps, warnings
from penstock.pipeline.inspect.report.rebases import rebased_line
from penstock.pipeline.inspect.report.time_spent import SHOWN, shares
from penstock.pipeline.inspect.run_status import end_reason

STATUS_STYLES = {"finished": "green", "stopping": "yellow", "stopped": "yellow", "failed": "red", "running": "cyan"}
TEXT_WIDTH = 110
SHOWN_LINES, SHOWN_GONE = 2, 3
"""Lines of a row in the short form, and partitions with deleted records that the full form names."""
FILES = ("report.html", "model", "metrics.jsonl", "logs")


def render(report: Report, *, directory: Path | None = None, full: bool = False) -> RenderableType:
    """The report for a rich console; `directory` is the run's folder on this machine."""
    status, wall_s = str(report["status"]), report["time"]["wall_s"]
    ended = status in ("finished", "failed")
    lasted = "" if wall_s is None else f" {'in' if ended else 'after'} {duration(wall_s)}"
    style = STATUS_STYLES.get(status, "")
    title = Text.assemble(f"Run {report['run']} ", "" if ended else "is ", (status, style), f"{lasted}. ", (learned(report), "bold"))
    parts: list[RenderableType] = [title]
    if reason := end_reason(report.get("reason")):
        parts.append(Text(f"{status}: {reason}", style=style))
    parts += [Text(line, style="yellow") for line in warnings(report)]
    parts += ["", _table(report, SHORT, limit=None if full else SHOWN_LINES), ""]
    if full:
        parts += [_table(report, DETAILS, limit=None), "", *mlflow_commands(report)]
    return Group(*parts, *_links(report, directory, full=full))


def as_text(report: Report, *, directory: Path | None = None, full: bool = False) -> str:
    """The same without colours, for a file or a pipe."""
    return printed(render(report, directory=directory, full=full), width=TEXT_WIDTH)


def printed(view: RenderableType, *, width: int) -> str:
    """A rich renderable as lines of plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return "".join(line.rstrip() + "\n" for line in console.file.getvalue().splitlines())


def change_line(change: Mapping[str, Any]) -> str:
    """One change of data or code while the run was stopped.

    Example:
        change_line({"what": "reward a.py:f", "steps": 3, "before": "1f…", "after": "9c…"})  # -> "reward a.py:f after 3 steps: 1f… -> 9c…"
    """
    return f"{change['what']} after {change['steps']:,} steps: {change['before'][:12]} -> {change['after'][:12]}"


def some_of(gone: Sequence[str]) -> list[str]:
    """The first lines about deleted records, and the number of the others."""
    more = [f"and so in {len(gone) - SHOWN_GONE} partitions more"] if len(gone) > SHOWN_GONE else []
    return [*gone[:SHOWN_GONE], *more]


def _table(report: Report, rows: Iterable[Row], *, limit: int | None) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        lines = list(row.lines(report))
        shown = lines if limit is None or len(lines) <= limit + 1 else [*lines[:limit], f"and {len(lines) - limit} more (--full)"]
        for number, line in enumerate(shown):
            table.add_row("" if number else row.label, Text(line, style=row.style) if isinstance(line, str) else line)
    return table


SIZES = (Figure("prompts_per_step", "U {}", 1), Figure("samples_per_prompt", "K {}", 1), Figure("max_lag", "max lag {}", 1))


def _reward(report: Report) -> list[Text]:
    reward, schedule, planned = report["reward"], report["schedule"], report["steps_planned"]
    text = Text("no sample has a reward" if reward["first"] is None else change(reward["first"], reward["last"]), style="bold")
    curve = Text(sparkline(reward["curve"]), style="green")
    steps = f"{report['steps']:,} steps" if planned in (None, report["steps"]) else f"{report['steps']:,} of {planned:,} steps"
    sizes = figures(schedule, SIZES)
    return [Text("  ").join([text, *([curve] if curve else []), Text(", ".join([steps, str(schedule["mode"]), *sizes]), style="dim")])]


def _held_out(report: Report) -> list[str]:
    evals = report["eval"]
    if not evals:
        return ["not evaluated; eval.source names held-out prompts"]
    first, last = evals[0], evals[-1]
    parts = [text for name in ("greedy", "sampled") if (text := _score(name, [first] if last is first else [first, last]))]
    prompts = f" ({int(last['n'])} prompts)" if last.get("n") else ""
    failed = sum(int(entry.get("n_failed") or 0) for entry in evals)
    return [", ".join(parts) + prompts + (f"; {failed} completions without a reward" if failed else "")]


def _score(name: str, evals: Sequence[Mapping[str, Any]]) -> str | None:
    """Accuracy of greedy or sampled completions in the first and last evaluation, and their mean reward if it is another number."""
    solved, rewards = ([float(entry.get(f"{name}_{key}", math.nan)) for entry in evals] for key in ("accuracy", "reward"))
    if any(map(math.isnan, solved)):
        return None
    accuracy = " -> ".join(map(percent, solved))
    if any(map(math.isnan, rewards)) or all(abs(reward - share) < SAME for reward, share in zip(rewards, solved, strict=True)):
        return f"{name} {accuracy}"
    return f"{name} reward {' -> '.join(f'{reward:.2f}' for reward in rewards)} ({accuracy} solved)"


def _samples(report: Report) -> list[str]:
    speed, without = report["throughput"], report.get("no_reward")
    rate = f" ({speed['samples_per_s']:,.0f}/s)" if speed["samples_per_s"] else ""
    parts = [f"{report['samples']:,} generated{rate}", *figures(speed, [Figure("tokens_per_s", "{:,.0f} tokens/s")])]
    parts += figures(report["practice"], [Figure("truncated_share", "{:.0f} % truncated", 100)])
    return [", ".join([*parts, *([f"{without:,} without a reward"] if without else [])])]


def _groups(report: Report) -> list[str]:
    groups = report["groups"]
    truncated = any(waste["fate"] == "truncated" for waste in report.get("waste", ()))
    equal = groups["filtered"] and sum(report["filtered"].values()) == groups["filtered"] and not truncated
    notes = {"filtered": " (all rewards equal)" if equal else ""}
    always = ("trained", "filtered", "stale", "failed")
    ends = [f"{count:,} {name}{notes.get(name, '')}" for name, count in groups.items() if name != "admitted" and (count or name in always)]
    return [f"{groups['admitted']:,}: {', '.join(ends)}"]


def _staleness(report: Report) -> list[str]:
    if report["lag"]["mean"] is None:
        return []
    ess = report["ess"]["mean"]
    size = "" if ess is None else f"; effective sample size {ess:.2f}"
    return [f"mean {report['lag']['mean']:.1f} versions, at most {report['lag']['max']:.0f}{size}"]


def _time(report: Report) -> list[str]:
    """Busy time and the largest other use of the stages that matter for the speed."""
    bottleneck = (report["bottleneck"] or {}).get("who")
    parts = []
    for role, seconds in report["time_spent"].items():
        if role not in ("rollout", "environment", "trainer", bottleneck):
            continue
        spent = shares(seconds)
        others = [f"{percent(share)} {use_text(use)}" for use, share in spent.items() if use != "busy" and share >= SHOWN][:1]
        parts.append(f"{role} {percent(spent.get('busy', 0.0))} busy" + (f" ({others[0]})" if others else ""))
    return joined(parts)


def _dead_letters(report: Report) -> list[str]:
    letters = report["dead_letters"]
    if not letters["total"]:
        return []
    kinds = ", ".join(f"{count} {kind}" for kind, count in letters["by_kind"].items())
    return [f"{letters['total']} ({kinds})", *(f"{count:,} x {error}" for error, count in letters.get("reward_errors", {}).items())]


def _restarts(report: Report) -> list[str]:
    restarts, resumed = [f"{role} {count}" for role, count in report["restarts"].items()], report.get("resumed")
    return joined([*restarts, *([f"the whole run was resumed {resumed} time{'s' if resumed > 1 else ''}"] if resumed else [])])


def _deleted(report: Report) -> list[str]:
    gone = report.get("gone")
    return ["the figures are of what is kept; groups that seem open or unused may have ended", *some_of(gone)] if gone else []


def _empty(report: Report) -> list[str]:
    empty = report["empty_steps"]
    return [f"{empty} of {report['steps']} steps had no trained token and left the weights as they were"] if empty else []


def _next_steps(report: Report) -> list[str]:
    resume = [f"penstock run --resume {report['run']}"] if report["status"] == "stopped" else []
    return [*resume, *next_steps(report)]


SHORT = (
    Row("reward", _reward),
    Row("held out", _held_out),
    Row("samples", _samples),
    Row("groups", _groups),
    Row("staleness", _staleness),
    Row("time", _time),
    Row("dead letters", _dead_letters, "yellow"),
    Row("restarts", _restarts, "yellow"),
    Row("deleted", _deleted, "yellow"),
    Row("changed", lambda report: map(change_line, report.get("changed") or ()), "yellow"),
    Row("rebased", lambda report: map(rebased_line, report["rebased"]), "yellow"),
    Row("empty", _empty, "yellow"),
    Row("next step", _next_steps),
)
"""Rows of both forms."""


def _links(report: Report, directory: Path | None, *, full: bool) -> list[Text]:
    run = report["run"]
    commands = [f"penstock explain {run} 0", *([] if full else [f"penstock report {run} --full"]), "penstock ui"]
    lines = ["    ".join(commands)]
    if directory is not None:
        names = [f"{name}/" if (directory / name).is_dir() else name for name in FILES if (directory / name).exists()]
        lines += [f"{directory}: {'  '.join(names)}"] if names else []
    return [Text(line, style="cyan") for line in lines]
