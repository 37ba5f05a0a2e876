"""Figures of a report: episodes, evaluations, time by use, lag, effective sample size, engines. A figure without data is None."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from penstock.pipeline.inspect.run_status import config_of
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.run_view_types import StepFacts, WorkerView
from penstock.pipeline.runtime.reporting.log_lines import counted
from penstock.pipeline.runtime.reporting.reporter import OUTSIDE, TRAINER_WAITS, USES
from penstock.pipeline.runtime.roles import ROLES, generating_roles, order
from penstock.topics.metrics import Measurement

_PREFIX = "engine_environment_"


def _total(workers: Iterable[WorkerView], name: str) -> float:
    """Return an engine's cumulative value, summed over workers and their restarts."""
    return sum(worker.total(f"engine_{name}") for worker in workers)


def step_sizes(schedule: Mapping[str, Any]) -> str:
    """Format the size of a step: "8 prompts × 16 samples", and "2 steps a version" unless it is one."""
    sizes = (("prompts_per_step", "prompts"), ("samples_per_prompt", "samples"))
    text, steps = " × ".join(f"{schedule[key]} {name}" for key, name in sizes if schedule.get(key)), schedule.get("steps_per_version") or 1
    return text if steps == 1 else f"{text}, {steps} steps a version"


def episodes(view: RunView) -> dict[str, Any] | None:
    """Return figures about trajectories and environments; None if there are no trajectories.

    `turns_mean` and `environment_s_mean` are per trajectory; `segments_mean` is the mean number of trained sequences of one. `losses`
    counts turns that were lost and generated again, `results_cut` results longer than `environment.max_result_tokens`. `engine_idle_s` is
    the time in which engines had nothing to generate because every trajectory waited for its environment.
    """
    workers = [worker for worker in view.workers.values() if worker.role in generating_roles()]
    engines = [worker for worker in workers if worker.role == "rollout"]
    total = partial(_total, workers)
    count = total("trajectories")
    if not count:
        return None
    kinds = sorted({name for worker in workers for values in worker.incarnations.values() for name in values if name.startswith(_PREFIX)})
    causes = {name.removeprefix(_PREFIX): sum(worker.total(name) for worker in workers) for name in kinds if name != f"{_PREFIX}s"}
    return {
        "trajectories": int(count),
        "turns_mean": total("turns") / count,
        "dropped": int(total("dropped")),
        "dropped_turns_mean": total("dropped_turns") / total("dropped") if total("dropped") else None,
        "segments_mean": total("segments") / count,
        "environment_s": total("environment_s"),
        "environment_s_mean": total("environment_s") / count,
        "engine_idle_s": sum(worker.total("engine_waits_s") for worker in engines),
        "losses": int(total("losses")),
        "results_cut": int(total("results_cut")),
        "broken": int(total("broken")),
        "causes": {name: int(number) for name, number in causes.items() if number},
    }


SAME = 0.0005
"""If the mean reward differs from the share of solved prompts by less than this, all rewards are 0 or 1 and only one is shown."""


def evaluations(view: RunView) -> list[dict[str, Any]]:
    """Return the metrics of every evaluated version, in order."""
    return [
        {"version": version, **measured.values, **({"source": measured.labels["source"]} if "source" in measured.labels else {})}
        for version, measured in sorted(view.evals.items())
    ]


def examples(view: RunView) -> list[dict[str, Any]]:
    """Return a few held-out prompts with greedy completion and reward under the first and the newest evaluated version."""
    versions = sorted(view.evals)
    if len(versions) < 2:
        return []
    before, after = (completions(view.evals[version]) for version in (versions[0], versions[-1]))
    return [
        {"prompt": prompt, "before": {"version": versions[0], **before[prompt]}, "after": {"version": versions[-1], **after[prompt]}}
        for prompt in before
        if prompt in after
    ]


