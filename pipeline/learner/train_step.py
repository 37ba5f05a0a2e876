"""One optimizer step, fed group by group in plan order.

The rule: what a step computes follows from its groups in plan order alone, never from when they came: the same call serves a live
run, in which groups still arrive while the first micro-batches run backward, and a whole plan read back from the log.
"""

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.infra.backends.base import Backend
from penstock.infra.backends.batch import TokenBatch
from penstock.pipeline.algorithms import losses
from penstock.pipeline.algorithms.registry import LOSSES
from penstock.pipeline.config.load import Config
from penstock.pipeline.config.plugins import load
from penstock.pipeline.learner import training_samples
from penstock.pipeline.learner.ranks.lead import Ranks
from penstock.pipeline.learner.step_measures import group_measures
from penstock.pipeline.learner.training_samples import MicroBatcher, TokenSequence, boundaries, lowered_rewards, pack
from penstock.pipeline.learner.training_samples import denominator as denominator_of
from penstock.pipeline.scheduling.rules import fractions_by_lag, lag_summary
from penstock.topics.groups import Group, version_min
from penstock.topics.ledger import Planned

BatchLoss = Callable[..., tuple[Any, dict[str, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Loss and advantage of a run with their settings."""

    batch_loss: BatchLoss
    advantages: Callable[[Group], Any]
    proximal: str
    truncated: str
    kl_coef: float
    """Of the KL in the loss."""
    kl_reward: float
    """Of the KL in the reward."""
    token_budget: int
    most_groups: int | None
    """The most groups of a micro-batch: a step's groups divided by the processes that train it."""
    aggregate: str
    steps_per_version: int
    counts_untrained: bool
    """Whether samples that are not trained count in the denominator of `sequence_mean` and `constant`."""

    @classmethod
    def of(cls, config: Config) -> "Objective":
        """What the configuration names; own functions are loaded here."""
        algorithm = config.algorithm
        settings: dict[str, Any] = {
            "clip_low": config.clip_low,
            "clip_high": config.clip_high,
            "aggregate": config.aggregate,
            "max_tokens": config.max_completion_tokens,
            "kl_coef": algorithm.kl_coef if algorithm.kl_in == "loss" else 0.0,
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
        function = losses.batch_loss if algorithm.loss in LOSSES else load(algorithm.loss)

        def batch_loss(logprobs: Any, batch: TokenBatch, **given: Any) -> tuple[Any, dict[str, float]]:
            return function(logprobs, batch, **settings, **given)

        return cls(
            batch_loss=batch_loss,
            advantages=training_samples.combined_advantages(
                training_samples.advantage_function(config.advantage, trust_code=True), combine=algorithm.combine
            ),
            proximal=config.proximal,
            truncated=algorithm.truncated,
            kl_coef=settings["kl_coef"],
            kl_reward=algorithm.kl_coef if algorithm.kl_in == "reward" else 0.0,
            token_budget=config.trainer.micro_batch_tokens,
            most_groups=config.groups_per_process,
            aggregate=config.aggregate,
            steps_per_version=config.schedule.steps_per_version,
            counts_untrained=config.counts_untrained,
        )

    def sequences(self, group: Group) -> list[TokenSequence]:
        """The samples of a group that are trained, in order of their numbers; aborted ones are not."""
        return training_samples.sequences(group, advantages=self.advantages, truncated=self.truncated)

    def backward(self, backend: Backend, batch: TokenBatch, *, denominator: float | None = None) -> dict[str, float]:
        """Run one micro-batch backward; returns its statistics."""
        given: dict[str, Any] = {"proximal": self._proximal(backend, batch)}
        if self.kl_coef:
            given["reference"] = backend.reference_logprobs(batch)

        def loss(logprobs: Any, entropies: Any = None) -> tuple[Any, dict[str, float]]:
            return self.batch_loss(logprobs, batch, **given, **({} if entropies is None else {"entropies": entropies}))

        return backend.backward(batch, loss, denominator=denominator)

    def _proximal(self, backend: Backend, batch: TokenBatch) -> npt.NDArray[np.float32] | None:
        """[B, L-1] proximal logprobs of a micro-batch; None stands for the current policy's own."""
        if self.proximal == "snapshot":
            return backend.snapshot_logprobs(batch)
        return batch.behaviour_logprobs if self.proximal == "behaviour" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a step did: exact bits to compare a repetition with, and its measurements."""

    loss: float
    grad_norm: float
    boundaries: tuple[int, ...]
    metrics: dict[str, float]

    @property
    def loss_bits(self) -> int:
        """The loss as an integer with the same 64 bits."""
        return double_bits(self.loss)

    @property
    def grad_norm_bits(self) -> int:
        """The gradient norm as an integer with the same 64 bits."""
        return double_bits(self.grad_norm)


@dataclass(slots=True)
class Step:
    """A step under way. `add` runs every micro-batch backward as soon as it is full, if the backend can divide late.

    A step without a trained token is empty: it counts as a step, and leaves the weights as they are.
    """

    backend: Backend
    objective: Objective
    number: int
    """Optimizer steps of the run before this one."""
    ranks: Ranks | None = None
    """The other processes of the trainer, which train their share of the micro-batches."""
    before_update: Callable[[], None] = lambda: None
    """Called before the model changes."""
    on_batch: Callable[[int, int | None], None] = lambda _number, _count: None
    """Called before each micro-batch runs with its number, from 1, and how many there are once the plan is whole."""
    first_backward_at: float | None = None
    compute_s: float = 0.0
    _whole: bool = False
    _batcher: MicroBatcher | None = None
    _held: list[TokenBatch] = field(default_factory=list)
    _closed: list[tuple[TokenSequence, ...]] = field(default_factory=list)
    _stats: list[dict[str, float]] = field(default_factory=list)
    _groups: list[Group] = field(default_factory=list)

    def add(self, group: Group, planned: Planned | None = None) -> None:
        """Take the next group of the plan; `planned` says to other processes where it is in the log."""
        if self.ranks is not None and planned is not None:
            self.ranks.planned[group.group] = planned
        self._batcher = self._batcher or MicroBatcher(self.objective.token_budget)
        self._groups.append(group)
        judged = group
        if self.objective.kl_reward:
            judged, sums = lowered_rewards(
                group, coef=self.objective.kl_reward, reference=self.backend.reference_logprobs, token_budget=self.objective.token_budget
            )
            self._stats.append(sums)
        for sequence in self.objective.sequences(judged):
            full = self._batcher.add(sequence)
            if full:
                self._close(full)

    def finish(self, *, learner_version: int) -> StepOutcome:
        """Run what is left backward, divide once, and update the weights."""
        self._whole = True
        if self._batcher is not None and (rest := self._batcher.close()):
            self._close(rest)
        if not self._held:
            self.before_update()
            self.backend.steps += 1  # the learning rate's schedule goes on
            return StepOutcome(
                loss=0.0, grad_norm=0.0, boundaries=(), metrics={"loss": 0.0, "grad_norm": 0.0, **self._measures(learner_version)}
            )
        if self.ranks is not None:
            self._stats = self.ranks.finish(self.backend, self._stats, batches=len(self._closed))
        tokens, masks = sum(batch.tokens for batch in self._held), [batch.completion_mask for batch in self._held]
        denominator = denominator_of(
            masks, self._groups, aggregate=self.objective.aggregate, counts_untrained=self.objective.counts_untrained
        )
        if not self.backend.divides_late:
            for batch in self._held:
                self._backward(batch, denominator=denominator)
        self.before_update()
        started = time.monotonic()
        result = self.backend.step(denominator=denominator)
        self.compute_s += time.monotonic() - started
        counts = {"tokens": float(tokens), "denominator": denominator}  # the step's own, whatever a user's loss reports
        summary = losses.summarise(losses.add_stats(self._stats) | counts)
        loss = summary.pop("loss")
        metrics = {
            "loss": loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            **_utilisation(result.measures, seconds=self.compute_s),
            **summary,
            **self._measures(learner_version),
        }
        return StepOutcome(loss=loss, grad_norm=result.grad_norm, boundaries=boundaries(self._closed), metrics=metrics)

    def _close(self, sequences: tuple[TokenSequence, ...]) -> None:
        batch = pack(sequences)
        self._closed.append(sequences)
        self._held.append(batch)
        given_away = self.ranks is not None and self.ranks.gives_away(len(self._closed) - 1, sequences)
        if self.backend.divides_late and not given_away:
            self._backward(batch, denominator=None)

    def _backward(self, batch: TokenBatch, *, denominator: float | None) -> None:
        self.on_batch(len(self._stats) + 1, len(self._closed) if self._whole else None)
        started = time.monotonic()
        if self.first_backward_at is None:
            self.first_backward_at = time.time()
        self._stats.append(self.objective.backward(self.backend, batch, denominator=denominator))
        self.compute_s += time.monotonic() - started

    def _measures(self, learner_version: int) -> dict[str, float]:
        rollouts = [sample.rollout for group in self._groups for sample in group.samples]
        real_tokens = float(sum(batch.attention_mask.sum() for batch in self._held))
        return {
            **group_measures(self._groups),
            "trained_samples": float(sum(len(batch) for batch in self._closed)),
            **self._lags(learner_version),
            "micro_batches": float(len(self._closed)),
            "real_tokens": real_tokens,
            **({"train_tokens_per_s": real_tokens / self.compute_s} if self.compute_s else {}),
            "padded_tokens": float(sum(batch.attention_mask.size for batch in self._held)),
            "computed_tokens": sum(one.get("computed_tokens", 0.0) for one in self._stats),
            "compute_s": self.compute_s,
            **({"first_backward_at": self.first_backward_at} if self.first_backward_at is not None else {}),
            "first_sample_at": min(rollout.started_ns for rollout in rollouts) / 1e9,
            "last_sample_at": max(rollout.ended_ns for rollout in rollouts) / 1e9,
        }

    def _lags(self, learner_version: int) -> dict[str, float]:
        """How old what was trained is: each group by its oldest token, as freshness counts, and each trained token by its own.

        In versions, and for the groups also in the optimizer steps (`lag_steps_mean`, …) that the learner has taken since that version.
        """
        oldest = [version_min([sample.rollout for sample in group.samples]) or 0 for group in self._groups]
        groups = [learner_version - version for version in oldest]
        in_steps = lag_summary([self.number - self.objective.steps_per_version * version for version in oldest])
        by_group = lag_summary(groups) | {name.replace("lag", "lag_steps"): value for name, value in in_steps.items()}
        taken = {(one.group, one.sample) for batch in self._closed for one in batch}
        rollouts = [sample.rollout for group in self._groups for sample in group.samples]
        trained = [rollout for rollout in rollouts if (rollout.group, rollout.sample) in taken]
        if not trained:
            return by_group
        tokens = learner_version - np.concatenate([rollout.token_versions[rollout.loss_mask] for rollout in trained])
        return {
            **by_group,
            **{f"token_{name}": value for name, value in lag_summary(tokens).items()},
            **{f"tokens_at_lag_{lag}": share for lag, share in fractions_by_lag(tokens).items()},
            "spans_mean": float(np.mean([len(rollout.span_versions) for rollout in trained])),
        }


def _utilisation(measures: dict[str, float], *, seconds: float) -> dict[str, float]:
    """A backend's measures, with its operations a second in the place of its operations, and the share that they are of the most (MFU)."""
    kept = {name: value for name, value in measures.items() if name not in ("model_flops", "peak_flops")}
    rate = measures.get("model_flops", 0.0) / seconds if seconds else 0.0
    peak = measures.get("peak_flops")
    return kept | ({"model_tflops_per_s": rate / 1e12} if rate else {}) | ({"mfu": rate / peak} if rate and peak else {})


def double_bits(value: float) -> int:
    """The 64 bits of a double as a signed integer, so that two values are compared exactly.

    Example:
        double_bits(1.0)  # -> 4607182418800017408
    """
    return int(struct.unpack("<q", struct.pack("<d", value))[0])
