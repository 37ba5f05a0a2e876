"""A report as a person reads it: a dozen lines, with the way on from here at the end.

The rule: it shows what the report holds and computes nothing of its own; a figure that is not known is left out.
"""

import contextlib
import io
import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from penstock.pipeline.observe.report.changes import change_line
from penstock.pipeline.observe.report.episodes import episodes_line
from penstock.pipeline.observe.report.evaluations import held_out, one_line
from penstock.pipeline.observe.report.rebases import rebased_line
from penstock.pipeline.observe.report.scoring import scoring_line
from penstock.pipeline.observe.report.time_spent import as_line
from penstock.pipeline.observe.report.verdict import verdict
from penstock.pipeline.observe.run_status import end_reason

BARS = "▁▂▃▄▅▆▇█"
STATUS_STYLES = {"finished": "green", "stopping": "yellow", "stopped": "yellow", "failed": "red", "running": "cyan"}
CURVE_WIDTH = 32
TEXT_WIDTH = 110
EXAMPLE_WIDTH = 72
SHOWN_GONE = 3
"""Partitions without their beginning that are named; `report --json` has all."""


def render(report: Mapping[str, Any], *, directory: Path | None = None) -> RenderableType:
    """The report for a rich console; `directory` is where the run's files lie on this machine."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, line in [*_learning(report), *_counts(report), *_costs(report)]:
        table.add_row(name, line)
    status = str(report["status"])
    title = Text.assemble((f"run {report['run']}", "bold"), " ", (status, STATUS_STYLES.get(status, "")))
    parts: list[RenderableType] = [Rule(title, style="dim"), table]
    if reason := end_reason(report.get("reason")):
        parts.insert(1, Text(f"{status}: {reason}", style=STATUS_STYLES.get(status, "")))
    first, *others = verdict(report)
    said = [Text(first, style="bold"), *(Text(line, style="yellow") for line in others)]
    return Group(parts[0], *said, *parts[1:], _next(report, directory), Rule(style="dim"))


def as_text(report: Mapping[str, Any], *, directory: Path | None = None) -> str:
    """The same without colours, for a file or a pipe."""
    return printed(render(report, directory=directory), width=TEXT_WIDTH)


def printed(picture: RenderableType, *, width: int) -> str:
    """A picture as lines of plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(picture)
    assert isinstance(console.file, io.StringIO)
    return "".join(line.rstrip() + "\n" for line in console.file.getvalue().splitlines())


def sparkline(values: Sequence[float | None], *, width: int = CURVE_WIDTH) -> str:
    """A curve in one line of at most `width` characters, from the smallest to the largest value.

    Example:
        sparkline([0.0, 0.5, 1.0])  # -> "▁▅█"
    """
    known = [value for value in values if value is not None]
    if not known:
        return ""
    count = min(width, len(known))
    bounds = [place * len(known) // count for place in range(count + 1)]
    means = [statistics.fmean(known[low:high]) for low, high in itertools.pairwise(bounds)]
    low, high = min(means), max(means)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] if high > low else BARS[0] for value in means)


def duration(seconds: float) -> str:
    """Seconds for people.

    Example:
        duration(3725)  # -> "1:02:05"
    """
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def some_of(gone: Sequence[str]) -> list[str]:
    """Of the lines about deleted records those that are shown."""
    more = [f"and so in {len(gone) - SHOWN_GONE} partitions more"] if len(gone) > SHOWN_GONE else []
    return [*gone[:SHOWN_GONE], *more]


def _learning(report: Mapping[str, Any]) -> list[tuple[str, Text]]:
    reward, trained, lines = report["reward"], report["reward_trained"], []
    schedule, planned = report["schedule"], report["steps_planned"]
    steps = f"{report['steps']:,} steps" if planned in (None, report["steps"]) else f"{report['steps']:,} of {planned:,} steps"
    lines.append(("schedule", Text(f"{schedule['mode']}, order {schedule['order']}: {steps}, {report['versions']:,} versions")))
    if reward["first"] is not None:
        line = Text.assemble((f"{reward['first']:.3f} → {_number(reward['last'])}", "bold"), "   ", (sparkline(reward["curve"]), "green"))
        lines.append(("reward", line.append("   all scored samples, first → last tenth", style="dim")))
    if trained["first"] is not None:
        lines.append(("", Text(f"{trained['first']:.3f} → {_number(trained['last'])}   of the samples that were trained", style="dim")))
    if report["eval"]:
        lines.append(("eval", _evals(report["eval"])))
    return lines + _examples(report.get("examples", ()))


