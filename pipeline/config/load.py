"""The run's configuration: TOML plus dotted overrides, checked as a whole before anything starts.

The rule: a mistake is one line with the key, the value and, for an unknown key, the nearest valid one (`ConfigError`, exit status 2).
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

from pydantic import ValidationError, model_validator

from penstock.infra.engines.base import EngineKind
from penstock.infra.engines.registry import ENGINES
from penstock.pipeline.algorithms.registry import LOSSES, Loss
from penstock.pipeline.config import algorithm_defaults
from penstock.pipeline.config.plugins import nearest
from penstock.pipeline.config.schema import (
    PATHS_OF,
    AlgorithmSection,
    DataSection,
    EvalSection,
    KafkaSection,
    MlflowSection,
    ModelSection,
    Resolve,
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
from penstock.pipeline.config.validate import first_mistake
from penstock.pipeline.scheduling.schedule import Schedule, preset


class ConfigError(ValueError):
    """A person's mistake in the configuration, in one line."""


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
        if mistake := first_mistake(self):
            raise ValueError(mistake)
        return self

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
    def proximal(self) -> str:
        """Which logprobs the ratio is taken against: behaviour, snapshot or current."""
        return algorithm_defaults.proximal_of(self.algorithm, self.rules)

    @property
    def correction(self) -> str:
        """What bounds the weight proximal / behaviour; "none" where nothing weighs it."""
        return algorithm_defaults.correction_of(self.algorithm, self.rules)

    @property
    def _loss(self) -> Loss:
        return LOSSES.get(self.algorithm.loss, LOSSES["grpo"])

    @property
    def slots(self) -> int:
        """Unfinished groups that a rollout worker wants in hand.

        Where the engine draws samples side by side, twice what fills its rows, as stragglers hold some of them.
        """
        filling = -(-self.rollout.concurrency // self.rules.samples_begun)
        return self.rollout.slots or (2 * filling + 2 if self.engine.draws_side_by_side else 3)

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
        return f"{key}: {first['ctx']['error']}" if key else str(first["ctx"]["error"])
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
    for name, section in Config.model_fields.items():
        values = table.get(name)
        if isinstance(values, dict):
            for key, resolve in PATHS_OF[cast(type[Section], section.annotation)].items():
                if key in values:
                    values[key] = _resolved(values[key], resolve, base)


def _resolved(value: Any, resolve: Resolve, base: Path) -> Any:
    """A text resolved, a list item by item; anything else is left to be refused with the rest."""
    if isinstance(value, list):
        return [_resolved(item, resolve, base) for item in value]
    return resolve.function(value, base) if isinstance(value, str) else value
