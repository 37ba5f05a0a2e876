"""The configuration of a run as one object, with derived values.

Absent keys of `[algorithm]` depend on the schedule and the number formats. A run uses the edition of the defaults it was created with
(`algorithm.defaults`), so that the meaning of its record never changes.
"""

import re
from pathlib import Path

from penstock.infra.engines.base import EngineKind
from penstock.infra.engines.registry import ENGINES
from penstock.pipeline.algorithms.registry import LOSSES, Loss
from penstock.pipeline.config.fields import Section, local_model
from penstock.pipeline.config.schema import (
    AlgorithmSection,
    DataSection,
    EnvironmentSection,
    EvalSection,
    ModelSection,
    RewardSection,
    RolloutSection,
    RunSection,
    SamplingSection,
    ScheduleSection,
    ScorerSection,
    TrainerSection,
)
from penstock.pipeline.config.services import KafkaSection, LaunchSection, MlflowSection, TensorboardSection, WandbSection, WeightsSection
from penstock.pipeline.scheduling.rules import Schedule, preset
from penstock.topics.catalogue import DELETED_SEGMENT_BYTES, KEPT_SEGMENT_BYTES
from penstock.topics.weights import FIRST


def source_name(source: str) -> str:
    """The name of a data source in metrics: `gsm8k` for `hf:openai/gsm8k`."""
    return re.sub(r"[^\w.-]", "_", re.split(r"[/:]", source.removesuffix(".jsonl").removesuffix(".parquet"))[-1])


