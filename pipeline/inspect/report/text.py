"""Formats a report as text: a table with a row per topic. Unknown figures and empty rows are left out."""

import contextlib
import io
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.pipeline.inspect.report.figures import SAME, SHOWN, held_out_prompts, one_line, shares, step_sizes
from penstock.pipeline.inspect.report.formats import change, duration, figures, joined, percent, rebased_line, sparkline, use_text
from penstock.pipeline.inspect.report.headline import attention, learned, next_steps
from penstock.pipeline.inspect.run_status import end_reason
from penstock.pipeline.runtime.reporting.log_lines import counted

STATUS_STYLES = {"finished": "green", "stopping": "yellow", "stopped": "yellow", "failed": "red", "running": "cyan"}
TEXT_WIDTH, EXAMPLE_WIDTH = 110, 72
SHOWN_LINES, SHOWN_GONE = 2, 3
"""Largest number of lines per row in the short form, and of listed partitions with deleted records."""
FILES = ("report.html", "model", "metrics.jsonl", "logs")

Report = Mapping[str, Any]


class Row(NamedTuple):
    """A row of the report's table: its label, and a function from the report to its lines, [] to leave the row out."""

    label: str
    lines: Callable[[Report], Iterable[str | Text]]
    style: str = ""


def render(report: Report, *, directory: Path | None = None, full: bool = False) -> RenderableType:
    """Return the report for a rich console: short, or with all figures if `full`. `directory` is the run's directory on this machine."""
    status, wall_s = str(report["status"]), report["time"]["wall_s"]
    ended = status in ("finished", "failed")
    lasted = "" if wall_s is None else f" {'in' if ended else 'after'} {duration(wall_s)}"
    lasted += f", resumed {counted(report['resumed'], 'time')}" if report.get("resumed") else ""
    style = STATUS_STYLES.get(status, "")
    title = Text.assemble(f"Run {report['run']} ", "" if ended else "is ", (status, style), f"{lasted}. ", (learned(report), "bold"))
    parts: list[RenderableType] = [title]
    if reason := end_reason(report.get("reason")):
        parts.append(Text(f"{status}: {reason}", style=style))
    parts += ["", _table(report, SHORT, limit=None if full else SHOWN_LINES), ""]
    if full:
        parts += [_table(report, DETAILS, limit=None), "", *(Text(line, style="cyan") for line in mlflow_commands(report))]
    return Group(*parts, *(Text(line, style="cyan") for line in _links(report, directory, full=full)))


def as_text(report: Report, *, directory: Path | None = None, full: bool = False) -> str:
    """Format the report as plain text, for a file or a pipe."""
    return printed(render(report, directory=directory, full=full), width=TEXT_WIDTH)


def printed(view: RenderableType, *, width: int) -> str:
    """Render for a console of `width` columns without colours, and return the text without trailing blanks."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return "".join(line.rstrip() + "\n" for line in console.file.getvalue().splitlines())


def some_of(gone: Sequence[str]) -> list[str]:
    """Return the first lines about deleted records, and the number of further partitions."""
    more = [f"and in {len(gone) - SHOWN_GONE} more partitions"] if len(gone) > SHOWN_GONE else []
    return [*gone[:SHOWN_GONE], *more]


def _table(report: Report, rows: Iterable[Row], *, limit: int | None) -> Table:
    """Return a table of the rows that have lines, with at most about `limit` lines each."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        lines = list(row.lines(report))
        shown = lines if limit is None or len(lines) <= limit + 1 else [*lines[:limit], f"and {len(lines) - limit} more (--full)"]
        for number, line in enumerate(shown):
            table.add_row("" if number else row.label, Text(line, style=row.style) if isinstance(line, str) else line)
    return table


