"""Rows of a report's full text: everything that its short form leaves out."""

import contextlib
import statistics
from pathlib import Path

from rich.text import Text

from penstock.pipeline.inspect.report.episodes import episodes_line
from penstock.pipeline.inspect.report.evaluations import one_line
from penstock.pipeline.inspect.report.formats import Figure, Report, Row, change, duration, figures, joined, percent, use_text
from penstock.pipeline.inspect.report.time_spent import SHOWN, shares

EXAMPLE_WIDTH = 72


def _schedule(report: Report) -> list[str]:
    return [f"{report['schedule']['mode']}, order {report['schedule']['order']}, {report['versions']:,} versions"]


def _trained(report: Report) -> list[str]:
    trained = report["reward_trained"]
    return [] if trained["first"] is None else [f"{change(trained['first'], trained['last'])} of the samples that were trained"]


def _examples(report: Report) -> list[str]:
    """Held-out prompts, each with the completion before training and the newest one."""
    lines = []
    for example in report.get("examples", ()):
        lines.append(one_line(example["prompt"], EXAMPLE_WIDTH))
        for when in ("before", "after"):
            reward = example[when]["reward"]
            score = "-" if reward is None else f"{reward:.3f}"
            lines.append(f"  {when:<7}{one_line(example[when]['completion'], EXAMPLE_WIDTH)}   reward {score}")
    return lines


def _filtered(report: Report) -> list[str]:
    causes = {"solved_all": "solved by every sample", "solved_none": "by none", "between": "rewarded alike between"}
    return joined([f"{report['filtered'][name]:,} {text}" for name, text in causes.items() if report["filtered"][name]], ", ")


def _repeated(report: Report) -> list[str]:
    count, admitted = report["repeated"], report["groups"]["admitted"]
    return [f"{count:,} prompts sent again after their groups were abandoned ({percent(count / admitted)})"] if count else []


def _tokens(report: Report) -> list[str]:
    trained = report["trainer_tokens"]
    mean = figures(report["length"], [Figure("admitted", ", {:.1f} a sample")])
    lines = [f"{report['tokens']:,} generated{''.join(mean)}"]
    if trained["computed"]:
        lines.append(f"trainer: {trained['real']:,} real tokens, {trained['padded']:,} with padding, {trained['computed']:,} computed")
    return lines


def _scoring(report: Report) -> list[str]:
    parts = (
        Figure("groups", "{:,.0f} groups"),
        Figure("wait_s_mean", "{:.2f} s each"),
        Figure("utilisation", "slots for them taken {:.0f} % of the time", 100),
    )
    return joined(figures(report.get("scoring") or {}, parts), ", ")


def _phases(report: Report) -> list[str]:
    paused = report["time"].get("paused_s") or 0.0
    parts = figures(report["time"], [Figure(f"{name}_s", name + " {:.1f} s") for name in ("install", "start", "train", "end", "wall")])
    return joined([*parts, *([f"paused for {duration(paused)} besides"] if paused >= 1.0 else [])])


def _trainer(report: Report) -> list[str]:
    time = report["time"]
    if time["trainer_waiting_ratio"] is None:
        return []
    parts = figures(time, (Figure("trainer_compute_s", "computed {:.1f} s"), Figure("trainer_other_s", "other work {:.1f} s")))
    return joined([*parts, f"waited {time['trainer_wait_s']:.1f} s ({percent(time['trainer_waiting_ratio'])})"], ", ")


def _time_of(report: Report) -> list[str]:
    return [
        f"{role}: {', '.join(f'{percent(share)} {use_text(use)}' for use, share in shares(seconds).items() if share >= SHOWN)}"
        for role, seconds in report["time_spent"].items()
    ]


def _bottleneck(report: Report) -> list[str]:
    slowest = report["bottleneck"]
    return [] if slowest is None else [f"{slowest['who']}: {slowest['why']}; {slowest['advice']}"]


def _rounds(report: Report) -> list[str]:
    spans = [seconds for seconds in report["time"]["rollout_to_train_end_s"] if seconds is not None]
    if not spans:
        return []
    share = report["overlap"]["share"]
    overlap = "" if share is None else f"; training started before the last sample ended in {percent(share)}"
    return [f"{statistics.median(spans):.2f} s from first sample to last step (median of {len(spans)}){overlap}"]


def _topics(report: Report) -> list[str]:
    per_sample = Figure("topics_overhead_ms_per_sample", "{:.3f} ms a sample")
    return joined(figures(report["time"], (per_sample, Figure("topics_overhead_ratio", "{:.1f} % of the workers' CPU time", 100))), ", ")