def _examples(examples: Sequence[Mapping[str, Any]]) -> list[tuple[str, Text]]:
    """Held-out prompts, each with the answer before training and the newest one."""
    lines = []
    for number, one in enumerate(examples):
        answers = [
            Text.assemble(
                (f"\n  {when:<7}", "dim"),
                one_line(one[when]["completion"], EXAMPLE_WIDTH),
                (f"   reward {_number(one[when]['reward'])}", "dim"),
            )
            for when in ("before", "after")
        ]
        lines.append(("examples" if number == 0 else "", Text.assemble(" ".join(one["prompt"].split()), *answers)))
    return lines


def _evals(evals: Sequence[Mapping[str, Any]]) -> Text:
    first, last = evals[0], evals[-1]
    found = []
    for name in ("greedy", "sampled"):
        ends = [score for one in ([first] if last is first else [first, last]) if (score := held_out(one, name)) is not None]
        if ends:
            found.append(" → ".join([ends[0], *(score.removeprefix(f"{name} ") for score in ends[1:])]))
    prompts = f", {int(last['n'])} held-out prompts" if last.get("n") else ""
    if failed := sum(int(one.get("n_failed") or 0) for one in evals):
        prompts += f", {failed} completions without a reward"
    span = f"version {first['version']} → {last['version']}" if last is not first else f"version {first['version']}"
    return Text.assemble((" · ".join(found), "bold"), (f"   {span}{prompts}", "dim"))


def _counts(report: Mapping[str, Any]) -> list[tuple[str, Text]]:
    groups, length, speed = report["groups"], report["length"], report["throughput"]
    ends = [f"{count:,} {name}" for name, count in groups.items() if name != "admitted" and (count or name == "trained")]
    samples = f"{report['samples']:,} samples, {report['tokens']:,} tokens"
    if length["admitted"] is not None:
        samples += f", {length['admitted']:.1f} a sample"
    if speed["samples_per_s"]:
        samples += f"; {speed['samples_per_s']:,.1f} samples/s, {speed['tokens_per_s']:,.0f} tokens/s"
    if without := report.get("no_reward"):
        samples += f"; {without:,} without a reward"
    causes = {"solved_all": "solved by every sample", "solved_none": "by none", "between": "rewarded alike between"}
    filtered = [f"{report['filtered'][name]:,} {text}" for name, text in causes.items() if report["filtered"][name]]
    ends += [f"of the filtered {', '.join(filtered)}"] if filtered else []
    if again := report["repeated"]:
        ends.append(f"{again:,} asked again after they were abandoned ({again / groups['admitted']:.1%})")
    letters = report["dead_letters"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in letters["by_kind"].items())
    count = f"{letters['total']} dead letter{'s' if letters['total'] != 1 else ''}"
    refused = count + (f" ({kinds})" if kinds else "") + f", {report['duplicates']} duplicates ignored"
    lines = [
        ("groups", Text(f"{groups['admitted']:,} admitted: " + " · ".join(ends))),
        ("drawn", Text(samples)),
        *([("episodes", Text(episodes_line(report["episodes"])))] if report.get("episodes") else []),
        *([("rewards", Text(scoring_line(report["scoring"])))] if report.get("scoring") else []),
        ("refused", Text(refused, style="yellow" if letters["total"] else "")),
        *[("", Text(f"{count:,} x {error}", style="yellow")) for error, count in letters.get("reward_errors", {}).items()],
    ]
    if gone := report.get("gone"):
        said = "the figures are of what is kept; groups that seem open or unused may have ended"
        lines.append(("deleted", Text("\n".join([said, *some_of(gone)]), style="yellow")))
    if changed := report.get("changed"):
        lines.append(("changed", Text("\n".join(map(change_line, changed)), style="yellow")))
    if rebased := report["rebased"]:
        lines.append(("rebased", Text("\n".join(rebased_line(entry) for entry in rebased), style="yellow")))
    if empty := report["empty_steps"]:
        text = f"{empty} of {report['steps']} steps had no trained token and left the weights as they were"
        lines.append(("empty", Text(text, style="yellow")))
    restarts = [f"{role} {count}" for role, count in report["restarts"].items()]
    restarts += [f"the whole run was resumed {again} time{'s' if again > 1 else ''}"] if (again := report.get("resumed")) else []
    if restarts:
        lines.append(("restarts", Text(" · ".join(restarts))))
    return lines