def _reward(report: Report) -> list[Text]:
    reward, schedule, planned = report["reward"], report["schedule"], report["steps_planned"]
    text = Text("no sample has a reward" if reward["first"] is None else change(reward["first"], reward["last"]), style="bold")
    curve = Text(sparkline(reward["curve"]), style="green")
    steps = f"{report['steps']:,} steps" if planned in (None, report["steps"]) else f"{report['steps']:,} of {planned:,} steps"
    sizes = [*filter(None, [step_sizes(schedule)]), *figures(schedule, ("max_lag", "max lag {}"))]
    return [Text("  ").join([text, *([curve] if curve else []), Text(", ".join([steps, str(schedule["mode"]), *sizes]), style="dim")])]


def _held_out(report: Report) -> list[str]:
    evals = report["eval"]
    if not evals:
        return ["not evaluated yet" if report.get("evaluates") else "not evaluated; set eval.source to evaluate on held-out prompts"]
    first, last = evals[0], evals[-1]
    parts = [text for name in ("greedy", "sampled") if (text := _score(name, [first] if last is first else [first, last]))]
    return [", ".join(parts) + (f" ({held_out_prompts(last)})" if last.get("n") else "")]


def _score(name: str, evals: Sequence[Mapping[str, Any]]) -> str | None:
    """Format the accuracy of greedy or sampled completions in the first and last evaluation, and the mean reward if it differs."""
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
    parts = [f"{report['samples']:,} generated{rate}", *figures(speed, ("tokens_per_s", "{:,.0f} tokens/s"))]
    parts += figures(report["practice"], ("truncated_share", "{:.0f} % truncated", 100))
    return joined([*parts, *([f"{without:,} without a reward"] if without else [])], ", ")


def _groups(report: Report) -> list[str]:
    groups = report["groups"]
    truncated = any(waste["status"] == "truncated" for waste in report.get("waste", ()))
    equal = groups["filtered"] and sum(report["filtered"].values()) == groups["filtered"] and not truncated
    notes = {"filtered": " (all rewards equal)" if equal else ""}
    always = ("trained", "filtered", "stale", "failed")
    ends = [f"{count:,} {name}{notes.get(name, '')}" for name, count in groups.items() if name != "admitted" and (count or name in always)]
    return [f"{groups['admitted']:,}: {', '.join(ends)}"]


def _redundancy(report: Report) -> list[str]:
    """Format how trained groups differ from all scored ones, if extra groups compete to be trained."""
    values = report.get("redundancy")
    if not values or values["length"]["trained"] is None:
        return []
    length, reward = values["length"], values["reward"]
    bias = f"trained samples have {length['trained']:.1f} tokens and reward {reward['trained']:.3f}"
    bias += f", all scored ones {length['scored']:.1f} and {reward['scored']:.3f}"
    aborted = values["unfinished"]
    return [bias, *([f"{aborted:,} groups aborted after {length['unfinished']:.1f} tokens a sample"] if length["unfinished"] else [])]


def _staleness(report: Report) -> list[str]:
    lag, size = report["lag"], "".join(figures(report["ess"], ("mean", "; effective sample size {:.2f}")))
    return [] if lag["mean"] is None else [f"mean {lag['mean']:.1f} versions, max {lag['max']:.0f}{size}"]


def _time(report: Report) -> list[str]:
    """Format the busy time, and the largest other use of time, of the stages that limit the speed."""
    bottleneck = (report["bottleneck"] or {}).get("who")
    parts = []
    for role, seconds in report["time_spent"].items():
        if role in ("rollout", "environment", "trainer", bottleneck):
            spent = shares(seconds)
            others = [f" ({percent(share)} {use_text(use)})" for use, share in spent.items() if use != "busy" and share >= SHOWN][:1]
            parts.append(f"{role} {percent(spent.get('busy', 0.0))} busy{''.join(others)}")
    return joined(parts)


def _dead_letters(report: Report) -> list[str]:
    letters = report["dead_letters"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in letters["by_kind"].items())
    return [f"{letters['total']} ({kinds})"] if letters["total"] else []


def _deleted(report: Report) -> list[str]:
    gone = report.get("gone")
    return ["figures do not include deleted records; groups shown as open or unused may have ended", *some_of(gone)] if gone else []


