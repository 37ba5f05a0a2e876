"""Sizes that follow from a configuration: of a step and the run, and bytes on disk. No weight is read."""

import bisect
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.infra.backends.hardware import visible_gpus
from penstock.infra.errors import PenstockError
from penstock.infra.paths import state_path
from penstock.infra.tensors.parameter_count import parameters
from penstock.pipeline.config.load import Config, ConfigError, with_values
from penstock.pipeline.inspect.records.runs import size
from penstock.pipeline.launch.check.memory import ITEM, adapter_bytes, shape_in
from penstock.pipeline.launch.placement import place
from penstock.pipeline.runtime.roles import ROLES
from penstock.pipeline.scheduling.rules import versions_of
from penstock.topics.catalogue import DELETED_SEGMENT_BYTES


def arithmetic(config: Config, *, rows: int) -> list[tuple[str, str]]:
    """Numbers that follow from the configuration, as (name, value) for the user."""
    rules, steps = config.rules, config.steps(rows)
    groups, a_step = steps * rules.prompts_per_step, rules.prompts_per_step * rules.samples_per_prompt
    versions = versions_of(steps, steps_per_version=rules.steps_per_version)
    ahead = rules.round_groups * (1 + rules.max_lag)
    workers = [f"{count} {role.name}" for role in ROLES.values() if (count := role.workers(config))]
    clip = f"-{config.clip_low}/+{config.clip_high}" + (f", dual {config.clip_dual:g}" if config.clip_dual else "")
    return [
        ("data", f"{rows:,} rows; the run uses each {groups / rows:.2f} times, more if groups are dropped"),
        ("one step", f"{rules.prompts_per_step} prompts x {rules.samples_per_prompt} samples = {a_step} samples"),
        ("the run", f"{steps:,} steps, {steps * a_step:,} samples, at most {steps * a_step * config.sampling.max_new_tokens:,} tokens"),
        (
            "schedule",
            f"{rules.mode}: {versions:,} versions of the weights; samples may be {rules.max_lag} version(s) old, "
            f"and at most {ahead} groups are generated ahead",
        ),
        ("workers", f"{', '.join(workers)}; {config.partitions} partitions, broker {config.kafka.bootstrap}"),
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
    """Numbers of computing threads, and number formats, of trainer and rollout workers."""
    trainer, rollout = config.trainer, config.rollout
    each = f" in each of {trainer.processes} processes" if trainer.processes > 1 else ""
    return f"trainer {trainer.threads}{each}, in {trainer.dtype}; each rollout worker {rollout.threads}, in {rollout.dtype}"


def _gpus(config: Config) -> str:
    try:
        return str(place(config, visible_gpus()))
    except ConfigError as error:  # examining a configuration for another machine is no error
        return f"the run cannot be placed on this machine: {error}"


OPTIMIZER_BYTES = 12
"""A checkpoint holds a float32 master and two moments of each parameter."""
CHANGED_PER_LR = 4_000.0
"""Share of bfloat16 elements that a step of AdamW changes, by its learning rate; measured on SmolLM2-135M at 1e-6: 0.4 %."""
BYTES_A_CHANGE = 3
"""A new element of two bytes and its position's gap in one."""
SAMPLE_BYTES, TOKEN_BYTES, GROUP_BYTES = 4_500, 20.2, 7_600
"""Bytes in `rollouts` and `groups` for each sample, token and group; measured at 4 characters a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Bytes on disk after each step, for a model of `count` parameters."""

    config: Config
    count: int
    share: float
    """Bytes of a delta divided by the bytes of a whole version; 1 gives an upper bound."""
    adapters: int | None = None
    """Bytes of a version that is published as adapters; None where versions are whole ones and deltas."""

    @property
    def whole(self) -> int:
        """Bytes of a version published as a full snapshot."""
        return self.count * ITEM[self.config.trainer.dtype]

    @property
    def delta(self) -> int:
        """Bytes of a version published as a delta."""
        return math.ceil(self.whole * self.share)

    @property
    def samples(self) -> int:
        """Bytes of a step's samples, if all have the maximum length."""
        schedule, tokens = self.config.rules, self.config.max_completion_tokens
        return math.ceil(schedule.prompts_per_step * (GROUP_BYTES + schedule.samples_per_prompt * (SAMPLE_BYTES + TOKEN_BYTES * tokens)))

    def weights(self, steps: int) -> int:
        """Bytes of the topic `weights` on disk after so many steps, without what was deleted."""
        chosen, versions = self.config.weights, versions_of(steps, steps_per_version=self.config.schedule.steps_per_version)
        undeleted = chosen.partitions * self.config.weight_segment_bytes  # disk is freed by whole segments
        if self.adapters is not None:
            everything = self.whole + versions * self.adapters
            return everything if chosen.keep == "all" else min(everything, self.whole + 3 * chosen.anchor_every * self.adapters + undeleted)
        deltas = min(chosen.anchor_every, math.ceil(1 / max(self.share, 1e-6)))  # of a chain: no more bytes than its snapshot
        added = chosen.anchor_every > 1 and 2 * self.delta <= self.whole  # the last one is sent as a snapshot, too; else the next one
        snapshots = versions // (deltas if added else deltas + (chosen.anchor_every > 1))
        everything = (1 + snapshots) * self.whole + (versions if added else versions - snapshots) * self.delta
        if chosen.keep == "all":
            return everything
        cycle = self.whole + deltas * self.delta
        return min(everything, self.whole + 3 * cycle + undeleted)  # version 0, two anchors with what follows them, and the next one

    def kept_samples(self, steps: int) -> int:
        """Bytes of the samples that are retained after so many steps."""
        keep, everything = self.config.kafka.keep_steps, steps * self.samples
        if keep is None:
            return everything
        undeleted = 2 * self.config.partitions * DELETED_SEGMENT_BYTES  # of rollouts and groups: disk is freed by whole segments
        return min(everything, (keep + 2 * self.config.trainer.checkpoint_every) * self.samples + undeleted)

    def checkpoints(self, steps: int) -> int:
        """Bytes of the checkpoints after so many steps."""
        trainer = self.config.trainer
        if not trainer.checkpoint_every:
            return 0
        newest = min(math.ceil(steps / trainer.checkpoint_every), trainer.checkpoint_keep_last + 1)
        retained = newest + (steps // trainer.checkpoint_keep_every if trainer.checkpoint_keep_every else 0)
        return retained * self.count * (OPTIMIZER_BYTES + (ITEM[trainer.dtype] if trainer.export else 0))

    @property
    def exported(self) -> int:
        """Bytes of the model that the run writes at its end."""
        return self.whole if self.config.trainer.export else 0

    def here(self, steps: int) -> int:
        """Bytes on this machine after so many steps, with room for the final model; the log counts only if its broker is here."""
        log = self.weights(steps) + self.kept_samples(steps) if self.config.kafka.bootstrap == "embedded" else 0
        return log + self.checkpoints(steps) + self.exported

    def full_at(self, free: int, *, steps: int) -> int | None:
        """The first step after which the run needs more than `free` bytes; None if `steps` steps fit."""
        step = bisect.bisect_right(range(steps + 1), free, key=self.here)
        return step if step <= steps else None


def delta_share(dtype: str, lr: float) -> float:
    """Estimated size of a delta relative to the full version; at most 1, as no piece takes more than its bytes.

    In float32 every step changes all elements; in bfloat16 only those whose float32 master has crossed to the next number.
    """
    if dtype != "bfloat16":
        return 1.0
    return min(1.0, lr * CHANGED_PER_LR * BYTES_A_CHANGE / ITEM[dtype])


def check_disk(config: Config, info: Mapping[str, Any], note: Callable[[str, str], None]) -> None:
    """Compare what the run will write to this machine's disk with its free space. Raises `PenstockError`."""
    count = parameters(config.model_directory)
    if count is None:
        return
    chosen, steps, share = config.weights, info["steps"], delta_share(config.trainer.dtype, config.trainer.lr)
    of_model = partial(Growth, config=config, count=count, adapters=adapter_bytes(config, shape_in(config.model_directory)))
    likely, most = of_model(share=share), of_model(share=1.0)
    sent = (
        f"{size(likely.whole)} whole, every {chosen.anchor_every} versions; a delta about {size(likely.delta)} at trainer.lr = "
        f"{config.trainer.lr:g} in {config.trainer.dtype}"
        if likely.adapters is None
        else f"{size(likely.whole)} whole, once; the adapters of each version {size(likely.adapters)}"
    )
    note("weights", f'{sent}; weights.keep = "{chosen.keep}"')
    keeps = "" if config.kafka.keep_steps is None else f" (at most {size(likely.kept_samples(steps))} are retained)"
    home = next(parent for parent in (state_path(), *state_path().parents) if parent.exists())
    free = shutil.disk_usage(home).free
    full, earliest = likely.full_at(free, steps=steps), most.full_at(free, steps=steps)
    soon = f"; full after step {earliest} if every delta were whole" if earliest is not None and full is None else ""
    note(
        "disk",
        f"about {size(likely.here(steps))} of {size(free)} that are free: "
        f"{size(likely.weights(steps))} of weights (at most {size(most.weights(steps))}), {size(likely.samples)} of samples a step"
        f"{keeps}, {size(likely.checkpoints(steps))} of checkpoints, {size(likely.exported)} of the exported model{soon}",
    )
    if full is not None:
        chain = of_model(config=with_values(config, "weights", keep="chain"), share=share)
        less = f'set weights.keep = "chain" ({size(chain.here(steps))}), ' if chosen.keep == "all" and chain.here(steps) <= free else ""
        fewer = "set kafka.keep_steps, " if config.kafka.keep_steps is None and steps * likely.samples > free // 4 else ""
        raise PenstockError(
            f"the disk would be full after step {full} of {steps}: the run writes {size(likely.here(steps))}, but {size(free)} are free; "
            f'{less}{fewer}lower run.steps, raise schedule.steps_per_version, set trainer.dtype = "bfloat16", '
            "or set PENSTOCK_HOME to a larger disk"
        )