def held_out(values: Mapping[str, float], how: str) -> str | None:
    """Format an evaluation's mean reward, and the share of solved prompts if it differs: "greedy 0.380 (3% solved)"."""
    reward, solved = values.get(f"{how}_reward"), values.get(f"{how}_accuracy")
    if reward is None or solved is None:  # evaluators of earlier releases did not measure the reward
        return None if solved is None else f"{how} {solved:.3f}"
    return f"{how} {reward:.3f}" + (f" ({solved:.0%} solved)" if abs(reward - solved) >= SAME else "")


def held_out_prompts(values: Mapping[str, float]) -> str:
    """Format what an evaluation's scores are about: "64 prompts, 5 completions without a reward"."""
    failed = int(values.get("n_failed") or 0)
    return counted(int(values["n"]), "prompt") + (f", {counted(failed, 'completion')} without a reward" if failed else "")


def one_line(text: str, limit: int) -> str:
    """Format a text in one line; a long one is shortened in the middle: `one_line("abcdefghij", 7)` is "ab … ij"."""
    line = " ".join(text.split())
    half = (limit - len(" … ")) // 2
    return line if len(line) <= limit else f"{line[:half]} … {line[-half:]}"


def completions(measured: Measurement) -> dict[str, dict[str, Any]]:
    """Return prompt -> `completion` and `reward` of an evaluation's examples; {} if it has none in this format."""
    try:
        recorded = json.loads(measured.labels.get("examples", "[]"))
        return {str(example["prompt"]): {"completion": str(example["completion"]), "reward": example["reward"]} for example in recorded}
    except (ValueError, TypeError, KeyError):
        return {}


SHOWN = 0.005
"""Smallest share of time that the text mentions."""


def by_role(view: RunView) -> dict[str, dict[str, float]]:
    """Return role -> seconds by use, summed over its workers and their restarts, their sum `total_s`, and the number of `workers`."""
    spent: dict[str, dict[str, float]] = {}
    for worker in view.workers.values():
        uses = {use: worker.total(f"time_{use}_s") for use in USES}
        if any(uses.values()):
            role = spent.setdefault(worker.role, {"workers": 0.0, "total_s": 0.0})
            role["workers"] += 1
            role["total_s"] += worker.total("uptime_s")
            for use, seconds in uses.items():
                if seconds:
                    role[f"{use}_s"] = role.get(f"{use}_s", 0.0) + seconds
    return {role: spent[role] for role in ROLES if role in spent}


def ordered(view: RunView) -> list[WorkerView]:
    """Return the workers in pipeline order; within a role, those that have ended are last."""
    return sorted(view.workers.values(), key=lambda worker: (order(worker.role), worker.ended, len(worker.worker), worker.worker))


def failures(view: RunView) -> list[str]:
    """Return a sentence per worker whose newest process failed, with the cause."""
    return [f"{worker.worker} failed: {worker.labels['error']}" for worker in ordered(view) if "error" in worker.labels]


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return use -> share of a role's time between start and end of its work, the largest first."""
    at_work = {use: seconds.get(f"{use}_s", 0.0) for use in USES if use not in OUTSIDE}
    total = sum(at_work.values())
    ordered = sorted(at_work.items(), key=lambda pair: -pair[1])
    return {use: spent / total for use, spent in ordered if spent} if total else {}


def trainer_time(view: RunView) -> tuple[float, float]:
    """Return the seconds between start and end of the trainer's work, and the seconds of these in which it waited."""
    seconds = by_role(view).get("trainer", {})
    lasted, waited = (sum(seconds.get(f"{use}_s", 0.0) for use in uses) for uses in (set(USES).difference(OUTSIDE), TRAINER_WAITS))
    return lasted, waited


