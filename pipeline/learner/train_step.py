"""One optimizer step, to which groups are added in plan order.

Its result depends only on the groups in plan order, not on their arrival times: a live run, in which groups still arrive while the first
micro-batches run backward, and a plan read back from the log use the same code.
"""

import json
import re
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.infra.backends.base import Backend, TokenBatch
from penstock.pipeline.algorithms import losses
from penstock.pipeline.algorithms.registry import LOSSES
from penstock.pipeline.config.load import Config
from penstock.pipeline.config.plugins import load
from penstock.pipeline.learner import micro_batches
from penstock.pipeline.learner.micro_batches import (
    MicroBatcher,
    Ranks,
    TokenSequence,
    boundaries,
    distinct_tokens,
    lowered_rewards,
    pack,
    padded_tokens,
)
from penstock.pipeline.learner.micro_batches import denominator as denominator_of
from penstock.pipeline.scheduling.rules import fractions_by_lag, lag_summary
from penstock.topics.groups import Group, version_min
from penstock.topics.ledger import Planned
from penstock.topics.rollouts import generated

BatchLoss = Callable[..., tuple[Any, dict[str, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The loss and the advantage function of a run, with their settings."""

    batch_loss: BatchLoss
    advantages: Callable[[Group], Any]
    proximal: str
    truncated: str
    kl_coef: float
    """Coefficient of the KL in the loss."""
    kl_reward: float
    """Coefficient of the KL in the reward."""
    token_budget: int
    counts_computed: bool
    """True if the budget counts tokens that are computed, and each round of micro-batches is divided evenly over the processes."""
    processes: int
    most_groups: int | None
    """Groups of a micro-batch at most: the step's groups divided by the trainer's processes; None for one process."""
    aggregate: str
    steps_per_version: int
    counts_untrained: bool
    """True if untrained samples count in the denominator of `sequence_mean` and `constant`."""
    decays: Mapping[str, tuple[float, float]]
    """Coefficient -> its value at step 0 and after `total_steps`, of those that change."""
    total_steps: int

    @classmethod
    def of(cls, config: Config, *, total_steps: int = 1) -> "Objective":
        """The objective of a configuration, whose coefficients reach their final values at `total_steps`; loads the user's functions."""
        algorithm = config.algorithm
        in_loss, advantage = algorithm.kl_in == "loss", micro_batches.advantage_function(config.advantage, trust_code=True)
        settings: dict[str, Any] = {
            "clip_low": config.clip_low,
            "clip_high": config.clip_high,
            "aggregate": config.aggregate,
            "max_tokens": config.max_completion_tokens,
            "kl_coef": algorithm.kl_coef if in_loss else 0.0,
        }
        if config.clip_dual is not None:
            settings["clip_dual"] = config.clip_dual
        if settings["kl_coef"] and config.kl_weighted:
            settings["kl_weighted"] = True
        if algorithm.entropy_coef:
            settings |= {"entropy_coef": algorithm.entropy_coef, "entropy_floor": algorithm.entropy_floor}
        if algorithm.reject_kl is not None:
            settings["reject_kl"] = algorithm.reject_kl
        if config.correction != "none":
            settings["correction"] = config.correction
            settings |= {"correction_low": algorithm.correction_low, "correction_high": algorithm.correction_high}
        if algorithm.loss in LOSSES:
            settings["surrogate"] = LOSSES[algorithm.loss].surrogate
        finals = {"entropy_coef": (algorithm.entropy_coef, algorithm.final_entropy_coef)}
        finals["kl_coef" if in_loss else "kl_reward"] = algorithm.kl_coef, algorithm.final_kl_coef
        function = losses.batch_loss if algorithm.loss in LOSSES else load(algorithm.loss)

        def batch_loss(logprobs: Any, batch: TokenBatch, **inputs: Any) -> tuple[Any, dict[str, float]]:
            return function(logprobs, batch, **{**settings, **inputs})

        return cls(
            batch_loss=batch_loss,
            advantages=micro_batches.combined_advantages(advantage, combine=algorithm.combine),
            proximal=config.proximal,
            truncated=algorithm.truncated,
            kl_coef=settings["kl_coef"],
            kl_reward=0.0 if in_loss else algorithm.kl_coef,
            token_budget=config.trainer.micro_batch_tokens,
            counts_computed=config.trainer.micro_batch_by == "computed",
            processes=config.trainer.processes,
            most_groups=config.groups_per_process,
            aggregate=config.aggregate,
            steps_per_version=config.schedule.steps_per_version,
            counts_untrained=config.counts_untrained,
            decays={name: (first, last) for name, (first, last) in finals.items() if last is not None},
            total_steps=total_steps,
        )

    def coefficients(self, step: int) -> dict[str, float]:
        """The coefficients that change over the run, at optimizer step `step`: linear from step 0 to `total_steps`."""
        done = min(1.0, step / self.total_steps)
        return {name: first + (last - first) * done for name, (first, last) in self.decays.items()}

    def sequences(self, group: Group) -> list[TokenSequence]:
        return micro_batches.sequences(group, advantages=self.advantages, truncated=self.truncated)

    def batcher(self, *, shares_prompts: bool, ends: Collection[int] | None) -> MicroBatcher:
        """The `MicroBatcher` for a backend; `ends` are the recorded boundaries of a repeated step."""
        if not self.counts_computed:
            return MicroBatcher(self.token_budget, most_groups=self.most_groups, ends=ends)
        size = distinct_tokens if shares_prompts else padded_tokens
        return MicroBatcher(self.token_budget, size=size, ranks=self.processes, ends=ends)

    def backward(self, backend: Backend, batch: TokenBatch, *, denominator: float | None = None) -> dict[str, float]:
        """Run a micro-batch backward with this loss; returns its summed statistics."""
        changing = {name: value for name, value in self.coefficients(backend.steps).items() if name != "kl_reward"}
        inputs: dict[str, Any] = {"proximal": self._proximal(backend, batch), **changing}
        if self.kl_coef:
            inputs["reference"] = backend.reference_logprobs(batch)

        def loss(logprobs: Any, **computed: Any) -> tuple[Any, dict[str, float]]:
            return self.batch_loss(logprobs, batch, **inputs, **computed)

        return backend.backward(batch, loss, denominator=denominator)

    def _proximal(self, backend: Backend, batch: TokenBatch) -> npt.NDArray[np.float32] | None:
        """[B, L-1] proximal logprobs of a micro-batch; None if the current policy is the proximal one."""
        if self.proximal == "snapshot":
            return backend.snapshot_logprobs(batch)
        return batch.behaviour_logprobs if self.proximal == "behaviour" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """Result of a step: its metrics, and the exact numbers with which a repetition is compared."""

    loss: float
    grad_norm: float
    boundaries: tuple[int, ...]
    metrics: dict[str, float]

    @property
    def loss_bits(self) -> int:
        return double_bits(self.loss)

    @property
    def grad_norm_bits(self) -> int:
        return double_bits(self.grad_norm)


@dataclass(slots=True)
class Step:
    """A step in progress. `add` runs every micro-batch backward as soon as it is full, if the backend divides late.

    A step without a trained token counts as a step and leaves the weights unchanged.
    """

    backend: Backend
    objective: Objective
    number: int
    """Optimizer steps of the run before this one."""
    ranks: Ranks | None = None
    """The trainer's ranks, if it has several processes."""
    before_update: Callable[[], None] = lambda: None
    """Called before the model changes."""
    on_batch: Callable[[int, int | None], None] = lambda _number, _count: None
    """Called before each micro-batch runs, with its number from 1 and, once all groups are added, the number of micro-batches."""
    recorded_ends: Sequence[int] | None = None
    """Recorded boundaries of the step that this one repeats; None divides by token budget and groups."""
    first_backward_at: float | None = None
    compute_s: float = 0.0
    _complete: bool = False
    _batcher: MicroBatcher | None = None
    _batches: list[TokenBatch] = field(default_factory=list)
    _closed: list[tuple[TokenSequence, ...]] = field(default_factory=list)
    _stats: list[dict[str, float]] = field(default_factory=list)
    _groups: list[Group] = field(default_factory=list)

    def add(self, group: Group, planned: Planned | None = None) -> None:
        """Add the next group of the plan; `planned` tells other ranks where the group is in the log."""
        if self.ranks is not None and planned is not None:
            self.ranks.planned[group.group] = planned
        if self._batcher is None:
            self._batcher = self.objective.batcher(shares_prompts=self.backend.shares_prompts, ends=self.recorded_ends)
        self._groups.append(group)
        trained = group
        if self.objective.kl_reward:
            coef = self.objective.coefficients(self.backend.steps).get("kl_reward", self.objective.kl_reward)
            reference, budget = self.backend.reference_logprobs, self.objective.token_budget
            trained, sums = lowered_rewards(group, coef=coef, reference=reference, token_budget=budget)
            self._stats.append(sums)
        for sequence in self.objective.sequences(trained):
            for full in self._batcher.add(sequence):
                self._close(full)

    def finish(self, *, learner_version: int) -> StepOutcome:
        """Run the last micro-batches backward, divide the gradients by the step's denominator, and update the weights.

        Returns the step's numbers and metrics; lags are counted from `learner_version`.
        """
        self._complete, coefficients = True, self.objective.coefficients(self.backend.steps)
        for rest in self._batcher.close() if self._batcher is not None else ():
            self._close(rest)
        if not self._batches:
            self.before_update()
            self.backend.steps += 1  # the learning-rate schedule counts it
            metrics = {"loss": 0.0, "grad_norm": 0.0, **self._measures(learner_version)}
            return StepOutcome(loss=0.0, grad_norm=0.0, boundaries=(), metrics=metrics)
        if self.ranks is not None:
            self._stats = self.ranks.finish(self.backend, self._stats, batches=len(self._closed))
        tokens, masks = sum(batch.tokens for batch in self._batches), [batch.completion_mask for batch in self._batches]
        aggregate, counts_untrained = self.objective.aggregate, self.objective.counts_untrained
        denominator = denominator_of(masks, self._groups, aggregate=aggregate, counts_untrained=counts_untrained)
        if not self.backend.divides_late:
            for batch in self._batches:
                self._backward(batch, denominator=denominator)
        self.before_update()
        started = time.monotonic()
        result = self.backend.step(denominator=denominator)
        self.compute_s += time.monotonic() - started
        counts = {"tokens": float(tokens), "denominator": denominator}  # override what a user's loss reports
        summary = losses.summarise(losses.add_stats(self._stats) | counts)
        loss = summary.pop("loss")
        metrics = {
            "loss": loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            **coefficients,
            **_utilisation(result.measures, seconds=self.compute_s),
            **summary,
            **self._measures(learner_version),
        }
        return StepOutcome(loss=loss, grad_norm=result.grad_norm, boundaries=boundaries(self._closed), metrics=metrics)

    @property
    def ess(self) -> float | None:
        """Effective sample size of the micro-batches that have run; None without a trained token."""
        counts = {"tokens": float(sum(batch.tokens for batch in self._batches)), "denominator": 1.0}
        return losses.summarise(losses.add_stats(self._stats) | counts).get("ess")

    def _close(self, sequences: tuple[TokenSequence, ...]) -> None:
        """Send a full micro-batch to its rank, or run it backward here if the backend divides late."""
        batch = pack(sequences)
        self._closed.append(sequences)
        self._batches.append(batch)
        delegated = self.ranks is not None and self.ranks.delegates(len(self._closed) - 1, sequences)
        if self.backend.divides_late and not delegated:
            self._backward(batch, denominator=None)

    def _backward(self, batch: TokenBatch, *, denominator: float | None) -> None:
        """Run a micro-batch backward here, and record its statistics and time; `denominator` is None if the backend divides late."""
        self.on_batch(len(self._stats) + 1, len(self._closed) if self._complete else None)
        started = time.monotonic()
        if self.first_backward_at is None:
            self.first_backward_at = time.time()
        self._stats.append(self.objective.backward(self.backend, batch, denominator=denominator))
        self.compute_s += time.monotonic() - started

    def _measures(self, learner_version: int) -> dict[str, float]:
        """Metrics of the step apart from the loss: groups, staleness, token counts and times."""
        rollouts = [sample.rollout for group in self._groups for sample in group.samples]
        real_tokens = float(sum(batch.attention_mask.sum() for batch in self._batches))
        return {
            **group_measures(self._groups),
            "trained_samples": float(sum(len(batch) for batch in self._closed)),
            **self._lags(learner_version),
            "micro_batches": float(len(self._closed)),
            "real_tokens": real_tokens,
            **({"train_tokens_per_s": real_tokens / self.compute_s} if self.compute_s else {}),
            "padded_tokens": float(sum(batch.attention_mask.size for batch in self._batches)),
            "computed_tokens": sum(stats.get("computed_tokens", 0.0) for stats in self._stats),
            "compute_s": self.compute_s,
            **({"first_backward_at": self.first_backward_at} if self.first_backward_at is not None else {}),
            "first_sample_at": min(rollout.started_ns for rollout in rollouts) / 1e9,
            "last_sample_at": max(rollout.ended_ns for rollout in rollouts) / 1e9,
        }

    def _lags(self, learner_version: int) -> dict[str, float]:
        """Staleness of the step: of each group by its oldest token, as freshness counts it, and of each trained token.

        In versions, and for the groups also in optimizer steps (`lag_steps_mean`, …) since that version.
        """
        oldest = [version_min([sample.rollout for sample in group.samples]) or 0 for group in self._groups]
        groups = [learner_version - version for version in oldest]
        in_steps = lag_summary([self.number - self.objective.steps_per_version * version for version in oldest])
        by_group = lag_summary(groups) | {name.replace("lag", "lag_steps"): value for name, value in in_steps.items()}
        samples = {(sequence.group, sequence.sample) for batch in self._closed for sequence in batch}
        rollouts = [sample.rollout for group in self._groups for sample in group.samples]
        trained = [rollout for rollout in rollouts if (rollout.group, rollout.sample) in samples]
        if not trained:
            return by_group
        tokens = learner_version - np.concatenate([rollout.token_versions[rollout.loss_mask] for rollout in trained])
        return {
            **by_group,
            **{f"token_{name}": value for name, value in lag_summary(tokens).items()},
            **{f"tokens_at_lag_{lag}": share for lag, share in fractions_by_lag(tokens).items()},
            "spans_mean": float(np.mean([len(rollout.span_versions) for rollout in trained])),
        }


def group_measures(groups: Sequence[Group]) -> dict[str, float]:
    """Lengths, truncation rate and rewards over all samples of these groups, trained or not; rewards over the samples that have one.

    `no_reward` counts the samples without a reward, if any; `reward/NAME` is the mean of what reward functions logged as `NAME`.
    `truncated_share` counts samples that reached `max_new_tokens`; `reward_std` is over all samples, `reward_group_std` the mean of the
    groups' standard deviations, from which group advantages are computed.
    """
    samples = [sample for group in groups for sample in group.samples]
    lengths = np.array([len(generated(sample.rollout)) for sample in samples], np.float64)
    rewards = [np.array(group.rewards, np.float64) for group in groups]
    unscored = len(samples) - sum(map(len, rewards))
    return {
        **_logged(groups),
        **({"no_reward": float(unscored)} if unscored else {}),
        "groups": float(len(groups)),
        "samples": float(len(samples)),
        "reward_trained": float(np.concatenate(rewards).mean()),
        "reward_std": float(np.concatenate(rewards).std()),
        "reward_group_std": float(np.mean([values.std() for values in rewards])),
        "truncated_share": float(np.mean([sample.rollout.finish == "length" for sample in samples])),
        "completion_tokens_mean": float(lengths.mean()),
        "completion_tokens_p95": float(np.quantile(lengths, 0.95, method="inverted_cdf")),
        "completion_tokens_max": float(lengths.max()),
    }


def _logged(groups: Sequence[Group]) -> dict[str, float]:
    """Mean of each logged metric over the groups that logged it, under a name that MLflow accepts."""
    values: dict[str, list[float]] = {}
    for group in groups:
        for name, value in json.loads(group.metrics or "{}").items():
            parts = [re.sub(r"[^\w.\- :]", "_", part) for part in name.split("/") if part not in ("", ".", "..")]
            values.setdefault("/".join(["reward", *parts]), []).append(value)
    return {name: fmean(numbers) for name, numbers in values.items()}


def _utilisation(measures: dict[str, float], *, seconds: float) -> dict[str, float]:
    """Metrics of the backend with FLOP/s instead of FLOPs, and the share of the device's peak (MFU)."""
    others = {name: value for name, value in measures.items() if name not in ("model_flops", "peak_flops")}
    rate = measures.get("model_flops", 0.0) / seconds if seconds else 0.0
    peak = measures.get("peak_flops")
    return others | ({"model_tflops_per_s": rate / 1e12} if rate else {}) | ({"mfu": rate / peak} if rate and peak else {})


def double_bits(value: float) -> int:
    """The 64 bits of a double as a signed integer, so that two values are compared exactly."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])
