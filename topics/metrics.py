"""`metrics`: one worker's measurements. Every worker -> tracker, live view, report."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any, Literal, get_args

from penstock.topics.wire.checked import require_names, require_whole, whole
from penstock.topics.wire.codec import Codec, Format
from penstock.topics.wire.columns import Payload
from penstock.topics.wire.errors import require
from penstock.topics.wire.fields import fields_of

SCHEMA = "metrics/1"
MeasurementKind = Literal["status", "progress", "eval", "final"]
MEASUREMENT_KINDS: tuple[MeasurementKind, ...] = get_args(MeasurementKind)
ActivityKind = Literal["work", "wait", "load"]
EVERY_RUN_HAS = ("feeder", "rollout", "scorer", "trainer", "tracker")
"""Roles that every run's measurements include; others may report too."""

# In a name, STAT is min, mean, max or p95, USE a use of time, N a number, SOURCE a data source and NAME any name.
TRAIN: Mapping[str, str] = {
    "loss": "loss of the step",
    "grad_norm": "gradient norm before clipping",
    "lr": "learning rate",
    "reward_trained": "mean reward of the step's samples",
    "reward_std": "standard deviation of the rewards over the step's samples",
    "reward_group_std": "mean of the standard deviations within groups",
    "reward/NAME": "mean of the values that reward functions logged as NAME",
    "no_reward": "samples without a reward",
    "groups": "groups of the step",
    "samples": "samples of the step",
    "trained_samples": "samples with a trained token; 0 for an empty step, which leaves the weights as they were",
    "tokens": "trained tokens",
    "truncated_share": "share of truncated samples",
    "completion_tokens_mean": "mean length of a completion, in tokens",
    "completion_tokens_p95": "length that 95 % of the completions do not exceed, in tokens",
    "completion_tokens_max": "longest completion, in tokens",
    "ess": "effective sample size (sum w)^2 / (N sum w^2) of w = current / behaviour, as a share of the tokens; 1 is on-policy",
    "weight": "mean of w = current / behaviour, expected to be 1; far from 1, the samples miss the tail of w",
    "kl_behaviour_k1": "KL(behaviour || current) as the mean of -log w, w = current / behaviour, in nats",
    "kl_behaviour_k3": "KL(behaviour || current) as the mean of w - 1 - log w, in nats; a gap to k1 indicates heavy tails of w",
    "ratio": "mean of current / proximal",
    "kl": "KL(proximal || current) by k3, in nats: how far the steps have moved within the version",
    "clip_fraction": "share of tokens that the loss clips",
    "clip_fraction_low": "share of tokens whose ratio the loss clips at the lower bound",
    "clip_fraction_high": "share of tokens whose ratio the loss clips at the upper bound, the dual clip included",
    "correction_weight_raw": "mean importance weight of the correction before it is truncated or masked",
    "correction_weight": "mean importance weight of the correction, truncated or masked",
    "corrected_fraction": "share of tokens whose importance weight was truncated or masked",
    "rejected_fraction": "share of tokens in sequences that `algorithm.reject_kl` leaves out",
    "kl_coef": "`algorithm.kl_coef` at the step, with `final_kl_coef`; `kl_reward` if the KL is in the reward",
    "entropy_coef": "`algorithm.entropy_coef` at the step, with `final_entropy_coef`",
    "kl_reference": "KL(current || reference) by k3, in nats, with `algorithm.kl_coef`",
    "kl_reference_k1": 'KL(behaviour || reference) by k1, in nats, with `algorithm.kl_in = "reward"`',
    "value_error": "mean squared difference of value and advantage, with `algorithm.value_lr`",
    "value_target": "mean squared advantage, which a value of 0 would have as its error",
    "entropy": "mean entropy of the sampling distributions, in nats; a fall towards 0 means that the policy no longer explores",
    "lag_STAT": "learner's version minus the group's oldest version, over groups; `max_lag` bounds it",
    "lag_steps_STAT": "optimizer steps since the group's oldest version, over groups",
    "token_lag_STAT": "learner's version minus the token's version, over trained tokens",
    "tokens_at_lag_N": "share of trained tokens whose lag is N versions",
    "spans_mean": "mean number of policy versions in a trained sample",
    "queued_groups": "scored groups that wait for a later step",
    "queued_lag_STAT": "lag of the groups that wait for a later step, in versions",
    "dropped": "groups dropped since the previous step",
    "micro_batches": "micro-batches of the step",
    "real_tokens": "tokens without padding",
    "padded_tokens": "tokens with padding",
    "computed_tokens": "tokens that the forward pass computed",
    "compute_s": "seconds of forward and backward passes and the update",
    "wait_s": "seconds of waiting for groups or the device",
    "digest_s": "seconds of hashing the weights",
    "train_tokens_per_s": "tokens without padding per second of computing",
    "model_tflops_per_s": "10^12 model operations (arXiv 2204.02311) per second of computing",
    "mfu": "model operations per second as a share of `trainer.peak_tflops`",
    "update_norm": "norm of AdamW's change of the weights",
    "peak_rss_bytes": "peak memory of the trainer's process",
    "peak_gpu_bytes": "peak GPU memory of tensors",
}
"""Metrics of an optimizer step: in the ledger, and as `train/NAME` in `metrics.jsonl`, MLflow, TensorBoard and Weights & Biases."""
EVAL: Mapping[str, str] = {
    "greedy_accuracy": "share of held-out prompts whose greedy completion is solved",
    "greedy_low": "lower end of the 95 % interval of the greedy accuracy",
    "greedy_high": "upper end of the 95 % interval of the greedy accuracy",
    "greedy_reward": "mean reward of greedy completions",
    "greedy_reward/NAME": "mean reward of greedy completions by one reward function",
    "sampled_accuracy": "share of sampled completions that are solved",
    "sampled_low": "lower end of the 95 % interval of the sampled accuracy",
    "sampled_high": "upper end of the 95 % interval of the sampled accuracy",
    "sampled_reward": "mean reward of sampled completions",
    "sampled_reward/NAME": "mean reward of sampled completions by one reward function",
    "pass_at_N": "probability that one of N samples is solved",
    "pass_at_k": "probability that one of `eval.samples` samples is solved",
    "n_failed": "completions of prompts without a reward, which all other figures exclude",
    "best_version": "version with the best greedy accuracy so far",
    "eval_s": "seconds of the evaluation",
    "SOURCE/NAME": "the metric NAME over the held-out prompts of one source of several",
}
"""Metrics of an evaluation: in `metrics`, and as `eval/NAME`."""
REWARD: Mapping[str, str] = {
    "reward": "mean reward of all scored samples of a version, trained or not",
    "reward_samples": "number of scored samples of a version, trained or not",
}
"""Metrics of a version, written by the tracker alone, without a prefix."""
WORKER: Mapping[str, str] = {
    "uptime_s": "seconds since the worker started",
    "startup_s": "seconds from the creation of the process until everything was loaded",
    "cpu_s": "CPU seconds of the process",
    "rss_mib": "memory of the process",
    "peak_rss_mib": "peak memory of the process",
    "time_USE_s": "seconds in one use; the uses add up to the time of the worker",
    "cost_encode_s": "CPU seconds of encoding records",
    "cost_decode_s": "CPU seconds of decoding records",
    "cost_send_s": "CPU seconds of sending",
    "cost_poll_s": "CPU seconds of polling",
    "cost_io_s": "CPU seconds of the Kafka client's network thread",
    "dead_letters": "records sent to the dead letters",
    "duplicates": "duplicate records that were ignored",
    "fenced": "fenced transactions; only on `/metrics`",
    "rebalances": "rebalances of consumer groups; only on `/metrics`",
    "transaction_retries": "retried transactions; only on `/metrics`",
    "lag": "records behind the end of the worker's partitions; only on `/metrics`",
    "broker_silent_s": "seconds without a response of the broker while a client waits; only on `/metrics`",
    "disk_free_bytes": "free bytes of the disk with the state directory; only on `/metrics`",
    "version": "policy version of the worker",
    "admitted": "feeder: groups admitted",
    "admissible": "feeder: groups that may be admitted but wait for a free slot",
    "unfinished": "feeder: admitted groups without an outcome",
    "repeated": "feeder: prompts sampled again because their group was abandoned",
    "left_out": "feeder: rows left out by `data.skip_solved`, `data.skip_unsolved` and `data.skip_rows`",
    "all_out": "feeder: 1 once no prompt follows and all groups have ended",
    "dropped": "feeder: groups that were dropped",
    "slots": "rollout: most groups in flight",
    "groups": "rollout: finished groups; scorer: scored groups",
    "samples": "rollout: finished samples",
    "tokens": "rollout: tokens of finished samples",
    "spans": "rollout: version spans of finished samples",
    "calls": "rollout: turns generated",
    "calls_in_hand": "rollout: turns in flight",
    "aborted_calls": "rollout: turns aborted because they could no longer be fresh",
    "aborted_groups": "rollout: groups aborted because they could no longer be fresh",
    "dropped_groups": "rollout: groups not started because they could no longer be fresh",
    "in_flight_groups": "rollout: groups in flight",
    "in_flight_lag_STAT": "rollout: newest version minus the oldest version of a group in flight",
    "generate_s": "rollout: seconds of generation",
    "load_s": "rollout: seconds of loading versions",
    "engine_groups": "engine: finished groups",
    "engine_tokens": "engine: generated tokens",
    "engine_aborted_tokens": "engine: tokens of aborted groups",
    "engine_busy_s": "engine `toy`: seconds of its steps",
    "engine_prefill_s": "engine: seconds of prefill",
    "engine_decode_steps": "engine: decode steps",
    "engine_decode_s": "engine: seconds of decode steps",
    "engine_traced": "engine: 1 if the decoder is traced",
    "engine_loads": "engine: versions loaded",
    "engine_load_s": "engine: seconds of loading versions",
    "engine_swaps": "engine: versions loaded while samples were in flight",
    "engine_swap_stall_s": "engine: seconds for which samples in flight waited for new weights",
    "engine_swap_stall_last_s": "engine: seconds for which samples in flight waited for the newest weights",
    "engine_swap_stall_max_s": "engine: longest time for which samples in flight waited for new weights, in seconds",
    "engine_occupancy": "engine: mean share of `rollout.concurrency` in use",
    "engine_prefix_cache_queries": "engine: tokens looked up in the prefix cache",
    "engine_prefix_cache_hits": "engine: tokens found in the prefix cache",
    "engine_preemptions": "engine: preempted samples",
    "engine_kv_cache_usage": "engine: share of the KV cache in use",
    "engine_trajectories": "environments: finished trajectories",
    "engine_turns": "environments: turns of the policy",
    "engine_segments": "environments: trained sequences",
    "engine_dropped": "environments: aborted trajectories",
    "engine_dropped_turns": "environments: turns of aborted trajectories",
    "engine_broken": "environments: trajectories that their environment ended",
    "engine_environment_NAME": "environments: trajectories that their environment ended with cause NAME",
    "engine_losses": "environments: lost sessions and processes",
    "engine_environment_s": "environments: seconds in environments",
    "engine_waits_s": "environments: seconds without a turn to generate",
    "engine_results_cut": "environments: tool results and texts that were cut",
    "engine_replaced": "environments: lone surrogates that were replaced",
    "engine_waiting_for_environments": "environments: trajectories that wait for their environment",
    "engine_calls": "environments: turns requested through the log",
    "engine_replies": "environments: replies received",
    "engine_replayed": "environments: turns taken from recorded replies",
    "engine_turns_asked": "environments: turns that wait for a reply",
    "engine_overhead_ms_pN": "environments: quantile N of a turn's time outside generation",
    "outcome_NAME": "scorer: groups that ended with outcome NAME",
    "open_groups": "scorer: groups with missing samples",
    "oldest_open_s": "scorer: age of the oldest open group",
    "reward_s": "scorer: seconds of the reward functions",
    "reward_busy_s": "scorer: seconds, each weighted by the share of the reward processes' slots in use",
    "service_requests": "scorer: requests to reward services, retries included",
    "service_retries": "scorer: requests to reward services that failed, retried or not",
    "service_busy_s": "scorer: seconds in which its processes had a request to a reward service in flight",
    "service_request_s": "scorer: seconds of all requests to reward services",
    "no_reward": "scorer: samples without a reward",
    "surplus_samples": "scorer: samples that arrived after their group had K",
    "step": "trainer: committed steps",
    "compute_s": "trainer: seconds of computing",
    "stale_groups": "trainer: groups dropped as stale",
    "checkpoint_step": "trainer: steps of the newest checkpoint",
    "checkpoint_bytes": "trainer: size of the newest checkpoint",
    "checkpoint_s": "trainer: seconds of writing the newest checkpoint",
    "recovered_from_step": "trainer: steps of the checkpoint it started from",
    "repeated_steps": "trainer: steps recomputed from the log at its start",
    "recovery_s": "trainer: seconds of its recovery",
    "points": "tracker: values written",
}
"""Metrics of a worker: in `metrics`, as `system/WORKER/NAME`, and on the worker's `/metrics`; most are cumulative."""
TABLES = {"train": TRAIN, "eval": EVAL, "reward": REWARD, "system": WORKER}
"""First part of a point's name -> its table."""
_PLACEHOLDERS = {
    "STAT": "(?P<stat>min|mean|max|p95)",
    "USE": r"(?P<use>\w+)",
    "SOURCE": "(?P<source>.+)",
    "NAME": "(?P<name>.+)",
    "N": r"(?P<n>\d+)",
}