class Config(Section):
    """The configuration of a run. Derived values are properties, so that the record contains only the settings."""

    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection
    reward: RewardSection = RewardSection()
    environment: EnvironmentSection = EnvironmentSection()
    schedule: ScheduleSection = ScheduleSection()
    sampling: SamplingSection = SamplingSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    rollout: RolloutSection = RolloutSection()
    scorer: ScorerSection = ScorerSection()
    trainer: TrainerSection = TrainerSection()
    eval: EvalSection = EvalSection()
    weights: WeightsSection = WeightsSection()
    kafka: KafkaSection = KafkaSection()
    mlflow: MlflowSection = MlflowSection()
    launch: LaunchSection = LaunchSection()
    tensorboard: TensorboardSection = TensorboardSection()
    wandb: WandbSection = WandbSection()

    @property
    def model_directory(self) -> Path:
        """Directory of the model; one on the hub is downloaded if the cache lacks it. Raises `BackendError`."""
        return local_model(self.model.path)

    @property
    def engine(self) -> EngineKind:
        return ENGINES[self.rollout.engine]

    @property
    def advantage(self) -> str:
        return self.algorithm.advantage or self._loss.advantage

    @property
    def aggregate(self) -> str:
        """Aggregation of token losses: token_mean, sequence_mean or constant."""
        return self.algorithm.aggregate or self._loss.aggregate

    @property
    def clip_low(self) -> float:
        return self.algorithm.clip_low if self.algorithm.clip_low is not None else self._loss.clip_low

    @property
    def clip_high(self) -> float:
        return self.algorithm.clip_high if self.algorithm.clip_high is not None else self._loss.clip_high

    @property
    def clip_dual(self) -> float | None:
        """Upper bound of the importance ratio for negative advantages; None for no bound."""
        if self.algorithm.clip_dual is not None:
            return self.algorithm.clip_dual or None
        return self._loss.clip_dual if self.algorithm.defaults > 1 else None

    @property
    def kl_weighted(self) -> bool:
        """True if the KL to the reference model is weighted by the ratio current / behaviour."""
        return self.algorithm.defaults > 1 if self.algorithm.kl_weighted is None else self.algorithm.kl_weighted

    @property
    def proximal(self) -> str:
        """Proximal policy, the denominator of the ratio (behaviour, snapshot, current): that configured, or one that suits the rest.

        `current` (at S > 1 `snapshot`) with a correction, which weights its difference from the behaviour policy, and for GSPO, whose clip
        range is narrower than the engine's rounding errors. CISPO's ratio is such a weight itself, so it uses the behaviour policy.
        """
        algorithm, rules = self.algorithm, self.rules
        if algorithm.proximal is not None:
            return algorithm.proximal
        if algorithm.defaults == 1:
            return self._proximal_1
        apart = "current" if rules.steps_per_version == 1 else "snapshot"
        differs = rules.max_lag > 0 or self.rounded
        if algorithm.loss == "cispo" and algorithm.correction in (None, "none"):
            return "behaviour"
        if algorithm.correction != "none" and (differs or algorithm.correction is not None):
            return apart
        return apart if algorithm.loss == "gspo" or (rules.max_lag == 0 and apart == "current") else "behaviour"

    @property
    def _proximal_1(self) -> str:
        """The proximal policy in version 1 of the defaults: the behaviour policy, also with a lag."""
        algorithm, lag = self.algorithm, self.rules.max_lag
        corrected = algorithm.correction not in (None, "none") or (algorithm.loss == "gspo" and lag > 0)
        if self.schedule.steps_per_version == 1:
            return "current" if corrected or lag == 0 else "behaviour"
        return "snapshot" if corrected else "behaviour"

    @property
    def correction(self) -> str:
        """Correction that bounds the importance weight proximal / behaviour: that configured, or truncation if no ratio corrects for it."""
        algorithm = self.algorithm
        if algorithm.correction is not None:
            return algorithm.correction
        differs = self.rules.max_lag > 0 or (self.rounded and algorithm.defaults > 1)
        if not differs or self.proximal == "behaviour":
            return "none"
        if algorithm.loss == "gspo":
            return "sequence_tis" if algorithm.defaults == 1 else "geometric_tis"
        return "tis"

    @property
    def rounded(self) -> bool:
        """True if engine or trainer computes in bfloat16 or FP8, so that their logprobs differ at equal weights."""
        return "bfloat16" in (self.rollout.dtype, self.trainer.dtype) or "quantization" in self.rollout.vllm

    @property
    def counts_untrained(self) -> bool:
        """True if untrained samples count in a step's denominator under `sequence_mean` and `constant`."""
        return self.algorithm.defaults > 1

    @property
    def data_sources(self) -> list[str]:
        source = self.data.source
        return [source] if isinstance(source, str) else source

    def sampling_for(self, source: str | None) -> SamplingSection:
        """Sampling settings for prompts of a source; `source` is None if there is only one."""
        own = self.data.sampling.get(source or "")
        settings = {} if own is None else {name: value for name, value in own.model_dump().items() if value is not None}
        return self.sampling.model_copy(update=settings)

    @property
    def eval_sources(self) -> list[str]:
        """Sources of held-out prompts; empty if there is no evaluation."""
        source = self.eval.source or []
        return [name for name in ([source] if isinstance(source, str) else source) if name]

    @property
    def evaluates_on_rollout_engine(self) -> bool:
        """True if a rollout worker evaluates on its engine, so that there is no evaluator."""
        return bool(self.eval_sources) and self.eval.engine == "rollout"

    @property
    def evaluating_role(self) -> str:
        return "rollout" if self.evaluates_on_rollout_engine else "evaluator"

    @property
    def stops_early(self) -> bool:
        """True if an evaluation may end the run before its last step."""
        return bool(self.eval_sources) and (self.eval.target is not None or self.eval.patience is not None)

    @property
    def colocated(self) -> bool:
        return self.launch.placement == "colocated"

    @property
    def sends_adapters(self) -> bool:
        """True if versions are published as adapters of version 0."""
        return self.weights.encoding != "merged" and self.trainer.lora_rank > 0

    @property
    def eval_reward(self) -> RewardSection:
        """Reward functions of evaluations, by default those of training."""
        if self.eval.functions is None:
            return self.reward
        return self.reward.model_copy(update={"functions": self.eval.functions, "weights": self.eval.weights})

    @property
    def eval_threshold(self) -> float:
        """Smallest reward at which a held-out completion counts as solved."""
        if self.eval.threshold is not None:
            return self.eval.threshold
        reward = self.eval_reward
        return sum(max(weight, 0.0) for weight in reward.weights or [1.0] * len(reward.functions))

    @property
    def _loss(self) -> Loss:
        return LOSSES.get(self.algorithm.loss, LOSSES["grpo"])

    @property
    def slots(self) -> int:
        """Largest number of groups in flight per worker.

        With continuous batching, twice the number that fills the engine, because stragglers occupy some of its rows.
        """
        if self.environment.source is not None:
            return self.rollout.slots or -(-self.environment.in_flight // self.rules.samples_begun) + 2
        groups = -(-self.rollout.concurrency // self.rules.samples_begun)
        return self.rollout.slots or (2 * groups + 2 if self.engine.continuous_batching else 3)

    @property
    def turns_by_log(self) -> bool:
        """True if trajectories run in environment workers, which request turns through the log."""
        return self.environment.source is not None and self.environment.carrier == "log"

    @property
    def environment_workers(self) -> int:
        """Number of environment workers that `penstock run` starts."""
        return self.launch.environments if self.turns_by_log else 0

    @property
    def max_completion_tokens(self) -> int:
        """Largest number of tokens that the policy generates for one sample."""
        return self.sampling.max_new_tokens * (self.environment.max_turns if self.environment.source is not None else 1)

    @property
    def groups_per_process(self) -> int | None:
        """Largest number of groups in a micro-batch, so that each trainer process gets one; None for a single process."""
        processes = self.trainer.processes
        return -(-self.schedule.prompts_per_step // processes) if processes > 1 else None

    @property
    def partitions(self) -> int:
        """Partitions of prompts, rollouts and groups; fixed for the run, so 4 x the number of workers."""
        return self.kafka.partitions or max(8, 4 * max(self.rollout.workers, self.scorer.workers, self.environment_workers))

    @property
    def pools(self) -> tuple[str, ...]:
        """The pool of each rollout worker that `penstock run` starts; empty if there are no pools."""
        return tuple(name for name, pool in self.rollout.pools.items() for _ in range(pool.workers))

    @property
    def pools_by_partition(self) -> tuple[tuple[str, ...], ...]:
        """For each partition its pool and the pool's fallbacks; empty if there are no pools.

        Each pool has a share of the partitions proportional to its workers.
        """
        names, count = self.pools, self.partitions
        homes = [names[number * len(names) // count] for number in range(count)] if names else []
        return tuple((home, *self.rollout.pools[home].fallback) for home in homes)

    @property
    def weight_partitions(self) -> int:
        """Number of partitions of `weights`: for manifests, for version 0, for other versions, and for later snapshots of these."""
        return FIRST + self.weights.partitions + 1

    @property
    def weight_segment_bytes(self) -> int:
        """Segment size of `weights`: small if old versions are deleted, else large, so that few files are open."""
        return DELETED_SEGMENT_BYTES if self.weights.keep == "chain" else KEPT_SEGMENT_BYTES

    @property
    def sample_segment_bytes(self) -> int | None:
        """Segment size of the sample topics: small if old records are deleted; None for the broker's default."""
        return None if self.kafka.keep_steps is None else DELETED_SEGMENT_BYTES

    @property
    def rules(self) -> Schedule:
        """The schedule as a frozen object that all workers use."""
        return preset(**self.schedule.model_dump())

    def steps(self, rows: int) -> int:
        """Optimizer steps of the run over a data set of `rows` rows; an incomplete last step is dropped."""
        if self.run.steps is not None:
            return self.run.steps
        assert self.run.epochs is not None
        return max(1, int(self.run.epochs * rows) // self.schedule.prompts_per_step)

    def prompts(self, rows: int) -> int | None:
        """Number of prompts from a data set of `rows` rows, without retried ones; None if `run.steps` is set."""
        return None if self.run.epochs is None else max(int(self.run.epochs * rows), self.schedule.prompts_per_step)