def _costs(report: Mapping[str, Any]) -> list[tuple[str, Text]]:
    time, lag, weights, lines = report["time"], report["lag"], report["weights"], list[tuple[str, Text]]()
    phases = [(name, time.get(f"{name}_s")) for name in ("install", "start", "train", "end", "wall")]
    known = [f"{name} {seconds:.1f} s" for name, seconds in phases if seconds is not None]
    if known:
        paused = time.get("paused_s") or 0.0
        lines.append(("time", Text(" · ".join([*known, *([f"paused for {duration(paused)} besides"] if paused >= 1.0 else [])]))))
    spans = [seconds for seconds in time["rollout_to_train_end_s"] if seconds is not None]
    if time["trainer_waiting_ratio"] is not None:
        seconds = [f"{name} {time[f'trainer_{key}_s']:.1f} s" for name, key in (("computed", "compute"), ("other work", "other"))]
        waited = f"waited {time['trainer_wait_s']:.1f} s ({time['trainer_waiting_ratio']:.0%})"
        lines.append(("trainer", Text(", ".join([*seconds, waited]))))
    tokens = report["trainer_tokens"]
    if tokens["computed"]:
        saved = f"{tokens['real']:,} real tokens, {tokens['padded']:,} with padding, {tokens['computed']:,} computed"
        lines.append(("", Text(saved, style="dim")))
    for place, (role, seconds) in enumerate(report["time_spent"].items()):
        lines.append(("time of" if place == 0 else "", Text(f"{role}: {as_line(seconds)}")))
    if (slowest := report["bottleneck"]) is not None:
        lines.append(("bottleneck", Text(f"{slowest['who']}: {slowest['why']}; {slowest['advice']}")))
    if spans:
        overlap = report["overlap"]
        line = f"{statistics.median(spans):.2f} s from first sample to last step (median of {len(spans)})"
        if overlap["share"] is not None:
            line += f"; training began before the last sample was drawn in {overlap['share']:.0%}"
        lines.append(("rounds", Text(line)))
    if time["topics_overhead_ms_per_sample"] is not None:
        share = f", {time['topics_overhead_ratio']:.1%} of the workers' CPU time" if time["topics_overhead_ratio"] is not None else ""
        lines.append(("topics", Text(f"{time['topics_overhead_ms_per_sample']:.3f} ms a sample{share}")))
    if lag["mean"] is not None:
        lines += _freshness(report)
    if practice := _practice(report["practice"]):
        lines.append(("practice", Text(practice)))
    digest = str(weights["digest"] or "none")
    sent = f"{weights['versions']} versions, {weights['bytes'] / 1e6:,.1f} MB"
    lines.append(("weights", Text(f"{sent}{_changes(weights)}; digest {digest[:16]}")))
    return lines


def _changes(weights: Mapping[str, Any]) -> str:
    """How large versions are that were not sent whole."""
    sizes = {"a delta": weights["delta_bytes_median"], "adapters": weights["adapter_bytes_median"]}
    return "".join(f" ({what} {size / weights['full_bytes']:.1%} of a full version)" for what, size in sizes.items() if size is not None)