class Activity(StrEnum):
    """Activity of a worker: the label `activity` of its status, next to the free text `doing`, which no program interprets."""

    BUSY = "busy"
    """Works and reports each second."""
    COMPUTE = "compute"
    """One long computation without reports: a micro-batch, an evaluation."""
    STOP = "stop"
    """Finishes its work after a request to stop."""
    NO_PROMPTS = "no_prompts"
    """Waits for prompts."""
    NO_CALLS = "no_calls"
    """Waits for turns to generate."""
    NO_RECORDS = "no_records"
    """Waits for records to write down."""
    NO_SAMPLES = "no_samples"
    """Waits for samples."""
    NO_WEIGHTS = "no_weights"
    """Waits for a policy version, or loads one."""
    LOAD = "load"
    """Loads a policy version."""
    FULL_WINDOW = "full_window"
    """The schedule admits no prompt before the next version."""
    NO_ROOM = "no_room"
    """No rollout worker has a free slot."""
    NO_DEVICE = "no_device"
    """Waits for a shared device, or hands it over."""
    NO_GROUP = "no_group"
    """Waits for scored groups."""
    SAVE = "save"
    """Writes results: a checkpoint, the model, the report."""
    START = "start"
    """Starts and loads."""
    DONE = "done"
    """Nothing is left but to wait for the end of the run."""

    @property
    def kind(self) -> ActivityKind:
        """Work, or the kind of waiting that the activity is; no other code decides this."""
        if self in (Activity.START, Activity.LOAD):
            return "load"
        return "work" if self in (Activity.BUSY, Activity.COMPUTE, Activity.STOP, Activity.SAVE) else "wait"

    @property
    def reports(self) -> bool:
        """True if a worker reports every second during this activity; during the others it may be silent for minutes."""
        return self not in (Activity.COMPUTE, Activity.STOP, Activity.LOAD, Activity.SAVE, Activity.START)


