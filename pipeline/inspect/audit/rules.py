"""The scheduling rules of a run, implemented independently of `pipeline/scheduling`, so that the audit shares no error with it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from penstock.pipeline.inspect.audit.source import Unreadable
from penstock.topics.rollouts import Rollout

LAG_OF_MODE = {"synchronous": 0, "pipelined": 0, "one_step_off": 1, "in_flight": 4, "bounded": 1}
"""Mode -> max_lag if the configuration does not set it."""

BY_ARRIVAL = frozenset({"in_flight", "bounded"})
"""Modes that by default train groups in the order of scoring."""

DROPS = frozenset({"filtered", "failed", "abandoned"})
"""Outcomes of groups that are not trained and are replaced by another group."""


class Regraded(NamedTuple):
    """Groups that a parent run generated, and the steps that train them."""

    parent: str
    steps: range
    groups: tuple[range, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Numbers from a run's configuration on which the schedule depends."""

    prompts_per_step: int
    """Prompt groups of a step."""
    samples_per_prompt: int
    """Samples of a group."""
    steps_per_version: int
    """Optimizer steps between two published versions."""
    max_lag: int
    order: str
    steps: int
    """Planned optimizer steps."""
    oversample: int = 0
    """Extra samples of a group (r): K + r are started, and the first K in the log count."""
    oversample_groups: int = 0
    """Extra groups of a round (s), which may start before the version of their slot is published."""
    turns_by_log: bool = False
    """True if turns travel through the topics `calls` and `replies`."""
    regraded: tuple[Regraded, ...] = ()
    """Regraded groups by parent run, the nearest parent first."""

    @property
    def round_groups(self) -> int:
        """Number of groups trained between two published versions (U·S)."""
        return self.prompts_per_step * self.steps_per_version

    def regraded_from(self, group: int) -> Regraded | None:
        """Return the parent run that admitted the group and generated its samples; None for a group of this run."""
        return next((origin for origin in self.regraded if any(group in numbers for numbers in origin.groups)), None)

    def learner_version(self, step: int) -> int:
        """Return the version that step `step` (from 0) starts from: floor(step / S)."""
        return step // self.steps_per_version

    def min_version(self, slot: int) -> int:
        """Return the oldest version that may generate for this slot: max(0, floor(slot / U·S) - max_lag)."""
        return max(0, slot // self.round_groups - self.max_lag)

    def needed_version(self, slot: int) -> int:
        """Return the smallest version v with slot < U·S·(v + 1 + max_lag) + s, after which the slot is admitted; negative: at once."""
        return (slot - self.oversample_groups) // self.round_groups - self.max_lag

    def step_of(self, version: int) -> int:
        """Return the number of steps done when a version is published; the last version follows the last step."""
        return min(version * self.steps_per_version, self.steps)

    def newest_version(self, steps: int) -> int:
        """Return the newest published version after this many steps."""
        return -(-steps // self.steps_per_version) if steps >= self.steps else steps // self.steps_per_version


def terms_of(config: Mapping[str, Any], info: Mapping[str, Any]) -> Terms:
    """Return the numbers on which the schedule depends, from a run's configuration and registration info. Raises `Unreadable`."""
    try:
        schedule = config["schedule"]
        max_lag = schedule["max_lag"]
        origins, origin = list[Regraded](), info.get("regraded_from")
        while origin:
            steps = range(origin["step"], origin["step"] + origin["steps"])
            origins.append(Regraded(origin["run"], steps, tuple(range(low, high + 1) for low, high in origin["groups"])))
            origin = origin.get("before")
        return Terms(
            prompts_per_step=int(schedule["prompts_per_step"]),
            samples_per_prompt=int(schedule["samples_per_prompt"]),
            oversample=int(schedule.get("oversample", 0)),
            oversample_groups=int(schedule.get("oversample_groups", 0)),
            steps_per_version=int(schedule["steps_per_version"]),
            max_lag=LAG_OF_MODE[schedule["mode"]] if max_lag is None else int(max_lag),
            order=schedule["order"] or ("arrival" if schedule["mode"] in BY_ARRIVAL else "submission"),
            steps=int(info["steps"]),
            turns_by_log=config.get("environment", {}).get("carrier") == "log",
            regraded=tuple(origins),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(f"the run's configuration lacks {error}: an incompatible version of Penstock created the run") from error


def oldest_trained(rollouts: Sequence[Rollout]) -> int | None:
    """Return the oldest version that generated a trained token, or any token if none is trained; None without samples.

    If all tokens are trained, a version with an empty span counts too.
    """
    trained, sampled = set[int](), set[int]()
    for rollout in rollouts:
        versions, mask = rollout.span_versions.tolist(), rollout.loss_mask
        ends = [*map(int, rollout.span_starts[1:]), len(mask)]
        spans = zip(versions, map(int, rollout.span_starts), ends, strict=True)
        sampled |= set(versions)
        if mask.any():
            trained |= {version for version, start, end in spans if mask.all() or mask[start:end].any()}
    return min(trained or sampled, default=None)


def trajectory_flaw(rollout: Rollout) -> str | None:
    """Return what is wrong with a trajectory, or None. Turns must be contiguous, and only policy tokens may have mask and logprob."""
    if rollout.turns is None:
        return None
    end, generated = 0, np.zeros(len(rollout.token_ids), np.bool_)
    for turn in rollout.turns:
        if turn.start != end:
            return f"a turn starts at token {turn.start}, the one before it ends at {end}"
        end = turn.end
        generated[turn.start : end] = turn.source == "model"
        if turn.reward is not None and turn.source != "model":
            return f"a turn of {turn.source} has a reward; only turns of the policy may have one"
    if end != len(generated):
        return f"its turns end at token {end} of {len(generated)}"
    for name, has in (("in the loss mask", rollout.loss_mask), ("with a logprob", ~np.isnan(rollout.behaviour_logprobs))):
        if (wrong := np.flatnonzero(np.asarray(has) != generated)).size:
            ours = generated[wrong[0]]
            return f"token {wrong[0]} is {'not ' * bool(ours)}{name}, although the policy {'generated' if ours else 'did not generate'} it"
    starts = {start: prompt for start, _, prompt in rollout.segments or ()}
    if starts and any(generated[start : start + prompt].any() for start, prompt in starts.items()):
        return "the prompt of a segment contains generated tokens"
    return None


def as_object(text: str | None) -> dict[str, Any]:
    """Parse a JSON object; return {} for anything else."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
