"""The numbers that follow from a configuration: sizes of a step, a round and the run, workers, GPUs, loss."""

from penstock.pipeline.config.load import Config, ConfigError
from penstock.pipeline.launch.placement import place, visible_gpus
from penstock.pipeline.runtime.roles import ROLES
from penstock.pipeline.scheduling.rules import versions_of


def arithmetic(config: Config, *, rows: int) -> list[tuple[str, str]]:
    """The numbers that follow from the configuration, as (name, value) for a person."""
    rules, steps = config.rules, config.steps(rows)
    groups = steps * rules.prompts_per_step
    samples = groups * rules.samples_per_prompt
    a_step = rules.prompts_per_step * rules.samples_per_prompt
    clip = f"-{config.clip_low}/+{config.clip_high}" + (f", dual {config.clip_dual:g}" if config.clip_dual else "")
    return [
        (
            "schedule",
            f"{rules.mode}, order {rules.order}, max_lag {rules.max_lag} version(s) = {rules.max_lag * rules.steps_per_version} step(s)",
        ),
        ("one step", f"{rules.prompts_per_step} groups x {rules.samples_per_prompt} samples = {a_step} samples"),
        ("one round", f"{rules.steps_per_version} step(s) = {rules.round_groups} groups between two published weights"),
        ("the run", f"{steps} steps, {versions_of(steps, steps_per_version=rules.steps_per_version)} versions after the initial one"),
        ("trained", f"{groups:,} groups, {samples:,} samples, at most {samples * config.sampling.max_new_tokens:,} tokens"),
        ("data", f"{rows:,} rows, {groups / rows:.2f} epochs without replacements for dropped groups"),
        ("ahead", f"at most {rules.round_groups * (1 + rules.max_lag)} groups are admitted ahead of the newest weights"),
        ("kafka", f"{config.partitions} partitions, broker {config.kafka.bootstrap}"),
        (
            "workers",
            ", ".join(f"{count} {role.name}" for role in ROLES.values() if (count := role.workers(config))),
        ),
        ("threads", threads(config)),
        ("engine", f"{config.rollout.engine}; trainer {config.trainer.backend}"),
        ("gpus", _gpus(config)),
        (
            "loss",
            f"{config.algorithm.loss}: advantage {config.advantage}, {config.aggregate}, clip {clip}, "
            f"proximal {config.proximal}, correction {config.correction}, kl_coef {config.algorithm.kl_coef}",
        ),
    ]


def threads(config: Config) -> str:
    """Number of computing threads, and the trainer's number format."""
    trainer, rollout = config.trainer, config.rollout
    each = f" in each of {trainer.processes} processes" if trainer.processes > 1 else ""
    return f"trainer {trainer.threads}{each}, in {trainer.dtype}; each rollout worker {rollout.threads}, in {rollout.dtype}"


def _gpus(config: Config) -> str:
    try:
        return str(place(config, visible_gpus()))
    except ConfigError as error:  # examining a configuration for another machine is no error
        return f"not on this machine: {error}"
