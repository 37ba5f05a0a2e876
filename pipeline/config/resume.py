"""What of a configuration may change when a run goes on.

The rule: nothing that decides what a prompt, a sample, a reward or a step is; the log was written under that.
"""

from collections.abc import Sequence

from penstock.pipeline.config.load import Config, ConfigError, override
from penstock.pipeline.config.plugins import nearest

CHANGEABLE = (
    "run.health_port",
    "run.max_restarts",
    "run.restart",
    "run.stall_s",
    "reward.on_error",
    "reward.timeout_s",
    "eval.engine",
    "launch.environments",
    "launch.placement",
    "rollout.concurrency",
    "rollout.device",
    "rollout.gpus_per_worker",
    "rollout.slots",
    "rollout.threads",
    "rollout.workers",
    "scorer.group_deadline_s",
    "scorer.processes",
    "scorer.workers",
    "trainer.checkpoint_every",
    "trainer.checkpoint_keep_every",
    "trainer.checkpoint_keep_last",
    "trainer.deterministic",
    "trainer.device",
    "trainer.export",
    "trainer.gpus",
    "trainer.offload",
    "trainer.offload_activations",
    "trainer.on_mismatch",
    "trainer.processes",
    "trainer.threads",
    "kafka.archive",
    "kafka.give_up_s",
    "kafka.keep_steps",
    "kafka.session_s",
)


def changed(config: Config, overrides: Sequence[str]) -> Config:
    """The configuration of a run that goes on with some keys changed. Raises `ConfigError` for a key that stays as it was."""
    for text in overrides:
        key = text.partition("=")[0].strip()
        if key not in CHANGEABLE:
            hint = nearest(key, CHANGEABLE)
            raise ConfigError(f"--set {key}: stays as the run was created with; what may change is {', '.join(CHANGEABLE)}{hint}")
    new = override(config, overrides)
    if new.partitions != config.partitions:
        most = config.partitions // 4
        raise ConfigError(f"--set: the run has {config.partitions} partitions, made for at most {most} rollout workers and scorers")
    return new