def _changed(report: Report) -> list[str]:
    """Format changes of data or code while the run was stopped: "reward a.py:f after 3 steps: 1f… -> 9c…"."""
    changes = [
        f"{change['what']} after {change['steps']:,} steps: {change['before'][:12]} -> {change['after'][:12]}"
        for change in report.get("changed") or ()
    ]
    return ["while the run was stopped: rewards before and after may not be comparable", *changes] if changes else []


def _empty(report: Report) -> list[str]:
    empty = report["empty_steps"]
    return [f"{empty} of {report['steps']} steps had no trained token and did not change the weights"] if empty else []


def _next_steps(report: Report) -> list[str]:
    return [*([f"penstock run --resume {report['run']}"] if report["status"] == "stopped" else []), *next_steps(report)]


SHORT = (
    Row("reward", _reward),
    Row("held out", _held_out),
    Row("samples", _samples),
    Row("groups", _groups),
    Row("extra groups", _redundancy),
    Row("staleness", _staleness),
    Row("time", _time),
    Row("attention", attention, "yellow"),
    Row("dead letters", _dead_letters, "yellow"),
    Row("restarts", lambda report: joined([f"{role} {count}" for role, count in report["restarts"].items()]), "yellow"),
    Row("deleted", _deleted, "yellow"),
    Row("changed", _changed, "yellow"),
    Row("rebased", lambda report: map(rebased_line, report["rebased"]), "yellow"),
    Row("empty", _empty, "yellow"),
    Row("try next", _next_steps),
)


def problems(report: Report) -> list[str]:
    """Return the lines of the rows about problems, as the page lists them."""
    return [str(line) if row.lines is attention else f"{row.label}: {line}" for row in SHORT if row.style for line in row.lines(report)]


def _examples(report: Report) -> list[str]:
    """Format held-out prompts with their completions before and after training."""
    lines = []
    for example in report.get("examples", ()):
        lines.append(one_line(example["prompt"], EXAMPLE_WIDTH))
        for when in ("before", "after"):
            reward = "".join(figures(example[when], ("reward", "{:.3f}"))) or "-"
            lines.append(f"  {when:<7}{one_line(example[when]['completion'], EXAMPLE_WIDTH)}   reward {reward}")
    return lines


def _filtered(report: Report) -> list[str]:
    causes = {"solved_all": "solved by every sample", "solved_none": "by none", "between": "rewarded alike between"}
    return joined([f"{report['filtered'][name]:,} {text}" for name, text in causes.items() if report["filtered"][name]], ", ")


def _repeated(report: Report) -> list[str]:
    count, admitted = report["repeated"], report["groups"]["admitted"]
    return [f"{count:,} prompts sent again after their groups were abandoned ({percent(count / admitted)})"] if count else []


def _tokens(report: Report) -> list[str]:
    mean = "".join(figures(report["length"], ("admitted", ", {:.1f} a sample")))
    trained = "trainer: {real:,} real tokens, {padded:,} with padding, {computed:,} computed"
    return [
        f"{report['tokens']:,} generated{mean}",
        *([trained.format(**report["trainer_tokens"])] if report["trainer_tokens"]["computed"] else []),
    ]


def episodes_lines(report: Report) -> list[str]:
    """Format the figures about trajectories and environments in one line; [] if the run has none."""
    values = report.get("episodes")
    if not values:
        return []
    parts = [
        "{trajectories:,} of {turns_mean:.1f} turns",
        "environments {environment_s:,.1f} s, engines idle for them {engine_idle_s:,.1f} s",
        *(["{segments_mean:.2f} sequences each"] if values["segments_mean"] > 1.0 else []),
        *(["{results_cut:,} results cut at environment.max_result_tokens"] if values["results_cut"] else []),
        *(["{dropped:,} dropped after {dropped_turns_mean:.1f} turns"] if values["dropped"] else []),
        *(["{losses} lost turns generated again"] if values["losses"] else []),
        *(["{broken} broken ({kinds})"] if values["broken"] else []),
    ]
    kinds = ", ".join(f"{number} {name}" for name, number in values["causes"].items())
    return [" · ".join(parts).format(**values, kinds=kinds)]


