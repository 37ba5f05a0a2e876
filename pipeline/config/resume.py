"""What of a configuration may change when a run goes on.

The rule: nothing that decides what a prompt, a sample, a reward or a step is; the log was written under that.
"""

import shlex
from collections.abc import Sequence

from penstock.pipeline.config.load import Config, ConfigError, override

CHANGEABLE = (
    "run.health_port",
    "run.max_restarts",
    "run.restart",
    "run.stall_s",
    "data.on_change",
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
    "schedule.max_drops_per_step",
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


def changed(config: Config, overrides: Sequence[str], *, run: str) -> Config:
    """The configuration of the resumed run with these keys changed. Raises `ConfigError` for a key that a resumed run cannot change."""
    table = config.model_dump()
    for key in (text.partition("=")[0].strip() for text in overrides):
        section, _, name = key.partition(".")
        if key not in CHANGEABLE and name.partition(".")[0] in table.get(section, ()):
            forked = " ".join(f"--set {shlex.quote(text.strip())}" for text in overrides)
            raise ConfigError(
                f"--set {key}: {run} keeps the value that it was created with; a fork continues from its last step with another one: "
                f"penstock fork {run} {forked} --start; a resumed run may change {', '.join(CHANGEABLE)}"
            )
    new = override(config, overrides)
    if new.partitions != config.partitions:
        most = config.partitions // 4
        raise ConfigError(f"--set: the run has {config.partitions} partitions, made for at most {most} rollout workers and scorers")
    return new
