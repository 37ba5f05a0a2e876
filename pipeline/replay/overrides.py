"""Lists the configuration keys that each kind of replay may change (retraining, resampling, re-scoring), and applies `--set` overrides."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.pipeline.config.load import Config, ConfigError, from_table, override, to_json

ALLOWED = {
    "algorithm": None,
    "trainer": {
        "backend", "zero_stage", "deepspeed_config", "offload", "device", "dtype", "threads", "lr", "betas", "weight_decay", "lr_schedule",
        "warmup_steps", "max_grad_norm", "micro_batch_tokens", "micro_batch_by", "gradient_checkpointing", "offload_activations",
        "compile", "share_prompts",
    },
    "schedule": {"prompts_per_step", "order"},
}  # fmt: skip
"""Section -> keys that a what-if may change; None for all."""
SELECTING = frozenset({"algorithm.filter_zero_variance", "schedule.prompts_per_step", "schedule.order"})
"""Keys that change which groups a step is trained on."""
RESAMPLED = ("rollout", "sampling", "run.seed", "model.path")
"""Sections and keys that `penstock replay rollout` may change, because they affect generation."""
RESCORED = ("reward", "algorithm.truncated", "algorithm.truncated_penalty", "algorithm.filter_zero_variance")
"""Section and keys that `penstock replay score` may change, because they affect a group's reward."""
BY_THE_SCORER = "penstock replay score"
REASONS = {
    "rollout": "samples are recorded",
    "sampling": "samples are recorded; see `penstock replay rollout`",
    "data": "prompts are recorded",
    "reward": f"rewards are recorded; see `{BY_THE_SCORER}`",
    "scorer": f"rewards are recorded; see `{BY_THE_SCORER}`",
    "schedule": "samples were generated under the recorded schedule",
    "run": "its steps are recorded; --from-step and --to-step select steps",
    "model": "the initial weights are recorded; --model DIR sets the architecture's directory",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Settings under which the recorded groups of a run are trained again."""

    config: Config
    changed: Mapping[str, tuple[Any, Any]]
    """Configuration key -> (recorded value, new value); `without` -> ([], excluded groups). Empty for an exact replay."""
    without: frozenset[int] = frozenset()

    @property
    def selects(self) -> bool:
        """True if steps have to be planned again because a changed key affects which groups a step contains."""
        return bool(SELECTING & self.changed.keys())

    def __str__(self) -> str:
        return ", ".join(f"{key} {before} -> {after}" for key, (before, after) in self.changed.items())


def differences(config: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """Return `section.key` -> (value in `config`, value in `other`) for every key whose values differ."""
    before, after = json.loads(to_json(config)), json.loads(to_json(other))
    return {
        f"{section}.{key}": (before[section][key], value)
        for section, table in after.items()
        for key, value in table.items()
        if before[section][key] != value
    }


def replayable(key: str) -> bool:
    """True if this key can be changed from any step on without changing the recorded groups of a step or their rewards."""
    section, _, name = key.partition(".")
    names = ALLOWED.get(section, set())
    return (names is None or name in names) and key not in SELECTING and not key.startswith("algorithm.truncated")


def what_if(config: Config, overrides: Sequence[str], *, without: Collection[int] = ()) -> WhatIf:
    """Apply `section.key=value` overrides for retraining, and exclude the groups in `without`.

    Raises `ConfigError` for a key that retraining cannot change.

    Example:
        what_if(config, ["algorithm.loss=gspo"]).changed  # -> {"algorithm.loss": ("grpo", "gspo")}
    """
    for text in overrides:
        section, _, key = text.partition("=")[0].strip().partition(".")
        allowed = ALLOWED.get(section, set())
        if allowed is not None and key not in allowed and (section in REASONS or section in ALLOWED):
            keys = "algorithm.*, " + ", ".join(
                f"{name}.{allowed_key}" for name, names in ALLOWED.items() for allowed_key in sorted(names or ())
            )
            reason = REASONS.get(section, "it does not affect training")
            raise ConfigError(f"--set {text}: a replay cannot change {section}.{key}: {reason}. Allowed keys: {keys}")
    after = override(config, overrides)
    changed = differences(config, after)
    for key, (before, now) in changed.items():
        if key == "algorithm.truncated_penalty" or (key == "algorithm.truncated" and "penalise" in (before, now)):
            raise ConfigError(
                f"--set {key}={now}: the recorded rewards were computed with {key}={before}; score the samples again: {BY_THE_SCORER}"
            )
    left_out: dict[str, tuple[Any, Any]] = {"without": ([], sorted(without))} if without else {}
    return WhatIf(config=after, changed={**changed, **left_out}, without=frozenset(without))


def resampled(config: Config, overrides: Sequence[str]) -> Config:
    """Apply overrides for resampling to a run's configuration. Raises `ConfigError` for a key that does not affect generation."""
    for text, key in _others(overrides, than=RESAMPLED):
        raise ConfigError(f"--set {text}: {key} does not affect generation; keys that do: {', '.join(RESAMPLED)}")
    return override(config, overrides) if overrides else config


def rescored(config: Config, *, functions: Sequence[str] = (), weights: Sequence[float] = (), overrides: Sequence[str] = ()) -> Config:
    """Return the configuration with another reward; recorded weights remain if their number fits. Raises `ConfigError`."""
    for text, key in _others(overrides, than=RESCORED):
        raise ConfigError(f"--set {text}: {key} does not affect a reward; keys that do: reward.*, {', '.join(RESCORED[1:])}")
    table = json.loads(to_json(config))
    if functions:
        recorded = table["reward"]["weights"]
        table["reward"]["weights"] = list(weights) or (recorded if recorded and len(recorded) == len(functions) else None)
        table["reward"]["functions"] = list(functions)
    elif weights:
        table["reward"]["weights"] = list(weights)
    return override(from_table(table), [f"reward.functions={json.dumps(table['reward']['functions'])}", *overrides])


def _others(overrides: Sequence[str], *, than: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (override, key) for every override whose key and section are not listed in `than`."""
    for text in overrides:
        key = text.partition("=")[0].strip()
        if key not in than and key.partition(".")[0] not in than:
            yield text, key
