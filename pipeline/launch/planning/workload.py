"""Input of the simulator: schedule, speeds of the machines, and completion lengths. Times are in seconds, speeds in tokens per second."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.pipeline.launch.planning.lengths import LengthDistribution
from penstock.pipeline.scheduling.schedule import Schedule


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """Seconds of one decode step of an engine by the number of samples in it, interpolated linearly between points.

    Constant below the first point; constant tokens per second beyond the last one.
    """

    samples: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, samples: int) -> float:
        """Seconds of a decode step with this number of samples."""
        if samples > self.samples[-1]:
            return self.seconds[-1] * samples / self.samples[-1]
        return float(np.interp(samples, self.samples, self.seconds))

    def tokens_per_s(self, samples: int) -> float:
        """Tokens per second of one engine with this number of samples."""
        return samples / self(samples)


def linear(base_s: float, each_s: float, *, most: int = 1 << 20) -> DecodeTimes:
    """A step of `base_s` plus `each_s` for each sample: weights are read once, keys and values for each sample."""
    return DecodeTimes((0.0, float(most)), (base_s, base_s + each_s * most))


def from_speeds(points: Sequence[tuple[int, float]]) -> DecodeTimes:
    """Decode times from (concurrent samples, tokens per second of one engine).

    Example:
        from_speeds([(1, 50), (64, 1600)])(64)  # -> 0.04

    Raises:
        ValueError: no point, one that is not positive, or a step that is faster with more samples.
    """
    ordered = sorted(points)
    if not ordered or any(samples < 1 or not speed > 0 for samples, speed in ordered):
        raise ValueError("--speed: give at least one SAMPLES:TOKENS_PER_S, both above 0")
    if len({samples for samples, _ in ordered}) < len(ordered):
        raise ValueError("--speed: a number of samples is given twice; give each number of concurrent samples once")
    times = [samples / speed for samples, speed in ordered]
    if any(later < earlier * 0.999 for earlier, later in itertools.pairwise(times)):
        raise ValueError("--speed: a decode step gets faster with more concurrent samples; give tokens/s of all samples together")
    return DecodeTimes(tuple(float(samples) for samples, _ in ordered), tuple(times))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One run: all inputs of its time."""

    schedule: Schedule
    steps: int
    lengths: LengthDistribution
    engines: int
    """Rollout workers, each with one engine."""
    concurrency: int
    """Concurrent samples of one engine."""
    decode: DecodeTimes
    continuous_batching: bool = True
    """False for an engine that generates one group at a time, with the step time of `concurrency` samples until the last one ends."""
    slots: int | None = None
    """Largest number of unfinished groups of a worker; the live workers' default if absent."""
    prefill_s: float = 0.0
    """The engine's time for the prompt of a group, in which it decodes nothing."""
    load_s: float = 0.0
    """To load a version into an engine, in which it decodes nothing."""
    deliver_s: float = 0.0
    """From a group's last token to its outcome in the log."""
    take_s: float = 0.0
    """From a group's outcome in the log to the trainer."""
    train_token_s: float = 0.0
    """The trainer's time for each token of a completion."""
    train_group_s: float = 0.0
    """The trainer's time for each group, independent of its length."""
    step_s: float = 0.0
    """The trainer's time for the optimizer and the ledger, at the end of each step."""
    hold_s: float = 0.0
    """From a step's end to the trainer's start of the next one."""
    release_s: float = 0.0
    """From a step's end until its version is published; the trainer continues, but ends no step before the last version is published."""
    publish_s: float = 0.0
    """From the publication to the version's arrival at the workers."""
    filtered: float = 0.0
    """Share of groups that are filtered, each replaced by a new one."""
    filtered_groups: Mapping[int, bool] = field(default_factory=dict)
    """Group -> True if it is filtered, for recorded groups."""
    group_pace: Mapping[int, float] = field(default_factory=dict)
    """Group -> factor of its decode step time, in an engine that generates one group at a time."""
    step_pace: Mapping[int, float] = field(default_factory=dict)
    """Optimizer step -> factor of its training time."""
    seed: int = 0

    @property
    def group_slots(self) -> int:
        """Largest number of unfinished groups of one worker."""
        if self.slots is not None:
            return self.slots
        return 2 * -(-self.concurrency // self.schedule.samples_begun) + 2 if self.continuous_batching else 3

    def train_s(self, tokens: int) -> float:
        """Seconds of the trainer's work on a group of this number of tokens."""
        return self.train_group_s + self.train_token_s * tokens