def _practice(measured: Mapping[str, float | None]) -> str:
    """Entropy, spread of rewards, truncation, size of updates, speed and memory, as far as the steps have them."""
    first, last = measured["entropy_first"], measured["entropy_last"]
    parts = [f"entropy {first:.3f} → {last:.3f} nats a token"] if first is not None and last is not None else []
    for name, form in (
        ("truncated_share", "{:.0%} truncated"),
        ("reward_std", "reward std {:.3f}"),
        ("reward_group_std", "within a group {:.3f}"),
        ("update_norm", "update norm {:.2g}"),
        ("train_tokens_per_s", "{:,.0f} tokens/s trained"),
    ):
        if (value := measured[name]) is not None:
            parts.append(form.format(value))
    peaks = {"trainer": measured["peak_rss_bytes"], "GPU": measured["peak_gpu_bytes"]}
    parts += [f"{where} memory at most {size / 2**30:.1f} GiB" for where, size in peaks.items() if size is not None]
    return " · ".join(parts)


def _freshness(report: Mapping[str, Any]) -> list[tuple[str, Text]]:
    """How old what was trained was, and what the engines did while it was drawn."""
    lag, limit, ess, engines = report["lag"], report["schedule"]["max_lag"], report["ess"], report["engines"]
    line = f"mean {lag['mean']:.2f}, at most {lag['max']:.0f} versions" + (f" (limit {limit})" if limit is not None else "")
    if lag["steps"]["mean"] is not None and lag["steps"]["max"] != lag["max"]:
        line += f", in optimizer steps mean {lag['steps']['mean']:.2f}, at most {lag['steps']['max']:.0f}"
    if ess["mean"] is not None:
        line += f"; effective sample size {ess['mean']:.3f}, at least {ess['min']:.3f}"
    lines = [("lag", Text(line))]
    if len(shares := lag["tokens"]["shares"]) > 1:
        by_lag = " · ".join(f"{share:.0%} at {number}" for number, share in shares.items())
        lines.append(("", Text(f"trained tokens by lag: {by_lag}; {lag['spans']:.2f} versions in a sample", style="dim")))
    if engines["swaps"]:
        stall = f"{engines['swap_stall_ms_mean']:.0f} ms each, {engines['swap_stall_ms_max']:.0f} at most"
        parts = [f"{engines['swaps']:,.0f} times new weights in flight ({stall})"] if engines["swap_stall_ms_max"] else []
        if engines["occupancy"]:
            parts.append(f"batch {engines['occupancy']:.0%} full")
        if engines["prefix_cache_hits"] is not None:
            parts.append(f"{engines['prefix_cache_hits']:.0%} of prompt tokens from the prefix cache")
        if engines["aborted_groups"]:
            parts.append(f"{engines['aborted_groups']:.0f} groups aborted")
        lines.append(("engines", Text(" · ".join(parts))))
    return lines


def _next(report: Mapping[str, Any], directory: Path | None) -> Table:
    """Where to look next."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows = [("a group", f"penstock explain {report['run']} 0"), ("browser", "penstock ui")]
    if directory is not None:
        wanted = (("page", "report.html"), ("model", "model"), ("points", "metrics.jsonl"), ("logs", "logs"))
        rows += [(name, str(directory / file)) for name, file in wanted if (directory / file).exists()]
    uri, number = report.get("mlflow_uri"), report.get("mlflow_run_id")
    if uri and number:
        remote = str(uri).startswith(("http:", "https:", "databricks"))
        rows.append(("mlflow", f"{uri}, run {number}" if remote else f"mlflow ui --backend-store-uri {uri}"))
        if not remote and (experiment := experiment_of(str(uri), str(number))) is not None:
            rows.append(("", f"then http://127.0.0.1:5000/#/experiments/{experiment}?workflowType=machine_learning"))
    for place, (name, line) in enumerate(rows):
        table.add_row("look next" if place == 0 else "", Text(name, style="dim"), Text(line, style="cyan"))
    return table


def experiment_of(uri: str, run: str) -> str | None:
    """The experiment of an MLflow run in a local database, None where that does not say."""
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


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
