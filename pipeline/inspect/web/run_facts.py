"""The facts of a run's page, for its template: sentences, tiles, curves, the graph of workers, and what needs attention."""

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from penstock.infra.paths import run_directory
from penstock.pipeline.config.load import from_json
from penstock.pipeline.data.references import reference_text
from penstock.pipeline.inspect.live.completions import without_template
from penstock.pipeline.inspect.live.frame import doing
from penstock.pipeline.inspect.report.figures import by_role, held_out_prompts, ordered, shares
from penstock.pipeline.inspect.report.formats import duration, use_text
from penstock.pipeline.inspect.report.headline import LOW_ESS, TRUNCATED, headline, named
from penstock.pipeline.inspect.report.provenance import BISECTED, card_directory, read_statement
from penstock.pipeline.inspect.report.text import problems
from penstock.pipeline.inspect.run_status import (
    config_of,
    group_statuses,
    has_ended,
    info_of,
    last_reward,
    status_counts,
    status_of,
    steps_per_version,
    steps_planned,
)
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.run_view_types import WorkerView
from penstock.pipeline.inspect.status import Bottleneck, elapsed_s, to_go_s
from penstock.pipeline.inspect.web.render import number, share
from penstock.pipeline.runtime.reporting.reporter import kind_of
from penstock.pipeline.scheduling.rules import OPEN, STATUSES
from penstock.topics import runs
from penstock.topics.groups import Group

Facts = dict[str, Any]
POINTS = 600
"""Most points of a curve; of more, the least and the greatest of each range remain."""
STILL = 1e-6
"""A curve that never leaves a band of this width is named and has no chart."""


def run_facts(view: RunView, report: Mapping[str, Any], *, now_s: float, slowest: Bottleneck | None = None) -> Facts:
    """Return what the template of a run's page shows, except curves and samples; `slowest` is the bottleneck to name, if any."""
    ended, planned = has_ended(view), steps_planned(view)
    last = view.steps[max(view.steps)].metrics if view.steps else {}
    elapsed = elapsed_s(view, now_s=now_s)
    return {
        "run": view.run,
        "status": status_of(view),
        "reason": report["reason"] if status_of(view) in ("stopped", "failed") else None,
        "live": not ended,
        "verdict": headline(report),
        "bottleneck": slowest and {"text": named(slowest.who), "why": slowest.why, "advice": slowest.advice},
        "step": view.steps_done,
        "planned": planned,
        "done": view.steps_done / planned if planned else None,
        "elapsed": None if elapsed is None else duration(elapsed),
        "to_go": None if (to_go := to_go_s(view)) is None else duration(to_go),
        "version": view.version,
        "lag": last.get("lag_mean"),
        "tiles": _tiles(view, report),
        "stages": _stages(view, now_s=now_s),
        "workers": [_worker(view, worker, now_s=now_s) for worker in ordered(view)],
        "groups": _groups(view),
        "attention": problems(report),
        "time": _time(view),
        "dead_letter_count": len(view.dead_letters),
        "examples": report["examples"],
        "figures": json.dumps(report, indent=2),
    }


def provenance(view: RunView) -> list[Facts]:
    """Return rows about the origin of a run's model: what is stored on this machine, or the command that computes it."""
    run, parent, directory = view.run, runs.parent(info_of(view)), card_directory(view.run)
    rows = [{"name": "head of the ledger", "text": f"{view.head or '–'} ({view.last_seq + 1:,} entries)"}]
    if parent:
        rows.append({"name": parent["relation"], "text": f"{parent['run']}, step {parent.get('step', 0)}", "page": parent["run"]})
    try:
        stated = read_statement(directory)["predicate"]["ledger"]
        text = "of this state" if stated["head"] == view.head else f"of the first {stated['entries']:,} entries"
        rows.append({"name": "model card", "text": text, "page": f"{run}/card"})
        rows.append({"name": "verify", "command": f"penstock verify {shlex.quote(str(directory))} --log {run}"})
    except ValueError:
        rows.append({"name": "model card", "command": f"penstock card {run}"})
    try:
        rows.append({"name": "bisect", "text": (run_directory(run) / BISECTED).read_text(encoding="utf-8")})
    except OSError:
        rows.append({"name": "bisect", "command": f"penstock bisect {run} --test 'greedy_accuracy > 0.5'"})
    rows.append({"name": "regrade", "command": f"penstock regrade {run} --reward rewards.py:score"})
    return [{"text": None, "page": None, "command": None, **row} for row in rows]