def _lag(report: Report) -> list[str]:
    lag, ess = report["lag"], report["ess"]
    lines = joined(figures(ess, [Figure("min", "effective sample size at least {:.3f}")]))
    if lag["steps"]["mean"] is not None and lag["steps"]["max"] != lag["max"]:
        lines.append(f"in optimizer steps mean {lag['steps']['mean']:.2f}, at most {lag['steps']['max']:.0f}")
    if len(by_lag := lag["tokens"]["shares"]) > 1:
        parts = " · ".join(f"{percent(share)} at {number}" for number, share in by_lag.items())
        lines.append(f"trained tokens by lag: {parts}; {lag['spans']:.2f} versions in a sample")
    return lines


ENGINES = (
    Figure("occupancy", "batch {:.0f} % full", 100),
    Figure("prefix_cache_hits", "{:.0f} % of prompt tokens from the prefix cache", 100),
)


def _engines(report: Report) -> list[str]:
    engines = report["engines"]
    if not engines["swaps"]:
        return []
    stall = f"{engines['swap_stall_ms_mean']:.0f} ms each, {engines['swap_stall_ms_max']:.0f} at most"
    swaps = [f"{engines['swaps']:,.0f} times new weights in flight ({stall})"] if engines["swap_stall_ms_max"] else []
    aborted = [f"{engines['aborted_groups']:.0f} groups aborted"] if engines["aborted_groups"] else []
    return joined([*swaps, *figures(engines, ENGINES), *aborted])


PRACTICE = (
    Figure("reward_std", "reward std {:.3f}"),
    Figure("reward_group_std", "within a group {:.3f}"),
    Figure("update_norm", "update norm {:.2g}"),
    Figure("train_tokens_per_s", "{:,.0f} tokens/s trained"),
    Figure("peak_rss_bytes", "trainer memory at most {:.1f} GiB", 2**-30),
    Figure("peak_gpu_bytes", "GPU memory at most {:.1f} GiB", 2**-30),
)


def _practice(report: Report) -> list[str]:
    practice = report["practice"]
    first, last = practice["entropy_first"], practice["entropy_last"]
    entropy = [] if first is None or last is None else [f"entropy {change(first, last, '{:.3f}'.format)} nats a token"]
    return joined([*entropy, *figures(practice, PRACTICE)])


def _weights(report: Report) -> list[str]:
    weights = report["weights"]
    sizes = {"a delta": weights["delta_bytes_median"], "adapters": weights["adapter_bytes_median"]}
    parts = [f" ({what} {100 * size / weights['full_bytes']:.1f} % of a full version)" for what, size in sizes.items() if size is not None]
    digest = str(weights["digest"] or "none")[:16]
    return [f"{weights['versions']} versions, {weights['bytes'] / 1e6:,.1f} MB{''.join(parts)}; digest {digest}"]


DETAILS = (
    Row("schedule", _schedule),
    Row("trained", _trained),
    Row("examples", _examples),
    Row("filtered", _filtered),
    Row("repeated", _repeated),
    Row("tokens", _tokens),
    Row("episodes", lambda report: [episodes_line(report["episodes"])] if report.get("episodes") else []),
    Row("rewards", _scoring),
    Row("duplicates", lambda report: [f"{report['duplicates']} ignored"]),
    Row("phases", _phases),
    Row("trainer", _trainer),
    Row("time of", _time_of),
    Row("bottleneck", _bottleneck),
    Row("rounds", _rounds),
    Row("topics", _topics),
    Row("lag", _lag),
    Row("engines", _engines),
    Row("practice", _practice),
    Row("weights", _weights),
)
"""Rows of the full form only."""


def mlflow_commands(report: Report) -> list[Text]:
    """Commands that show the run in MLflow."""
    uri, number = report.get("mlflow_uri"), report.get("mlflow_run_id")
    if not uri or not number:
        return []
    if str(uri).startswith(("http:", "https:", "databricks")):
        return [Text(f"MLflow: {uri}, run {number}", style="cyan")]
    experiment = experiment_of(str(uri), str(number))
    page = f"then http://127.0.0.1:5000/#/experiments/{experiment}?workflowType=machine_learning" if experiment else ""
    return [Text(line, style="cyan") for line in (f"mlflow ui --backend-store-uri {uri}", page) if line]


def experiment_of(uri: str, run: str) -> str | None:
    """The experiment of an MLflow run in a local database; None if the database does not have it."""
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
