"""Bytes that a run writes to disk, by step: weights and samples in the log, and checkpoints.

Computed from the configuration and the headers of the model's files; no weight is read, so the size of a delta is an estimate.
"""

import bisect
import math
from dataclasses import dataclass

from penstock.pipeline.config.load import Config
from penstock.pipeline.scheduling.rules import versions_of
from penstock.topics.catalogue import DELETED_SEGMENT_BYTES

OPTIMIZER_BYTES = 12
"""A checkpoint holds a float32 master and two moments of each parameter."""
BYTES_OF = {"float32": 4, "bfloat16": 2}
CHANGED_PER_LR = 4_000.0
"""Share of bfloat16 elements that a step of AdamW changes, by its learning rate; measured on SmolLM2-135M at 1e-6: 0.4 %."""
BYTES_A_CHANGE = 3
"""A new element of two bytes and its position's gap in one."""
SAMPLE_BYTES, TOKEN_BYTES, GROUP_BYTES = 4_500, 20.2, 7_600
"""Of a sample and each of its tokens in `rollouts` and `groups`, and of a group besides; at 4 characters a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Bytes on disk after each step of a run of a model of `count` parameters."""

    config: Config
    count: int
    share: float
    """Of a delta in the whole version; 1 for an upper bound."""
    adapters: int | None = None
    """Bytes of a version that is published as adapters; None where versions are whole ones and deltas."""

    @property
    def whole(self) -> int:
        """A version that is published whole."""
        return self.count * BYTES_OF[self.config.trainer.dtype]

    @property
    def delta(self) -> int:
        """A version that is published as what differs from the one before."""
        return math.ceil(self.whole * self.share)

    @property
    def samples(self) -> int:
        """The samples of a step, all of the longest."""
        schedule, tokens = self.config.rules, self.config.max_completion_tokens
        return math.ceil(schedule.prompts_per_step * (GROUP_BYTES + schedule.samples_per_prompt * (SAMPLE_BYTES + TOKEN_BYTES * tokens)))

    def weights(self, steps: int) -> int:
        """The topic `weights` after so many steps."""
        chosen, versions = self.config.weights, versions_of(steps, steps_per_version=self.config.schedule.steps_per_version)
        undeleted = chosen.partitions * self.config.weight_segment_bytes  # disk is freed by whole segments
        if self.adapters is not None:
            everything = self.whole + versions * self.adapters
            return everything if chosen.keep == "all" else min(everything, self.whole + 3 * chosen.anchor_every * self.adapters + undeleted)
        longest = math.ceil(1 / max(self.share, 1e-6)) + 1  # the deltas of a chain are not more bytes than its anchor
        every = min(chosen.anchor_every, longest)
        anchors = versions // every
        everything = (1 + anchors) * self.whole + (versions - anchors) * self.delta
        if chosen.keep == "all":
            return everything
        cycle = self.whole + (every - 1) * self.delta
        return min(everything, self.whole + 3 * cycle + undeleted)  # version 0, two anchors with what follows them, and the next one

    def kept_samples(self, steps: int) -> int:
        """The samples that are there after so many steps."""
        keep, everything = self.config.kafka.keep_steps, steps * self.samples
        if keep is None:
            return everything
        undeleted = 2 * self.config.partitions * DELETED_SEGMENT_BYTES  # of rollouts and groups: disk is freed by whole segments
        return min(everything, (keep + 2 * self.config.trainer.checkpoint_every) * self.samples + undeleted)

    def checkpoints(self, steps: int) -> int:
        """The checkpoints after so many steps."""
        trainer = self.config.trainer
        if not trainer.checkpoint_every:
            return 0
        newest = min(math.ceil(steps / trainer.checkpoint_every), trainer.checkpoint_keep_last + 1)
        retained = newest + (steps // trainer.checkpoint_keep_every if trainer.checkpoint_keep_every else 0)
        return retained * self.count * (OPTIMIZER_BYTES + (BYTES_OF[trainer.dtype] if trainer.export else 0))

    @property
    def exported(self) -> int:
        """The model that the run writes at its end."""
        return self.whole if self.config.trainer.export else 0

    def here(self, steps: int) -> int:
        """All of it on this machine after so many steps, with room for the model at the end; the log only if its broker is here."""
        log = self.weights(steps) + self.kept_samples(steps) if self.config.kafka.bootstrap == "embedded" else 0
        return log + self.checkpoints(steps) + self.exported

    def full_at(self, free: int, *, steps: int) -> int | None:
        """The first of `steps` steps after which more than `free` bytes are taken; None if all of them fit."""
        step = bisect.bisect_right(range(steps + 1), free, key=self.here)
        return step if step <= steps else None


def delta_share(dtype: str, lr: float) -> float:
    """Estimated size of a delta relative to the full version; at most 1, as no piece takes more than its bytes.

    In float32 every step changes all elements; in bfloat16 only those whose float32 master has crossed to the next number.

    Example:
        delta_share("bfloat16", 1e-6)  # -> 0.006
        delta_share("float32", 1e-6)   # -> 1.0
    """
    if dtype != "bfloat16":
        return 1.0
    return min(1.0, lr * CHANGED_PER_LR * BYTES_A_CHANGE / BYTES_OF[dtype])
