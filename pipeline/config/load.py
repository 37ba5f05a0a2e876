"""The run's configuration: TOML plus dotted overrides, checked as a whole before anything starts.

The rule: a mistake is one line with the key, the value and, for an unknown key, the nearest valid one (`ConfigError`, exit status 2).
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from penstock.pipeline.config import algorithm_defaults
from penstock.pipeline.config.algorithm_defaults import LOSSES
from penstock.pipeline.config.plugins import nearest
from penstock.pipeline.config.schema import (
    AlgorithmSection,
    DataSection,
    EvalSection,
    KafkaSection,
    MlflowSection,
    ModelSection,
    RewardSection,
    RolloutSection,
    RunSection,
    SamplingSection,
    ScheduleSection,
    ScorerSection,
    Section,
    TrainerSection,
    WeightsSection,
)
from penstock.pipeline.scheduling.schedule import MODES, Schedule, preset


class ConfigError(ValueError):
    """A person's mistake in the configuration, in one line."""


LEAST_OF_VLLM = 0.01
"""The lowest temperature vLLM draws at; it raises lower ones without a word, and their logprobs would be another distribution's."""


class Config(Section):
    """A whole run. Every derived number is a property, so that the log holds only what a person chose."""

    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection
    reward: RewardSection = RewardSection()
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

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        schedule = self.schedule
        if (self.run.steps is None) == (self.run.epochs is None):
            raise ValueError("run.steps: give either run.steps or run.epochs")
        if schedule.mode not in MODES:
            raise ValueError(f"schedule.mode: {schedule.mode!r} is none of {', '.join(MODES)}{nearest(schedule.mode, MODES)}")
        if schedule.max_lag is not None and MODES[schedule.mode].max_lag == 0 and schedule.max_lag != 0:
            others = "one_step_off, in_flight or bounded"
            raise ValueError(f"schedule.max_lag: {schedule.max_lag} does not go with mode {schedule.mode!r}, which is 0; use {others}")
        if MODES[schedule.mode].loads_at == "step" and self.rollout.engine == "transformers":
            raise ValueError(f"schedule.mode: {schedule.mode!r} changes weights between decode steps; set rollout.engine = 'vllm'")
        if self.rules.stale_in_hand != "finish" and self.rules.loads_at != "step":
            raise ValueError(
                f"schedule.stale_in_hand: {self.rules.stale_in_hand!r} needs weights that change between decode steps; use mode 'bounded'"
            )
        for key, value in (("sampling", self.sampling.temperature), ("eval", self.eval.temperature)):
            if self.rollout.engine == "vllm" and value < LEAST_OF_VLLM:
                raise ValueError(f"{key}.temperature: {value} would be raised to {LEAST_OF_VLLM} by vLLM; set that, or 'transformers'")
        if self.sampling.top_p != 1.0 or self.sampling.top_k != 0:
            key, value = ("top_p", self.sampling.top_p) if self.sampling.top_p != 1.0 else ("top_k", self.sampling.top_k)
            raise ValueError(
                f"sampling.{key}: {value} cuts the distribution, so the importance ratio would be wrong; leave it out (1.0 / 0)"
            )
        algorithm_defaults.check(self.algorithm, self.rules)
        if schedule.samples_per_prompt == 1:
            raise ValueError("schedule.samples_per_prompt: 1 leaves every group advantage at zero; use at least 2")
        if self.reward.weights is not None and len(self.reward.weights) != len(self.reward.functions):
            raise ValueError(f"reward.weights: {len(self.reward.weights)} weights for {len(self.reward.functions)} reward.functions")
        if (self.trainer.initial_state is None) != (self.trainer.initial_steps == 0):
            raise ValueError(
                "trainer.initial_state: goes with trainer.initial_steps, the optimizer steps behind it; `penstock fork` sets both"
            )
        partitions, needed = self.partitions, max(self.rollout.workers, self.scorer.workers)
        if partitions < needed:
            raise ValueError(f"kafka.partitions: {partitions} is less than the {needed} workers of one role; each needs one at least")
        if self.trainer.backend == "deepspeed" and self.trainer.zero_stage < 2 and self.trainer.dtype == "bfloat16":
            stage = self.trainer.zero_stage
            raise ValueError(f"trainer.zero_stage: {stage} with dtype 'bfloat16' keeps no float32 gradient sums in DeepSpeed; use stage 2")
        if (self.eval.target is not None or self.eval.patience is not None) and self.eval.source is None:
            raise ValueError("eval.source: early stopping (eval.target, eval.patience) needs held-out prompts")
        return self

    @property
    def advantage(self) -> str:
        """Name of the advantage: the configured one, else the one of the loss."""
        return self.algorithm.advantage or str(self._preset["advantage"])

    @property
    def aggregate(self) -> str:
        """How token losses become one number: token_mean, sequence_mean or constant."""
        return self.algorithm.aggregate or str(self._preset["aggregate"])

    @property
    def clip_low(self) -> float:
        """Lower clip range of the importance ratio."""
        return self.algorithm.clip_low if self.algorithm.clip_low is not None else float(self._preset["clip_low"])

    @property
    def clip_high(self) -> float:
        """Upper clip range of the importance ratio."""
        return self.algorithm.clip_high if self.algorithm.clip_high is not None else float(self._preset["clip_high"])

    @property
    def proximal(self) -> str:
        """Which logprobs the ratio is taken against: behaviour, snapshot or current."""
        return algorithm_defaults.proximal_of(self.algorithm, self.rules)

    @property
    def correction(self) -> str:
        """What bounds the weight proximal / behaviour; "none" where nothing weighs it."""
        return algorithm_defaults.correction_of(self.algorithm, self.rules)

    @property
    def _preset(self) -> Mapping[str, Any]:
        return LOSSES.get(self.algorithm.loss, LOSSES["grpo"])

    @property
    def slots(self) -> int:
        """Unfinished groups that a rollout worker wants in hand; with vLLM twice what fills its rows: stragglers hold some of them."""
        filling = -(-self.rollout.concurrency // self.rules.samples_begun)
        return self.rollout.slots or (2 * filling + 2 if self.rollout.engine == "vllm" else 3)

    @property
    def partitions(self) -> int:
        """Partitions of prompts, rollouts and groups: fixed for the run, so 4 x the most workers expected."""
        return self.kafka.partitions or max(8, 4 * max(self.rollout.workers, self.scorer.workers))

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


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and apply `a.b=c` overrides; relative paths are relative to the file (overrides: to the working directory).

    Raises:
        ConfigError: one line naming key, value and the nearest valid key.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {file}: {getattr(error, 'strerror', None) or error}") from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from error
    _make_absolute(table, file.resolve().parent)
    for override in overrides:
        _apply(table, override)
    return from_table(table)


def override(config: Config, overrides: Sequence[str]) -> Config:
    """The configuration with `a.b=c` overrides; relative paths are relative to the working directory. Raises `ConfigError`."""
    table = json.loads(to_json(config))
    for text in overrides:
        _apply(table, text)
    return from_table(table)


def from_json(text: str) -> Config:
    """The configuration as the log holds it."""
    return from_table(json.loads(text))


def from_table(table: Mapping[str, Any]) -> Config:
    """Check a plain table of sections. Raises `ConfigError`."""
    try:
        # JSON has no tuples and TOML writes 1 for 1.0: strict validation of JSON accepts both, and still refuses "3" for 3.
        return Config.model_validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        raise ConfigError(_one_line(error)) from error


def to_json(config: Config) -> str:
    """The configuration for the log, with every default written out."""
    return config.model_dump_json()


def _one_line(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    location = [str(part) for part in first["loc"] if not str(part).startswith(("tuple[", "list["))]
    key, value, kind = ".".join(location), first.get("input"), first["type"]
    if kind == "extra_forbidden":
        section: Any = Config
        for part in location[:-1]:
            section = section.model_fields[part].annotation or Config
        names = [".".join([*location[:-1], name]) for name in section.model_fields]
        everywhere = [f"{top}.{name}" for top, field in Config.model_fields.items() for name in _fields(field.annotation)]
        same_name = [name for name in everywhere if name.split(".")[-1] == location[-1]]
        hint = f"; did you mean {same_name[0]!r}?" if same_name else nearest(key, names) or "; see docs/configuration.md"
        return f"{key} = {value!r}: unknown key{hint}"
    if kind == "missing":
        return f"{key}: is required"
    if kind == "value_error":
        return str(first["ctx"]["error"])
    return f"{key} = {value!r}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _fields(section: Any) -> list[str]:
    return list(section.model_fields)


def _apply(table: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f"--set {override}: expected section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    at = table
    for part in parts[:-1]:
        inner = at.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override}: {part} is no section")
        at = inner
    at[parts[-1]] = value
    _make_absolute(table, Path.cwd())


def _make_absolute(table: dict[str, Any], base: Path) -> None:
    """Turn relative paths into absolute ones, so that the configuration means the same to every worker."""

    def absolute(text: str) -> str:
        return str((base / Path(text).expanduser()).resolve())

    def source(text: str) -> str:
        scheme, colon, rest = text.partition(":")
        if scheme == "hf" and colon and rest.startswith((".", "~")):
            return f"hf:{absolute(rest)}"
        if scheme.endswith(".py") and colon:
            return f"{absolute(scheme)}:{rest}"
        return absolute(text) if not colon and ("/" in text or text.endswith((".jsonl", ".parquet"))) else text

    for section, keys in (("data", ("source",)), ("eval", ("source",)), ("algorithm", ("loss", "advantage"))):
        for key in keys:
            value = table.get(section, {}).get(key) if isinstance(table.get(section), dict) else None
            if isinstance(value, str):
                table[section][key] = source(value)
    reward = table.get("reward")
    if isinstance(reward, dict) and isinstance(reward.get("functions"), list):
        reward["functions"] = [source(item) if isinstance(item, str) else item for item in reward["functions"]]
    paths = (("model", "path"), ("trainer", "checkpoint_dir"), ("trainer", "initial_state"), ("algorithm", "reference"))
    for section, key in paths:
        if isinstance(table.get(section), dict) and isinstance(table[section].get(key), str):
            table[section][key] = absolute(table[section][key])
    data = table.get("data")
    if isinstance(data, dict) and isinstance(data.get("chat_template"), str) and data["chat_template"] not in ("auto", "on", "off"):
        data["chat_template"] = absolute(data["chat_template"])