def _metric(view: RunView, name: str) -> list[float | None]:
    return [view.steps[step].metrics.get(name) for step in sorted(view.steps)]


def _tiles(view: RunView, report: Mapping[str, Any]) -> list[Facts]:
    """Return the six figures at the top of the page, each with a note and its curve."""
    evals, groups = report["eval"], report["groups"]
    ended = sum(groups.get(status, 0) for status in STATUSES)
    newest = evals[-1] if evals else {}
    measure = "reward" if all("greedy_reward" in entry for entry in evals) else "accuracy"
    rate = sum(worker.rate("tokens") or 0.0 for worker in view.workers.values() if worker.role == "rollout")
    tokens = rate or sum(group.tokens for group in view.groups.values()) / (report["time"]["train_s"] or math.inf)
    truncated = report["practice"]["truncated_last"]
    ess = report["ess"]["mean"]
    rewards = [view.rewards[version].mean for version in sorted(view.rewards)]
    return [
        {"name": "reward", "value": number(last_reward(view)), "note": f"from {number(report['reward']['first'])}", "curve": rewards},
        {
            "name": "evaluation",
            "value": number(newest.get(f"greedy_{measure}")),
            "note": f"greedy, {share(newest.get('greedy_accuracy'))} solved of {held_out_prompts(newest)}" if newest else "none yet",
            "curve": [entry.get(f"greedy_{measure}") for entry in evals],
        },
        {
            "name": "trained",
            "value": share(groups["trained"] / ended if ended else None),
            "note": f"{groups['trained']:,} of {ended:,} finished groups",
            "curve": [point["trained"] for _, point in status_shares(view) if "trained" in point],
        },
        {"name": "tokens/s", "value": number(tokens or None), "note": "generated", "curve": _metric(view, "tokens")},
        {
            "name": "truncated",
            "value": share(truncated),
            "note": "samples of the last step",
            "curve": _metric(view, "truncated_share"),
            "bad": (truncated or 0.0) > TRUNCATED,
        },
        {
            "name": "ESS",
            "value": number(ess),
            "note": f"lag {number(report['lag']['mean'])}, max {number(report['lag']['max'], 1)}",
            "curve": _metric(view, "ess"),
            "bad": ess is not None and ess < LOW_ESS,
        },
    ]


def _groups(view: RunView) -> list[Facts]:
    counts = status_counts(view)
    total = max(1, counts.total())
    return [{"status": status, "count": counts[status], "share": counts[status] / total} for status in (*STATUSES, OPEN) if counts[status]]


_STAGES = (("feeder", "admitted", "groups/s"), ("rollout", "samples", "samples/s"), ("scorer", "groups", "groups/s"), ("trainer", "", ""))


def _stages(view: RunView, *, now_s: float) -> list[Facts]:
    """Return a row per stage from feeder to trainer: how busy it is, what it does, its rate, and the groups that wait for the next."""
    last = view.steps[max(view.steps)].metrics if view.steps else {}
    waiting = {"feeder": len(view.open), "scorer": int(last.get("queued_groups", 0))}
    at_work, stages = by_role(view), []
    for role, total, unit in _STAGES:
        workers = [worker for worker in view.workers.values() if worker.role == role]
        running = [worker for worker in workers if not worker.ended]
        busy = shares(at_work.get(role, {}))
        rate = sum(worker.rate(total) or 0.0 for worker in running) if total else None
        stages.append(
            {
                "role": role,
                "workers": len(running or workers),
                "busy": sum(part for use, part in busy.items() if kind_of(use) == "work"),
                "waits": next(((use_text(use), part) for use, part in busy.items() if kind_of(use) == "wait" and part >= 0.05), None),
                "now": doing(running[0], now_s=now_s) if running else "ended" if workers else "not started",
                "rate": f"{number(rate)} {unit}" if rate else "",
                "waiting": waiting.get(role, 0) if not has_ended(view) else 0,
            }
        )
    return stages