def _scoring(report: Report) -> list[str]:
    slots = ("utilisation", "slots for them taken {:.0f} % of the time", 100)
    scoring = report.get("scoring") or {}
    services = "services busy {:.0f} % of the time, {:.1f} of {:,} requests in flight, {:.2f} s each, {:,} failed"
    names = ("utilisation", "in_flight", "requests", "request_s_mean", "retries")
    load = scoring.get("services")
    lines = joined(figures(scoring, ("groups", "{:,.0f} groups"), ("wait_s_mean", "{:.2f} s each"), slots), ", ")
    return [*lines, *([services.format(*(load[name] * (100 if name == "utilisation" else 1) for name in names))] if load else [])]


def _phases(report: Report) -> list[str]:
    paused = report["time"].get("paused_s") or 0.0
    parts = figures(report["time"], *((f"{name}_s", name + " {:.1f} s") for name in ("install", "start", "train", "end", "wall")))
    return joined([*parts, *([f"paused for {duration(paused)} besides"] if paused >= 1.0 else [])])


def _trainer(report: Report) -> list[str]:
    parts = (("trainer_compute_s", "computed {:.1f} s"), ("trainer_other_s", "other work {:.1f} s"), ("trainer_wait_s", "waited {:.1f} s"))
    ratio = figures(report["time"], ("trainer_waiting_ratio", " ({:.0f} %)", 100))
    return [", ".join(figures(report["time"], *parts)) + ratio[0]] if ratio else []


def _time_of(report: Report) -> list[str]:
    return [
        f"{role}: {', '.join(f'{percent(share)} {use_text(use)}' for use, share in shares(seconds).items() if share >= SHOWN)}"
        for role, seconds in report["time_spent"].items()
    ]


def _rounds(report: Report) -> list[str]:
    spans = [seconds for seconds in report["time"]["rollout_to_train_end_s"] if seconds is not None]
    overlap = "".join(figures(report["overlap"], ("share", "; training started before the last sample ended in {:.0f} %", 100)))
    return [f"{statistics.median(spans):.2f} s from first sample to last step (median of {len(spans)}){overlap}"] if spans else []


def _topics(report: Report) -> list[str]:
    share = ("topics_overhead_ratio", "{:.1f} % of the workers' CPU time", 100)
    return joined(figures(report["time"], ("topics_overhead_ms_per_sample", "{:.3f} ms a sample"), share), ", ")


def _lag(report: Report) -> list[str]:
    lag = report["lag"]
    lines = figures(report["ess"], ("min", "effective sample size at least {:.3f}"))
    if lag["steps"]["mean"] is not None and lag["steps"]["max"] != lag["max"]:
        lines.append(f"in optimizer steps mean {lag['steps']['mean']:.2f}, max {lag['steps']['max']:.0f}")
    if len(by_lag := lag["tokens"]["shares"]) > 1:
        parts = " · ".join(f"{percent(share)} at {number}" for number, share in by_lag.items())
        lines.append(f"trained tokens by lag: {parts}; {lag['spans']:.2f} versions in a sample")
    return lines


def _engines(report: Report) -> list[str]:
    engines = report["engines"]
    if not engines["swaps"]:
        return []
    swaps = "{swaps:,.0f} times new weights in flight ({swap_stall_ms_mean:.0f} ms each, {swap_stall_ms_max:.0f} max)"
    parts = [swaps.format(**engines)] if engines["swap_stall_ms_max"] else []
    cached = ("prefix_cache_hits", "{:.0f} % of prompt tokens from the prefix cache", 100)
    aborted = ("aborted_groups", "{:.0f} groups aborted") if engines["aborted_groups"] else ("", "")
    return joined([*parts, *figures(engines, ("occupancy", "batch {:.0f} % full", 100), cached, aborted)])


