"""What a simulated run consists of: the schedule, the machines' speeds and the lengths of completions.

The rule: times are seconds and speeds tokens per second; nothing here knows how they were found.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.pipeline.planning.lengths import LengthDistribution
from penstock.pipeline.scheduling.schedule import Schedule


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """Seconds of one decode step of one engine by the number of samples in it: straight lines between the points.

    Below the first point a step takes as long as there; beyond the last one the tokens per second stay as they are there.
    """

    samples: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, samples: int) -> float:
        """Seconds of a decode step with so many samples."""
        if samples > self.samples[-1]:
            return self.seconds[-1] * samples / self.samples[-1]
        return float(np.interp(samples, self.samples, self.seconds))

    def tokens_per_s(self, samples: int) -> float:
        """Tokens per second of one engine with so many samples."""
        return samples / self(samples)


def linear(base_s: float, each_s: float, *, most: int = 1 << 20) -> DecodeTimes:
    """A step that takes `base_s` and `each_s` more for each sample: the weights are read once, each sample's keys and values apart."""
    return DecodeTimes((0.0, float(most)), (base_s, base_s + each_s * most))


def from_speeds(points: Sequence[tuple[int, float]]) -> DecodeTimes:
    """Decode times from (samples side by side, tokens per second of one engine).

    Example:
        from_speeds([(1, 50), (64, 1600)])(64)  # -> 0.04

    Raises:
        ValueError: no point, one that is not positive, or a step that is faster with more samples.
    """
    ordered = sorted(points)
    if not ordered or any(samples < 1 or not speed > 0 for samples, speed in ordered):
        raise ValueError("generation speed: give at least one SAMPLES:TOKENS_PER_S, both above 0")
    if len({samples for samples, _ in ordered}) < len(ordered):
        raise ValueError("generation speed: a number of samples stands there twice")
    times = [samples / speed for samples, speed in ordered]
    if any(later < earlier * 0.999 for earlier, later in itertools.pairwise(times)):
        raise ValueError(
            "generation speed: with more samples side by side each of them must not get faster; is it tokens/s of all together?"
        )
    return DecodeTimes(tuple(float(samples) for samples, _ in ordered), tuple(times))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One run: everything its time depends on."""

    schedule: Schedule
    steps: int
    lengths: LengthDistribution
    engines: int
    """Rollout workers, each with one engine."""
    concurrency: int
    """Samples that one engine draws side by side."""
    decode: DecodeTimes
    side_by_side: bool = True
    """False for an engine that draws one group at a time: its step takes as long as with `concurrency` samples until the last has ended."""
    slots: int | None = None
    """Unfinished groups that a worker wants in hand; as the live workers' default if absent."""
    begin_s: float = 0.0
    """The engine's time for the prompt of a group, in which it draws nothing else."""
    load_s: float = 0.0
    """To load a version into an engine, which draws nothing meanwhile."""
    deliver_s: float = 0.0
    """From a group's last token to its outcome in the log."""
    take_s: float = 0.0
    """From a group's outcome in the log to the trainer."""
    train_token_s: float = 0.0
    """The trainer's time for each token of a completion."""
    train_group_s: float = 0.0
    """The trainer's time for each group, whatever its length."""
    step_s: float = 0.0
    """The trainer's time for the optimizer and the ledger, at the end of each step."""
    hold_s: float = 0.0
    """From a step's end until the trainer begins the next one."""
    release_s: float = 0.0
    """From a step's end until its version is out; the trainer goes on meanwhile, but ends no step before the last version is out."""
    publish_s: float = 0.0
    """From then on to the version's arrival at the workers."""
    filtered: float = 0.0
    """Share of groups that are filtered, each replaced by a new one."""
    filtered_groups: Mapping[int, bool] = field(default_factory=dict)
    """Group -> whether it is filtered, where that is known."""
    group_pace: Mapping[int, float] = field(default_factory=dict)
    """Group -> how many times as long as usual its decode steps take, in an engine that draws one group at a time."""
    step_pace: Mapping[int, float] = field(default_factory=dict)
    """Optimizer step -> how many times as long as usual its training takes."""
    seed: int = 0

    @property
    def group_slots(self) -> int:
        """Unfinished groups that one worker wants in hand."""
        if self.slots is not None:
            return self.slots
        return 2 * -(-self.concurrency // self.schedule.samples_begun) + 2 if self.side_by_side else 3

    def train_s(self, tokens: int) -> float:
        """Seconds of the trainer's work on a group of so many tokens."""
        return self.train_group_s + self.train_token_s * tokens
