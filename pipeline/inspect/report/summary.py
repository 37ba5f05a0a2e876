"""Computes the report of a run as plain data, from record headers and small topics. An unknown figure is None."""

import contextlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.infra.errors import RunNotFound
from penstock.infra.log import Log
from penstock.infra.paths import run_directory, write_private
from penstock.pipeline.inspect.live.saved_view import newest
from penstock.pipeline.inspect.report import figures, headline
from penstock.pipeline.inspect.report.figures import episodes, evaluations, examples, practice, weighted
from penstock.pipeline.inspect.report.formats import rebased_fields
from penstock.pipeline.inspect.run_status import (
    closing,
    config_of,
    group_statuses,
    info_of,
    last_reward,
    resumptions,
    reward_scale,
    status_counts,
    status_of,
    steps_per_version,
    steps_planned,
    tenth,
)
from penstock.pipeline.inspect.run_view import RunView, read_view
from penstock.pipeline.inspect.run_view_types import StepFacts, WorkerView, together
from penstock.pipeline.inspect.status import bottleneck, busy
from penstock.pipeline.runtime.registration.run_registry import find
from penstock.pipeline.runtime.roles import HELPERS
from penstock.pipeline.runtime.topic_reader import RunReader, deleted
from penstock.pipeline.scheduling.rules import MODES, OPEN, STATUSES
from penstock.topics.runs import ENDED

COUNTED = ("ledger", "prompts", "rollouts", "groups", "metrics")
COSTS = ("encode", "decode", "send", "poll", "io")
CURVE_POINTS = 60
STORED = "report.stored.json"
STORED_FORMAT = 2
"""Format of stored reports; raise it when a figure changes its meaning."""