def _worker(view: RunView, worker: WorkerView, *, now_s: float) -> Facts:
    """Return a worker's row; one that had not ended when the run stopped or failed was killed."""
    over = {"stopped": "killed", "failed": "killed", "finished": "ended"}.get(status_of(view))
    cpu = worker.rate("cpu_s")
    return {
        "name": worker.worker,
        "role": worker.role,
        "now": "ended" if worker.ended else over or doing(worker, now_s=now_s),
        "error": worker.labels.get("error"),
        "version": worker.values.get("version"),
        "tokens": worker.rate("tokens"),
        "cpu": share(cpu),
        "memory": worker.values.get("rss_mib"),
        "starts": len(worker.incarnations),
    }


def _time(view: RunView) -> list[Facts]:
    """Return for each role the shares of its workers' time by use, the largest first."""
    return [
        {"role": role, "uses": [{"use": use_text(use), "kind": kind_of(use), "share": part} for use, part in shares(spent).items()]}
        for role, spent in by_role(view).items()
    ]


LEAST_GROUPS = 16
MOST_POINTS = 60


def status_shares(view: RunView) -> list[tuple[int, dict[str, float]]]:
    """Return (optimizer step, final status -> share of the groups) for ranges of groups, in order.

    A group without samples has no policy version and is counted in the range of the group before it.
    """
    ended = [(group, status) for group, status in sorted(group_statuses(view).items()) if status != OPEN]
    names, per_version = sorted({status for _, status in ended}), steps_per_version(view)
    size = max(LEAST_GROUPS, -(-len(ended) // MOST_POINTS))
    points: list[tuple[int, dict[str, float]]] = []
    counted, total, version = dict.fromkeys(names, 0), 0, 0

    def add() -> None:
        points.append((version * per_version, {name: count / total for name, count in counted.items()}))

    for group, status in ended:
        now = view.groups[group].version_min if group in view.groups else None
        if now is not None and now > version:
            if total >= size:
                add()
                counted, total = dict.fromkeys(names, 0), 0
            version = now
        counted[status], total = counted[status] + 1, total + 1
    if ended and (total >= size // 2 or not points):
        add()
    return points


_STEP_CHARTS: Sequence[tuple[str, str, Mapping[str, str]]] = (
    ("Spread of rewards", "standard deviation", {"reward_std": "all samples", "reward_group_std": "within a group"}),
    ("Entropy", "nat a token", {"entropy": "entropy"}),
    ("Completion length", "tokens", {"completion_tokens_mean": "mean", "completion_tokens_p95": "95 %"}),
    ("Truncated", "share of the samples", {"truncated_share": "truncated"}),
    ("Lag", "versions", {"lag_mean": "mean", "lag_max": "max"}),
    ("Effective sample size", "1 is on-policy", {"ess": "ESS"}),
    ("KL", "nat a token, k3", {"kl_behaviour_k3": "behaviour to current", "kl_reference": "to reference"}),
    ("Loss", "", {"loss": "loss"}),
    ("Gradient norm", "before clipping", {"grad_norm": "norm"}),
    ("Time of a step", "s, without the first", {"compute_s": "computed", "wait_s": "waited for groups"}),
)


def curves(view: RunView, *, components: Mapping[str, Iterable[tuple[int, float | None]]] | None = None) -> Facts:
    """Return the charts over optimizer steps: two in `main`, named ones in `charts`, further metrics in `more`.

    `still` has the titles of charts whose curves never change, which are not shown. `components`: reward function -> (step, mean).
    """
    steps, per_version = sorted(view.steps), steps_per_version(view)

    def by_step(name: str, label: str) -> Facts:
        shown = steps[1:] if name.endswith("_s") else steps  # the first step waits until the workers have started
        return curve(label, [(step, view.steps[step].metrics.get(name)) for step in shown])

    measure = "reward" if all("greedy_reward" in measured.values for measured in view.evals.values()) else "accuracy"
    rewards = [(version * per_version, tally.mean) for version, tally in sorted(view.rewards.items())]
    evals = {
        how: curve(how, [(at * per_version, done.values.get(f"{how}_{measure}")) for at, done in sorted(view.evals.items())])
        for how in ("greedy", "sampled")
    }
    by_status = status_shares(view)
    named = sorted({status for _, point in by_status for status in point}) if len(by_status) > 1 else []
    main = [
        _chart("Reward", "mean", [curve("all scored samples", rewards), by_step("reward_trained", "trained samples")]),
        {**_chart(f"Evaluation, held-out {measure}", "", [*evals.values()]), "dots": True},
    ]
    status_curves = [{**curve(status, [(step, point.get(status)) for step, point in by_status]), "colour": status} for status in named]
    parts = [curve(name, points) for name, points in (components or {}).items()]
    charts = [_chart("Reward by function", "mean of the trained, unweighted", parts), _chart("Statuses of groups", "share", status_curves)]
    charts += [_chart(title, unit, [by_step(name, label) for name, label in names.items()]) for title, unit, names in _STEP_CHARTS]
    used = {"reward_trained", *(name for _, _, names in _STEP_CHARTS for name in names)}
    all_names = sorted({name for step in steps for name in view.steps[step].metrics} - used)
    more = [_chart(name, "", [by_step(name, name)]) for name in all_names if not name.endswith("_at") and "tokens_at_lag_" not in name]
    moving = [chart for chart in charts if _moves(chart)]
    still = [chart["title"] for chart in charts if chart["series"] and not _moves(chart)]
    return {"main": main, "charts": moving, "more": [chart for chart in more if _moves(chart)], "still": still}


def _chart(title: str, unit: str, series: Sequence[Facts]) -> Facts:
    return {"title": title, "unit": unit, "series": [curve for curve in series if curve["y"]]}


def _moves(chart: Facts) -> bool:
    """True if a chart is worth showing: its values differ, or each of its curves is a single point."""
    values = [value for curve in chart["series"] for value in curve["y"]]
    return bool(values) and (max(values) - min(values) >= STILL or len(values) == len(chart["series"]))


def curve(label: str, points: Iterable[tuple[float, float | None]]) -> Facts:
    """Return the finite points of a curve; of more than `POINTS` only the least and the greatest in each range."""
    finite = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    if len(finite) > POINTS:
        long = -(-2 * len(finite) // POINTS)
        ranges = (finite[at : at + long] for at in range(0, len(finite), long))
        finite = [point for part in ranges for point in sorted({min(part, key=itemgetter(1)), max(part, key=itemgetter(1))})]
    return {"label": label, "x": [x for x, _ in finite], "y": [float(f"{y:.6g}") for _, y in finite]}


def cards(groups: Sequence[Group]) -> list[Facts]:
    """Return the best, median and worst sample by reward of some groups, for display; [] if none has a reward."""
    samples = [(sample.reward, group, sample) for group in groups for sample in group.samples if sample.reward is not None]
    scored = sorted(samples, key=lambda entry: (-entry[0], entry[1].group, entry[2].rollout.sample))
    if not scored:
        return []
    prompts = sorted({group.prompt for group in groups})
    chosen = {"best by reward": 0, "median": len(scored) // 2, "worst": len(scored) - 1}
    return [
        {
            "which": which,
            "group": group.group,
            "sample": sample.rollout.sample,
            "prompt": without_template(group.prompt, prompts),
            "answer": reference_text(group.columns),
            "completion": sample.completion,
            "reward": reward,
            "tokens": len(sample.rollout.token_ids),
            "finish": sample.rollout.finish,
        }
        for which, (reward, group, sample) in ((which, scored[index]) for which, index in chosen.items())
    ]


DERIVED = {
    "algorithm": ("advantage", "aggregate", "clip_low", "clip_high", "clip_dual", "kl_weighted", "proximal", "correction"),
    "rollout": ("slots",),
    "kafka": ("partitions",),
}
"""Keys whose effective value is a property of the configuration."""


def config_rows(view: RunView) -> list[Facts]:
    """Return a row per key of the effective configuration: `key`, `value` as JSON, `set` if it differs from the default; [] if unknown."""
    recorded = config_of(view)
    if not recorded:
        return []
    config, rows = from_json(json.dumps(recorded)), []
    for section, keys in config.model_dump(mode="json").items():
        fields = type(getattr(config, section)).model_fields
        defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
        for key, plain in keys.items():
            value = getattr(config, key) if key in DERIVED.get(section, ()) else plain
            own = recorded.get(section, {}).get(key)
            changed = own is not None and json.dumps(own) != json.dumps(defaults.get(key), default=str)
            shown = "" if value is None else json.dumps(value, ensure_ascii=False)
            rows.append({"key": f"{section}.{key}", "value": shown, "set": changed})
    return rows
