"""The configuration keys that a resumed run may change."""

import shlex
from collections.abc import Sequence

from penstock.pipeline.config.load import Config, ConfigError, override

CHANGEABLE = (
    "run.health_port", "run.max_restarts", "run.restart", "run.stall_s", "data.on_change", "reward.on_error", "reward.timeout_s",
    "eval.engine", "launch.environments", "launch.placement", "rollout.concurrency", "rollout.device", "rollout.gpus_per_worker",
    "rollout.slots", "rollout.threads", "rollout.workers", "schedule.max_drops_per_step", "scorer.group_deadline_s", "scorer.processes",
    "scorer.workers", "trainer.checkpoint_every", "trainer.checkpoint_keep_every", "trainer.checkpoint_keep_last",
    "trainer.deterministic", "trainer.device", "trainer.export", "trainer.gpus", "trainer.offload", "trainer.offload_activations",
    "trainer.on_mismatch", "trainer.processes", "trainer.threads", "kafka.archive", "kafka.give_up_s", "kafka.keep_steps",
    "kafka.session_s",
)  # fmt: skip
MOVED = ("model.path", "trainer.checkpoint_dir")
"""Keys of folders that may be at another path where a run is resumed; workers compare tokenizer and weights with those of the log."""
OF_THE_FORK = ("model.path", "data.first_group", "trainer.initial_state", "trainer.initial_steps")
"""Keys with the starting point of a fork; `penstock fork` sets them."""
OF_THE_STATE = ("trainer.backend", "trainer.zero_stage", "trainer.dtype", "trainer.lora_rank", "trainer.lora_alpha")
"""Keys on which the optimizer's state depends; a fork can change them only before the first step."""


def changed(config: Config, overrides: Sequence[str], *, run: str) -> Config:
    """Apply `--set` overrides to the configuration of a resumed run. Raises `ConfigError` for keys outside `CHANGEABLE` and `MOVED`."""
    table = config.model_dump()
    for key in (text.partition("=")[0].strip() for text in overrides):
        section, _, name = key.partition(".")
        if key not in (*CHANGEABLE, *MOVED) and name.partition(".")[0] in table.get(section, ()):
            raise ConfigError(
                f"--set {key}: {run} must keep the value that it was created with; {_way(overrides, run=run)}; a resumed run may change "
                f"{', '.join(CHANGEABLE)}; {' and '.join(MOVED)} if the folder is at another path"
            )
    new = override(config, overrides)
    if new.partitions != config.partitions:
        most = config.partitions // 4
        raise ConfigError(f"--set: the run has {config.partitions} partitions, enough for at most {most} rollout workers and scorers")
    return new


def _way(overrides: Sequence[str], *, run: str) -> str:
    """Advice on how to change keys that a resumed run cannot: usually the command that forks the run."""
    keys = [text.partition("=")[0].strip() for text in overrides]
    fork = " ".join(["penstock fork", run, *(f"--set {shlex.quote(text.strip())}" for text in overrides), "--start"])
    if own := [key for key in keys if key in OF_THE_FORK]:
        return f"a fork must too, because `penstock fork` sets {own[0]}: create another run with `penstock run CONFIG`"
    if "run.epochs" in keys:
        return f"a fork takes a number of steps instead: penstock fork {run} --set run.steps=N --start"
    if state := [key for key in keys if key in OF_THE_STATE]:
        first = fork.replace(" --set", " --from-step 0 --set", 1)
        return f"the optimizer state depends on {state[0]}, so only a fork from step 0 can change it: {first}"
    counted = ", and run.steps counts the fork's own steps" if "run.steps" in keys else ""
    return f"a fork continues from the last step with another value{counted}: {fork}"