def collect(log: Log, run: str, *, mlflow_run_id: str | None = None, alive: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Read a run's topics and return the report that `penstock report --json` prints. Raises `RunNotFound`.

    `alive` is called before every batch and may raise to end the read. `mlflow_run_id` is used if the log does not have it yet.
    """
    view = read_view(RunReader(log, run, alive=alive))
    if view.record is None and view.opened is None:
        raise RunNotFound(run)
    if mlflow_run_id is not None:
        view.mlflow["run_id"] = mlflow_run_id
    gone = gone_from(log, run)
    return summarise(view, gone=gone) | (_counted(log, run) if gone else {})


def stored_report(log: Log, run: str, *, alive: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Return the report like `collect`. The report of an ended run is stored in its directory and reused until a topic grows."""
    record, path = find(log, run), run_directory(run) / STORED
    if record is None or record.status not in ENDED or not path.parent.is_dir():
        return collect(log, run, alive=alive)
    topics = [f"{run}.{topic}" for topic in (*COUNTED, "dead-letters")]
    partitions = [(topic, number) for topic in topics for number in range(log.partitions(topic) or 0)]
    starts, ends = log.beginning_offsets(partitions), log.end_offsets(partitions)
    state = [STORED_FORMAT, record.updated_ns, [[*tp, starts[tp], ends[tp]] for tp in partitions]]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["state"] == state:
            return dict(stored["report"])
    report = collect(log, run, alive=alive)
    with contextlib.suppress(OSError):
        write_private(path, json.dumps({"state": state, "report": report}))
    return report


def _counted(log: Log, run: str) -> dict[str, Any]:
    """Return the figures of a report that count deleted groups too, from the newest saved view; {} if no view was saved."""
    view, since = newest(log, run)
    if not since:
        return {}
    read_view(RunReader(log, run), topics=("ledger", "prompts", "groups"), view=view, since=since)
    reward = reward_ends(view, steps=view.steps_done, per_version=steps_per_version(view))
    figures: dict[str, Any] = finite({"groups": _groups(view), "repeated": view.repeated, "reward": reward})
    return figures


def gone_from(log: Log, run: str) -> list[str]:
    """Return a sentence per partition from which records were deleted, so that the figures do not include them."""
    return deleted(log, *(f"{run}.{topic}" for topic in COUNTED))


def summarise(view: RunView, *, gone: Sequence[str] = ()) -> dict[str, Any]:
    """Compute the report that `penstock report --json` prints. `gone` has a sentence per partition with deleted records."""
    steps, slowest = [view.steps[number] for number in sorted(view.steps)], bottleneck(view, whole=True)
    rounds = figures.rounds(steps, per_version=steps_per_version(view))
    report: dict[str, Any] = {
        "run": view.run,
        "status": status_of(view),
        "reason": closing(view).get("reason"),
        "schedule": _schedule(view),
        "steps": len(steps),
        "steps_planned": steps_planned(view),
        "changed": _changes(info_of(view), steps),
        "rebased": [rebased_fields(entry) for entry in view.rebased],
        "empty_steps": sum(step.metrics.get("trained_samples") == 0 for step in steps),
        "versions": view.version or 0,
        "reward": reward_ends(view, steps=len(steps), per_version=steps_per_version(view)),
        "reward_trained": _ends([(step.metrics.get("reward_trained"), step.metrics.get("samples", 1.0)) for step in steps]),
        "groups": _groups(view),
        "repeated": view.repeated,
        "waste": [waste._asdict() for waste in headline.wastes(view)],
        "samples": sum(map(len, view.samples.values())),
        "no_reward": view.no_reward,
        "missing_rewards": headline.missing_rewards(view),
        "tokens": sum(sum(tokens.values()) for tokens in view.samples.values()),
        "time": {**_time(view, steps, rounds), **_overhead(view)},
        "trainer_tokens": {name: _sum(steps, f"{name}_tokens") for name in ("real", "padded", "computed")},
        "overlap": _overlap(rounds),
        "lag": figures.lag(steps),
        "ess": figures.ess(steps),
        "engines": figures.engines(view),
        "episodes": episodes(view),
        "scoring": _scoring(view),
        **_lengths(view),
        "time_spent": {role: {**seconds, "shares": figures.shares(seconds)} for role, seconds in figures.by_role(view).items()},
        "rounds": rounds,
        "redundancy": figures.redundancy(view),
        "length_order_correlation": figures.length_order_correlation(view),
        "bottleneck": slowest and slowest._asdict(),
        "filtered": _filtered(view),
        "practice": practice(steps),
        "weights": _weights(view),
        "eval": evaluations(view),
        "evaluates": bool(config_of(view).get("eval", {}).get("source")),
        "examples": examples(view),
        "dead_letters": _dead_letters(view),
        "duplicates": sum(view.duplicates.values()),
        "gone": list(gone),
        "resumed": resumptions(view),
        "failures": figures.failures(view),
        "restarts": _restarts(view),
        "mlflow_run_id": view.mlflow.get("run_id"),
        "mlflow_uri": view.mlflow.get("uri"),
    }
    wall = report["time"]["train_s"]
    report["throughput"] = {name + "_per_s": report[name] / wall if wall else None for name in ("samples", "tokens")}
    strict: dict[str, Any] = finite(report)
    return strict


def _changes(info: Mapping[str, Any], steps: Sequence[StepFacts]) -> list[dict[str, Any]]:
    """Return the changes of data and code while the run was stopped, each with the number of steps before it."""
    return [{**change, "steps": sum(step.time_s <= change["time_ns"] / 1e9 for step in steps)} for change in info.get("changes", ())]


def _scoring(view: RunView) -> dict[str, Any] | None:
    """Return figures about the load of the reward functions; None if no group was scored.

    `utilisation` is the mean share of slots for groups that are in use; a child process has one slot, or `reward.concurrency` if a function
    is async or a service. `wait_s_mean` is the time from calling the functions for a group to its rewards. `services` is about requests to
    reward services: `utilisation` is the share of time in which a process has a request in flight, `in_flight` their mean number.
    """
    scorers = [worker for worker in view.workers.values() if worker.role == "scorer"]
    groups = sum(worker.total("groups") for worker in scorers)
    at_work = sum(worker.total("uptime_s") - worker.total("time_start_s") for worker in scorers)
    if not groups or at_work <= 0:
        return None
    return {
        "groups": int(groups),
        "utilisation": busy(view, "scorer", "reward_busy_s", whole=True),
        "wait_s_mean": sum(worker.total("reward_s") for worker in scorers) / groups,
        "groups_per_s": groups / at_work,
        "services": _services(view, scorers, at_work=at_work),
    }


def _services(view: RunView, scorers: Sequence[WorkerView], *, at_work: float) -> dict[str, float] | None:
    """Return figures about requests to reward services over `at_work` seconds of all scorers; None if none was sent."""
    requests, retries, busy_s, request_s = (
        sum(worker.total(f"service_{name}") for worker in scorers) for name in ("requests", "retries", "busy_s", "request_s")
    )
    if not requests:
        return None
    return {
        "requests": int(requests),
        "retries": int(retries),
        "request_s_mean": request_s / requests,
        "utilisation": busy_s / at_work / int(config_of(view).get("scorer", {}).get("processes") or 1),
        "in_flight": request_s / at_work,
    }


def _schedule(view: RunView) -> dict[str, Any]:
    """Return the keys of the schedule; `order` and `max_lag` are the mode's if they are not set."""
    schedule = config_of(view).get("schedule", {})
    names = ("mode", "prompts_per_step", "samples_per_prompt", "steps_per_version", "order", "max_lag")
    fields = {name: schedule.get(name) for name in names}
    if (mode := MODES.get(schedule.get("mode", ""))) is not None:
        fields |= {name: getattr(mode, name) for name in ("order", "max_lag") if fields[name] is None}
    return fields


def _weights(view: RunView) -> dict[str, Any]:
    """Return number, digest and sizes in bytes of the published versions: full ones, deltas to the previous one, adapters on version 0."""
    measured = [entry.metrics for _, entry in sorted(view.versions.items())]
    deltas, adapters = ([each["bytes"] for each in measured if each.get(name)] for name in ("delta", "adapter"))
    return {
        "versions": len(view.versions),
        "bytes": int(sum(entry.metrics.get("bytes", 0.0) for entry in view.versions.values())),
        "digest": _digest(view),
        "delta_bytes_median": int(statistics.median(deltas)) if deltas else None,
        "adapter_bytes_median": int(statistics.median(adapters)) if adapters else None,
        "full_bytes": next((int(each["full_bytes"]) for each in reversed(measured) if "full_bytes" in each), None),
    }


def reward_ends(view: RunView, *, steps: int, per_version: int) -> dict[str, Any]:
    """Return the mean reward of samples generated under versions of the first and the last tenth of the steps, and the full curve."""
    window = tenth(steps)
    first = together(tally for version, tally in view.rewards.items() if version * per_version < window)
    versions = sorted(view.rewards)
    width = max(1, math.ceil(len(versions) / CURVE_POINTS))
    curve = [together(view.rewards[version] for version in versions[low : low + width]).mean for low in range(0, len(versions), width)]
    return {"first": first.mean, "last": last_reward(view) if steps else None, "curve": curve}


def _sum(steps: Sequence[StepFacts], name: str) -> int | None:
    """Return the sum of a metric over steps; None if no step has it."""
    values = figures.values_of(steps, name)
    return int(sum(values)) if values else None


def _ends(values: Sequence[tuple[float | None, float]]) -> dict[str, float | None]:
    """Return the weighted means of the first and the last tenth of (value, weight) pairs, one per step."""
    window = tenth(len(values))
    return {"first": weighted(values[:window]), "last": weighted(values[-window:] if window else [])}


def _groups(view: RunView) -> dict[str, int]:
    counts = status_counts(view)
    return {"admitted": counts.total(), **{name: counts[name] for name in (*STATUSES, OPEN)}}


def _lengths(view: RunView) -> dict[str, dict[str, float | None]]:
    """Return completion lengths in tokens by final status of the group: mean, 95 % quantile and maximum."""
    tokens: dict[str, list[int]] = {"admitted": [], "trained": [], "filtered": [], "stale": [], "failed": [], "abandoned": [], "unused": []}
    for group, status in group_statuses(view).items():
        generated = view.samples.get(group, {}).values()
        tokens["admitted"] += generated
        if status in tokens:
            tokens[status] += generated
    ordered = {name: sorted(lengths) for name, lengths in tokens.items()}
    return {
        "length": {name: sum(lengths) / len(lengths) if lengths else None for name, lengths in ordered.items()},
        "length_p95": {name: lengths[math.ceil(0.95 * len(lengths)) - 1] if lengths else None for name, lengths in ordered.items()},
        "length_max": {name: lengths[-1] if lengths else None for name, lengths in ordered.items()},
    }


def _filtered(view: RunView) -> dict[str, int]:
    """Count the filtered groups, whose samples have equal rewards, by that reward: the highest possible, the lowest, or between."""
    scale = reward_scale(view)
    filtered = [group for group in view.groups.values() if group.outcome == "filtered"]
    means = [group.reward_mean for group in filtered if group.reward_mean is not None and not group.lacks_rewards]
    positions = [0.5 if (position := scale.position(mean)) is None else position for mean in means]
    full, lowest = sum(position >= 1 - 1e-9 for position in positions), sum(position <= 1e-9 for position in positions)
    return {"solved_all": full, "solved_none": lowest, "between": len(means) - full - lowest}


def _time(view: RunView, steps: Sequence[StepFacts], rounds: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """Return times in seconds, without pauses between a stop and a resumption, which are `paused_s`.

    `start`: creation to the start of the first sample; `train`: to the last step; `end`: to the closing; `wall`: their sum. The trainer's
    time since it was ready is divided into `trainer_wait_s`, `trainer_compute_s` and `trainer_other_s`; `trainer_waiting_ratio` is the
    share of the first.
    """
    created = view.record.created_ns / 1e9 if view.record else None
    done = steps[-1].time_s if steps else None
    closed = view.closed.time_ns / 1e9 if view.closed else done
    begun = min(figures.values_of(steps, "first_sample_at"), default=None)
    lasted, waited = figures.trainer_time(view)
    computed = sum(step.metrics.get("compute_s", 0.0) for step in steps)
    between, wall_s = view.worked.between, view.worked.between(created, closed)
    return {
        "wall_s": wall_s,
        "paused_s": None if closed is None or created is None or wall_s is None else closed - created - wall_s,
        "install_s": info_of(view).get("install_s"),
        "start_s": between(created, begun),
        "train_s": between(begun, done),
        "end_s": between(done, closed),
        "rollout_to_train_end_s": [each["rollout_to_train_end_s"] for each in rounds],
        "trainer_wait_s": waited,
        "trainer_compute_s": computed,
        "trainer_other_s": max(0.0, lasted - waited - computed),
        "trainer_waiting_ratio": waited / lasted if lasted else None,
        "generate_s": sum(worker.total("generate_s") for worker in view.workers.values()),
        "reward_s": sum(worker.total("reward_s") for worker in view.workers.values()),
    }


def _overhead(view: RunView) -> dict[str, Any]:
    """Return the CPU time that feeder, rollout workers, scorers and trainer spend on topics, according to their last reports.

    It includes encoding, decoding, sending, polling and the client's I/O threads, also for weights and ledger.
    `topics_overhead_ms_per_sample` is per sample in `rollouts`; `topics_overhead_ratio` is the share of these workers' CPU time.
    """
    paying = [worker for worker in view.workers.values() if worker.role not in HELPERS]
    parts = {name: sum(worker.total(f"cost_{name}_s") for worker in paying) for name in COSTS}
    spent, cpu = sum(parts.values()), sum(worker.total("cpu_s") for worker in paying)
    samples = sum(map(len, view.samples.values()))
    return {
        "topics_overhead_ratio": spent / cpu if cpu else None,
        "topics_overhead_ms_per_sample": 1000 * spent / samples if samples else None,
        "topics_overhead_s": parts,
    }


def _overlap(rounds: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """Count the rounds with recorded times, and those whose first backward pass started before their last sample ended."""
    timed = [(each["first_dispatch_s"], each["rollout_s"]) for each in rounds]
    early = [dispatch < rollout for dispatch, rollout in timed if dispatch is not None and rollout is not None]
    return {"rounds": len(early), "first_backward_before_last_sample": sum(early), "share": sum(early) / len(early) if early else None}


def _digest(view: RunView) -> str | None:
    """Return the digest of the final weights, or of the newest version while the run is active; None before the first version."""
    if view.closed is not None and view.closed.digest:
        return view.closed.digest
    return view.versions[view.version].digest if view.version is not None else None


def _dead_letters(view: RunView) -> dict[str, Any]:
    """Count the records that workers refused, by reason and by topic."""
    kinds, topics = list(view.dead_letters.values()), [record_id[0].removeprefix(f"{view.run}.") for record_id in view.dead_letters]
    return {
        "total": len(kinds),
        "by_kind": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "by_topic": {topic: topics.count(topic) for topic in sorted(set(topics))},
    }


def _restarts(view: RunView) -> dict[str, int]:
    """Return role -> number of restarts of its workers, without those of the whole run; roles without restarts are left out."""
    restarts: dict[str, int] = {}
    for worker in view.workers.values():
        restarts[worker.role] = restarts.get(worker.role, 0) + len(worker.incarnations) - 1 - resumptions(view)
    return {role: count for role, count in sorted(restarts.items()) if count}


def finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None in a nested value."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


REPORTS = ("report.txt", "report.json")


def remove_reports(directory: Path) -> None:
    """Remove the reports that an earlier end of the run has left, so that an outdated report cannot remain."""
    for name in REPORTS:
        (directory / name).unlink(missing_ok=True)