def activity_of(labels: Mapping[str, str]) -> Activity:
    """Return the activity in a status's labels; `BUSY` if there is none, or one that only another release has."""
    try:
        return Activity(labels.get("activity", Activity.BUSY))
    except ValueError:
        return Activity.BUSY


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Metrics of one worker at one time."""

    worker: str
    role: str
    incarnation: str
    """Distinguishes the processes that have had the worker's name."""
    seq: int
    """Number among the incarnation's measurements, from 0."""
    kind: MeasurementKind
    """`status` each second, `progress`, `eval` or `final`."""
    time_ns: int
    version: int | None = None
    """The evaluated version."""
    step: int | None = None
    """The optimizer step it belongs to."""
    values: dict[str, float] = field(default_factory=dict)
    """Figures by name; most are cumulative since the process started."""
    labels: dict[str, str] = field(default_factory=dict)
    """`activity` and its text `doing`, host, pid; of a scorer causes of missing rewards; of an evaluation some prompts with completions."""


CODEC = Codec(SCHEMA, fields=fields_of(Measurement))


def decode(value: Payload) -> Measurement:
    """Return the measurement in a payload. Raises `Unusable`."""
    (row,) = CODEC.decode(value)
    require(row["kind"] in MEASUREMENT_KINDS, f"kind is {row['kind'][:60]!r}, expected one of {', '.join(MEASUREMENT_KINDS)}")
    require_names(row, "worker", "role", "incarnation")
    require_whole(row, "seq", "time_ns", "version", "step")
    worker, role, values = row["worker"], row["role"], row["values"]
    require(worker == role or worker.startswith(f"{role}-"), f"worker {worker!r} is not of role {role!r}")
    accuracy = values.get("greedy_accuracy", 0.0)
    require(math.isfinite(accuracy), f"greedy_accuracy is {accuracy}, expected a finite number")
    require("all_out" not in values or whole(values.get("admitted")) is not None, "'all_out' without a whole number 'admitted'")
    return Measurement(**row)