def rounds(steps: Sequence[StepFacts], *, per_version: int) -> list[dict[str, float | None]]:
    """Return a row per round, the steps between two policy versions: times in seconds as in arXiv 2606.26997, and the trainer's by use.

    From the start of the first sample: `first_dispatch_s` to the first backward pass, `rollout_s` to the end of the last sample,
    `rollout_to_train_end_s` to the commit of the last step. `wait_s`, `compute_s` and `other_s` (decoding, digests, ledger, publishing,
    checkpoints) add up to the time since the previous round or the start of the first step; `waiting_ratio` is the share of `wait_s`.
    """
    rows = []
    before: float | None = None
    for _, of_round in groupby(steps, key=lambda step: step.step // per_version):  # the first steps may have been deleted
        members = list(of_round)
        ended, begun = members[-1].time_s, before if before is not None else members[0].metrics.get("started_at")
        wait, compute = (sum(step.metrics.get(name, 0.0) for step in members) for name in ("wait_s", "compute_s"))
        first, last = values_of(members, "first_sample_at"), values_of(members, "last_sample_at")
        backward, lasted = values_of(members, "first_backward_at"), ended - begun if begun is not None else None
        rows.append(
            {
                "first_dispatch_s": min(backward) - min(first) if backward and first else None,
                "rollout_s": max(last) - min(first) if first and last else None,
                "rollout_to_train_end_s": ended - min(first) if first else None,
                "wait_s": wait,
                "compute_s": compute,
                "other_s": max(0.0, lasted - wait - compute) if lasted is not None else None,
                "waiting_ratio": wait / lasted if lasted else None,
            }
        )
        before = ended
    return rows


def length_order_correlation(view: RunView) -> float | None:
    """Return the rank correlation between the mean length of a trained group and its delay relative to submission order.

    Above 0, groups with short completions are trained early; 0 with order `submission`. None for fewer than three groups.
    """
    trained = [group for number in sorted(view.steps) for group in view.steps[number].groups if view.samples.get(group)]
    if len(trained) < 3:
        return None
    submitted = {group: index for index, group in enumerate(sorted(trained))}
    later = np.array([index - submitted[group] for index, group in enumerate(trained)], float)
    lengths = np.array([np.mean(list(view.samples[group].values())) for group in trained])
    if not later.any() or np.ptp(lengths) == 0:
        return 0.0
    return float(np.corrcoef(_ranks(later), _ranks(lengths))[0, 1])


def values_of(steps: Sequence[StepFacts], name: str) -> list[float]:
    """Return a metric's value in each step that has it."""
    return [step.metrics[name] for step in steps if name in step.metrics]


def _ranks(values: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the rank of each value, from 1; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return ((np.cumsum(counts) - (counts + 1) / 2)[inverse]).astype(np.float64)


def redundancy(view: RunView) -> dict[str, Any] | None:
    """Return figures about extra groups (`schedule.oversample_groups`), which favour short completions: the first scored are trained.

    `length` and `reward` are means over the samples of `scored` groups (including filtered ones) and of `trained` groups. `unfinished`
    groups were aborted; their mean number of tokens is a lower bound of their length. None without extra groups.
    """
    extra = int(config_of(view).get("schedule", {}).get("oversample_groups") or 0)
    if not extra:
        return None
    members = {
        "scored": [group for group, facts in view.groups.items() if facts.outcome in ("scored", "filtered")],
        "trained": [group for step in view.steps.values() for group in step.groups],
        "unfinished": [group for group, facts in view.groups.items() if facts.outcome == "abandoned"],
    }
    rewards = {name: [view.groups[group] for group in groups if group in view.groups] for name, groups in members.items()}
    return {
        "extra_groups": extra,
        **{name: len(groups) for name, groups in members.items()},
        "length": {
            name: weighted((tokens, 1.0) for group in groups for tokens in view.samples.get(group, {}).values())
            for name, groups in members.items()
        },
        "reward": {
            name: weighted((facts.reward_mean, facts.samples - facts.no_reward) for facts in rewards[name])
            for name in ("scored", "trained")
        },
    }


AT_LAG = "tokens_at_lag_"


def weighted(values: Iterable[tuple[float | None, float]]) -> float | None:
    """Return the weighted mean of (value, weight) pairs, without values that are None; None if there are none."""
    pairs = [(value, weight) for value, weight in values if value is not None]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else None


def mean(steps: Sequence[StepFacts], name: str, *, by: str = "samples") -> float | None:
    """Return the mean of a metric over steps, weighted by the metric `by`."""
    return weighted((step.metrics.get(name), step.metrics.get(by, 1.0)) for step in steps)


def most(steps: Sequence[StepFacts], name: str) -> float | None:
    """Return the largest value of a metric over steps; None if no step has it."""
    return max(values_of(steps, name), default=None)


def lag(steps: Sequence[StepFacts]) -> dict[str, Any]:
    """Return the lag of trained groups in policy versions and, under `steps`, in optimizer steps.

    `mean`, `p95` (averaged over steps) and `max` refer to the oldest trained token of a group. `tokens` has the lag of all trained tokens
    and the share of tokens at each lag; `spans` is the mean number of policy versions per sample.
    """
    lags = sorted({int(name.removeprefix(AT_LAG)) for step in steps for name in step.metrics if name.startswith(AT_LAG)})
    shares = {
        str(number): weighted((step.metrics.get(f"{AT_LAG}{number}", 0.0), step.metrics.get("tokens", 1.0)) for step in steps)
        for number in lags
    }
    return {
        "mean": mean(steps, "lag_mean"),
        "p95": mean(steps, "lag_p95"),
        "max": most(steps, "lag_max"),
        "steps": {"mean": mean(steps, "lag_steps_mean"), "p95": mean(steps, "lag_steps_p95"), "max": most(steps, "lag_steps_max")},
        "tokens": {
            "mean": mean(steps, "token_lag_mean", by="tokens"),
            "p95": mean(steps, "token_lag_p95", by="tokens"),
            "max": most(steps, "token_lag_max"),
            "shares": shares,
        },
        "spans": mean(steps, "spans_mean"),
    }


def ess(steps: Sequence[StepFacts]) -> dict[str, float | None]:
    """Return mean and minimum over steps of the effective sample size, which is 1 if behaviour policy and learner are equal."""
    return {"mean": mean(steps, "ess"), "min": min(values_of(steps, "ess"), default=None)}


def practice(steps: Sequence[StepFacts]) -> dict[str, float | None]:
    """Return metrics for monitoring a run: means over steps, and the maximum for memory; None if no step has the metric."""
    means = ("entropy", "truncated_share", "reward_std", "reward_group_std", "update_norm", "train_tokens_per_s")
    return {
        **{name: mean(steps, name) for name in means},
        "entropy_first": steps[0].metrics.get("entropy") if steps else None,
        "entropy_last": steps[-1].metrics.get("entropy") if steps else None,
        "truncated_last": steps[-1].metrics.get("truncated_share") if steps else None,
        **{name: most(steps, name) for name in ("peak_rss_bytes", "peak_gpu_bytes")},
    }


def engines(view: RunView) -> dict[str, float | None]:
    """Return figures about engines: weights loaded in flight and the stall, batch `occupancy`, share of prefix-cached prompt tokens."""
    workers = [worker for worker in view.workers.values() if worker.role == "rollout"]
    total = partial(_total, workers)
    swaps, queries = total("swaps"), total("prefix_cache_queries")
    values_of: Mapping[str, Iterable[float]] = {
        name: [worker.values[f"engine_{name}"] for worker in workers if f"engine_{name}" in worker.values]
        for name in ("occupancy", "swap_stall_max_s")
    }
    return {
        "swaps": swaps,
        "swap_stall_ms_mean": 1000 * total("swap_stall_s") / swaps if swaps else None,
        "swap_stall_ms_max": 1000 * max(values_of["swap_stall_max_s"], default=0.0) if swaps else None,
        "occupancy": weighted((value, 1.0) for value in values_of["occupancy"]),
        "prefix_cache_hits": total("prefix_cache_hits") / queries if queries else None,
        "aborted_groups": sum(worker.total("aborted_groups") for worker in workers),
    }
