"""A whole run's configuration as one object, with the numbers that follow from it."""

import re
from pathlib import Path

from penstock.infra.engines.base import EngineKind
from penstock.infra.engines.registry import ENGINES
from penstock.pipeline.algorithms.registry import LOSSES, Loss
from penstock.pipeline.config import algorithm_defaults
from penstock.pipeline.config.fields import Section
from penstock.pipeline.config.hub import local_model
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
    WeightsSection,
)
from penstock.pipeline.config.services import KafkaSection, LaunchSection, MlflowSection, TensorboardSection, WandbSection
from penstock.pipeline.scheduling.schedule import Schedule, preset
from penstock.topics.catalogue import DELETED_SEGMENT_BYTES, KEPT_SEGMENT_BYTES
from penstock.topics.weights import FIRST


def source_name(source: str) -> str:
    """What a data source is called among measurements.

    Example:
        source_name("hf:openai/gsm8k")  # -> "gsm8k"
    """
    return re.sub(r"[^\w.-]", "_", re.split(r"[/:]", source.removesuffix(".jsonl").removesuffix(".parquet"))[-1])


class Config(Section):
    """A whole run. Every derived number is a property, so that the log holds only what a person chose."""

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
        """Where the model is on this machine; one of the hub is fetched if it is not in the cache. Raises `BackendError`."""
        return local_model(self.model.path)

    @property
    def engine(self) -> EngineKind:
        """The rollout engine's capabilities, and how to open it."""
        return ENGINES[self.rollout.engine]

    @property
    def advantage(self) -> str:
        """Name of the advantage: the configured one, else the one of the loss."""
        return self.algorithm.advantage or self._loss.advantage

    @property
    def aggregate(self) -> str:
        """How token losses become one number: token_mean, sequence_mean or constant."""
        return self.algorithm.aggregate or self._loss.aggregate

    @property
    def clip_low(self) -> float:
        """Lower clip range of the importance ratio."""
        return self.algorithm.clip_low if self.algorithm.clip_low is not None else self._loss.clip_low

    @property
    def clip_high(self) -> float:
        """Upper clip range of the importance ratio."""
        return self.algorithm.clip_high if self.algorithm.clip_high is not None else self._loss.clip_high

    @property
    def clip_dual(self) -> float | None:
        """Bound of the importance ratio where the advantage is negative; None without one."""
        if self.algorithm.clip_dual is not None:
            return self.algorithm.clip_dual or None
        return self._loss.clip_dual if self.algorithm.defaults > 1 else None

    @property
    def kl_weighted(self) -> bool:
        """Whether the KL to the reference is weighed by current / behaviour."""
        return self.algorithm.defaults > 1 if self.algorithm.kl_weighted is None else self.algorithm.kl_weighted

    @property
    def proximal(self) -> str:
        """Which logprobs the ratio is taken against: behaviour, snapshot or current."""
        return algorithm_defaults.proximal_of(self.algorithm, self.rules, rounded=self.rounded)

    @property
    def correction(self) -> str:
        """What bounds the weight proximal / behaviour; "none" where nothing weighs it."""
        return algorithm_defaults.correction_of(self.algorithm, self.rules, rounded=self.rounded)

    @property
    def rounded(self) -> bool:
        """Whether engine or trainer computes in bfloat16: their logprobs of one token then differ at equal weights."""
        return "bfloat16" in (self.rollout.dtype, self.trainer.dtype)

    @property
    def counts_untrained(self) -> bool:
        """Whether samples that are not trained count in a step's denominator under `sequence_mean` and `constant`."""
        return self.algorithm.defaults > 1

    @property
    def data_sources(self) -> list[str]:
        """The sources of the training prompts."""
        source = self.data.source
        return [source] if isinstance(source, str) else source

    def sampling_for(self, source: str | None) -> SamplingSection:
        """How prompts of a source are sampled; None is the only one."""
        own = self.data.sampling.get(source or "")
        given = {} if own is None else {name: value for name, value in own.model_dump().items() if value is not None}
        return self.sampling.model_copy(update=given)

    @property
    def eval_sources(self) -> list[str]:
        """The held-out sources; none without an evaluator."""
        source = self.eval.source or []
        return [name for name in ([source] if isinstance(source, str) else source) if name]

    @property
    def evaluates_on_rollout_engine(self) -> bool:
        """Whether a rollout worker evaluates on its own engine, in place of an evaluator."""
        return bool(self.eval_sources) and self.eval.engine == "rollout"

    @property
    def evaluating_role(self) -> str:
        """The role whose measurements of held-out prompts count."""
        return "rollout" if self.evaluates_on_rollout_engine else "evaluator"

    @property
    def stops_early(self) -> bool:
        """Whether an evaluation may end the run before its last step."""
        return bool(self.eval_sources) and (self.eval.target is not None or self.eval.patience is not None)

    @property
    def colocated(self) -> bool:
        """Whether trainer and rollout worker have one device by turns."""
        return self.launch.placement == "colocated"

    @property
    def sends_adapters(self) -> bool:
        """Whether versions are published as adapters on version 0."""
        return self.weights.encoding != "merged" and self.trainer.lora_rank > 0

    @property
    def eval_reward(self) -> RewardSection:
        """The reward functions of evaluations: their own, else those of the run."""
        if self.eval.functions is None:
            return self.reward
        return self.reward.model_copy(update={"functions": self.eval.functions, "weights": self.eval.weights})

    @property
    def eval_threshold(self) -> float:
        """The reward from which a held-out completion counts as solved."""
        if self.eval.threshold is not None:
            return self.eval.threshold
        reward = self.eval_reward
        return sum(max(weight, 0.0) for weight in reward.weights or [1.0] * len(reward.functions))

    @property
    def _loss(self) -> Loss:
        return LOSSES.get(self.algorithm.loss, LOSSES["grpo"])

    @property
    def slots(self) -> int:
        """Unfinished groups that a worker that takes prompts wants in hand.

        Where the engine draws samples side by side, twice what fills its rows, as stragglers hold some of them.
        """
        if self.environment.source is not None:
            return self.rollout.slots or -(-self.environment.in_flight // self.rules.samples_begun) + 2
        filling = -(-self.rollout.concurrency // self.rules.samples_begun)
        return self.rollout.slots or (2 * filling + 2 if self.engine.continuous_batching else 3)

    @property
    def turns_by_log(self) -> bool:
        """Whether trajectories run in environment workers, which ask for turns through the log."""
        return self.environment.source is not None and self.environment.carrier == "log"

    @property
    def environment_workers(self) -> int:
        """Environment workers that `penstock run` starts."""
        return self.launch.environments if self.turns_by_log else 0

    @property
    def max_completion_tokens(self) -> int:
        """The most tokens that the policy draws for one sample."""
        return self.sampling.max_new_tokens * (self.environment.max_turns if self.environment.source is not None else 1)

    @property
    def groups_per_process(self) -> int | None:
        """The most groups in a micro-batch where several processes train: each has one at least, if the step has; None with one process."""
        processes = self.trainer.processes
        return -(-self.schedule.prompts_per_step // processes) if processes > 1 else None

    @property
    def partitions(self) -> int:
        """Partitions of prompts, rollouts and groups: fixed for the run, so 4 x the most workers expected."""
        return self.kafka.partitions or max(8, 4 * max(self.rollout.workers, self.scorer.workers, self.environment_workers))

    @property
    def pools(self) -> tuple[str, ...]:
        """The pool of each rollout worker that `penstock run` starts; empty without pools."""
        return tuple(name for name, pool in self.rollout.pools.items() for _ in range(pool.workers))

    @property
    def pools_by_partition(self) -> tuple[tuple[str, ...], ...]:
        """For each partition the pool whose prompts it has, and that one's fallbacks; empty without pools.

        A pool has a share of the partitions as it has of the workers.
        """
        names, count = self.pools, self.partitions
        homes = [names[number * len(names) // count] for number in range(count)] if names else []
        return tuple((home, *self.rollout.pools[home].fallback) for home in homes)

    @property
    def weight_partitions(self) -> int:
        """Partitions of `weights`: those of the manifests and of version 0, and those of all other chunks."""
        return FIRST + self.weights.partitions

    @property
    def weight_segment_bytes(self) -> int:
        """Bytes of a segment of `weights`: short ones where old versions are deleted, else such that few files are open."""
        return DELETED_SEGMENT_BYTES if self.weights.keep == "chain" else KEPT_SEGMENT_BYTES

    @property
    def sample_segment_bytes(self) -> int | None:
        """Bytes of a segment of the topics that samples flow through: short ones where old records are deleted, else the broker's own."""
        return None if self.kafka.keep_steps is None else DELETED_SEGMENT_BYTES

    @property
    def rules(self) -> Schedule:
        """The schedule as the frozen object that every worker applies."""
        chosen = self.schedule
        return preset(
            chosen.mode,
            prompts_per_step=chosen.prompts_per_step,
            samples_per_prompt=chosen.samples_per_prompt,
            steps_per_version=chosen.steps_per_version,
            max_lag=chosen.max_lag,
            order=chosen.order,
            stale_in_hand=chosen.stale_in_hand,
            oversample=chosen.oversample,
            max_drops_per_step=chosen.max_drops_per_step,
        )

    def steps(self, rows: int) -> int:
        """Optimizer steps of the run over a data set of `rows` rows; an incomplete last step is not taken."""
        if self.run.steps is not None:
            return self.run.steps
        assert self.run.epochs is not None
        return max(1, int(self.run.epochs * rows) // self.schedule.prompts_per_step)

    def prompts(self, rows: int) -> int | None:
        """Prompts that are asked of a data set of `rows` rows, without those asked once more; None where the steps decide."""
        return None if self.run.epochs is None else max(int(self.run.epochs * rows), self.schedule.prompts_per_step)