PRACTICE = (
    ("reward_std", "reward std {:.3f}"),
    ("reward_group_std", "within a group {:.3f}"),
    ("update_norm", "update norm {:.2g}"),
    ("train_tokens_per_s", "{:,.0f} tokens/s trained"),
    ("peak_rss_bytes", "trainer memory peak {:.1f} GiB", 2**-30),
    ("peak_gpu_bytes", "GPU memory peak {:.1f} GiB", 2**-30),
)


def _practice(report: Report) -> list[str]:
    practice = report["practice"]
    first, last = practice["entropy_first"], practice["entropy_last"]
    entropy = [] if first is None or last is None else [f"entropy {change(first, last, '{:.3f}'.format)} nats a token"]
    return joined([*entropy, *figures(practice, *PRACTICE)])


def _weights(report: Report) -> list[str]:
    weights = report["weights"]
    sizes = {"a delta": weights["delta_bytes_median"], "adapters": weights["adapter_bytes_median"]}
    parts = [f" ({what} {100 * size / weights['full_bytes']:.1f} % of a full version)" for what, size in sizes.items() if size is not None]
    digest = str(weights["digest"] or "none")[:16]
    return [f"{weights['versions']} versions, {weights['bytes'] / 1e6:,.1f} MB{''.join(parts)}; digest {digest}"]


DETAILS = (
    Row(
        "schedule",
        lambda report: ["{mode}, order {order}, {versions:,} versions".format(**report["schedule"], versions=report["versions"])],
    ),
    Row(
        "trained",
        lambda report: (
            [] if (trained := report["reward_trained"])["first"] is None else [f"{change(**trained)} of the samples that were trained"]
        ),
    ),
    Row("examples", _examples),
    Row("filtered", _filtered),
    Row("repeated", _repeated),
    Row("tokens", _tokens),
    Row("episodes", episodes_lines),
    Row("rewards", _scoring),
    Row("duplicates", lambda report: [f"{report['duplicates']} ignored"]),
    Row("phases", _phases),
    Row("trainer", _trainer),
    Row("time of", _time_of),
    Row("bottleneck", lambda report: ["{who}: {why}; {advice}".format(**report["bottleneck"])] if report["bottleneck"] else []),
    Row("rounds", _rounds),
    Row("topics", _topics),
    Row("lag", _lag),
    Row("engines", _engines),
    Row("practice", _practice),
    Row("weights", _weights),
)


def mlflow_commands(report: Report) -> list[str]:
    """Return lines that tell how to see the run in MLflow; [] if it was not logged there."""
    uri, number = str(report.get("mlflow_uri") or ""), report.get("mlflow_run_id")
    if not uri or not number:
        return []
    if uri.startswith(("http:", "https:", "databricks")):
        return [f"MLflow: {uri}, run {number}"]
    experiment = experiment_of(uri, str(number))
    page = [f"then http://127.0.0.1:5000/#/experiments/{experiment}?workflowType=machine_learning"] if experiment else []
    return [f"mlflow ui --backend-store-uri {uri}", *page]


def experiment_of(uri: str, run: str) -> str | None:
    """Return the id of the experiment of an MLflow run in a local database; None if the database does not have the run."""
    path = Path(uri.removeprefix("sqlite:///"))
    if not uri.startswith("sqlite:///") or not path.is_file():
        return None
    import sqlite3

    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            row = database.execute("select experiment_id from runs where run_uuid = ?", (run,)).fetchone()
    except sqlite3.Error:
        return None
    return None if row is None else str(row[0])


def _links(report: Report, directory: Path | None, *, full: bool) -> list[str]:
    """Return commands that show more about the run, then its directory and the files in it."""
    commands = [
        f"penstock explain {report['run']} {max(0, report['groups']['admitted'] - 1)}",
        *([] if full else [f"penstock report {report['run']} --full"]),
        "penstock ui",
    ]
    names = [f"{name}/" if (directory / name).is_dir() else name for name in FILES if (directory / name).exists()] if directory else []
    # A line each: a terminal would fold them within a name.
    return [*commands, *([str(directory), f"  {'  '.join(names)}"] if names else [])]
