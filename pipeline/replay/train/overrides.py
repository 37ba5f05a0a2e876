"""Which keys of a configuration a what-if may change, and what follows from a change.

The rule: training can be done again with other settings, what was drawn and scored cannot; a key that would only seem to work is refused.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.pipeline.config.load import Config, ConfigError, override, to_json

ALLOWED = {
    "algorithm": None,
    "trainer": {
        "backend", "zero_stage", "deepspeed_config", "offload", "device", "dtype", "threads", "lr", "betas", "weight_decay", "lr_schedule",
        "warmup_steps", "max_grad_norm", "micro_batch_tokens", "gradient_checkpointing", "offload_activations", "share_prompts",
    },
    "schedule": {"prompts_per_step", "order"},
}  # fmt: skip
"""Section -> keys that a what-if may change; None stands for all."""
SELECTING = frozenset({"algorithm.filter_zero_variance", "schedule.prompts_per_step", "schedule.order"})
"""Changes under which a step would have had other groups."""
BY_THE_SCORER = "penstock replay score"
REASONS = {
    "rollout": "samples are recorded, nothing is drawn",
    "sampling": "samples are recorded, nothing is drawn; see `penstock replay rollout`",
    "data": "prompts are recorded",
    "reward": f"rewards are recorded; see `{BY_THE_SCORER}`",
    "scorer": f"rewards are recorded; see `{BY_THE_SCORER}`",
    "schedule": "the samples were drawn under the recorded schedule",
    "run": "its steps are recorded; --from-step and --to-step choose among them",
    "model": "the weights that the run began with are recorded; --model DIR says where the architecture is",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A run's training under other settings."""

    config: Config
    changed: Mapping[str, tuple[Any, Any]]
    """Key -> recorded and new value; empty: nothing is changed, the replay is exact."""

    @property
    def selects(self) -> bool:
        """True if its steps have other groups than the recorded steps."""
        return bool(SELECTING & self.changed.keys())

    def __str__(self) -> str:
        return ", ".join(f"{key} {before} -> {after}" for key, (before, after) in self.changed.items())


def what_if(config: Config, overrides: Sequence[str]) -> WhatIf:
    """The configuration with `a.b=c` overrides. Raises `ConfigError` for a key that a replay cannot change, and why.

    Example:
        what_if(config, ["algorithm.loss=gspo"]).changed  # -> {"algorithm.loss": ("grpo", "gspo")}
    """
    for text in overrides:
        section, _, key = text.partition("=")[0].strip().partition(".")
        allowed = ALLOWED.get(section, set())
        if allowed is not None and key not in allowed and (section in REASONS or section in ALLOWED):
            keys = "algorithm.*, " + ", ".join(f"{name}.{one}" for name, names in ALLOWED.items() for one in sorted(names or ()))
            why = REASONS.get(section, "it has no influence on what a step computes")
            raise ConfigError(f"--set {text}: a replay cannot change {section}.{key}: {why}; what it can change: {keys}")
    after = override(config, overrides)
    before_table, after_table = json.loads(to_json(config)), json.loads(to_json(after))
    changed = {
        f"{section}.{key}": (before_table[section][key], value)
        for section, table in after_table.items()
        for key, value in table.items()
        if before_table[section][key] != value
    }
    for key, (before, now) in changed.items():
        if key == "algorithm.truncated_penalty" or (key == "algorithm.truncated" and "penalise" in (before, now)):
            raise ConfigError(f"--set {key}={now}: a penalty stands in the recorded rewards; it was {before}; see `{BY_THE_SCORER}`")
    return WhatIf(config=after, changed=changed)