def _facts(measurement: Measurement) -> dict[str, Any]:
    versions = {"policy_version_min": measurement.version, "policy_version_max": measurement.version}
    return {"outcome": measurement.kind, "worker": measurement.worker, **versions}


def entry_of(point: str) -> tuple[str, str, dict[str, str]] | None:
    """Return the table of a metric by its full name, its key there, and the variable parts of the name; None if it is not documented.

    Example:
        entry_of("train/tokens_at_lag_3")  # -> ("train", "tokens_at_lag_N", {"n": "3"})
    """
    table, slash, name = point.partition("/")
    if table == "system":
        name = name.partition("/")[2]
    if not slash:
        name = point
    table = table if slash and table in TABLES else "reward"
    matches = ((key, _pattern(key).fullmatch(name)) for key in TABLES[table])
    return next(((table, key, match.groupdict()) for key, match in matches if match), None)


def meaning_of(point: str) -> str | None:
    """Return the meaning of a metric by its full name, such as "train/loss"; None if it is not documented."""
    entry = entry_of(point)
    return None if entry is None else TABLES[entry[0]][entry[1]]


@cache
def _pattern(key: str) -> re.Pattern[str]:
    """Return the pattern of the names that a table's key covers; cached, as each request of `/metrics` matches all keys."""
    return re.compile(re.sub("|".join(_PLACEHOLDERS), lambda match: _PLACEHOLDERS[match[0]], key))


_FORMAT = Format(CODEC, decode, _facts, ("outcome", "worker"), MEASUREMENT_KINDS)
encode, headers, outgoing, check, read = _FORMAT.encode, _FORMAT.headers, _FORMAT.outgoing, _FORMAT.check, _FORMAT.read
