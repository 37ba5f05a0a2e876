"""Input of the simulator: schedule, speeds of the machines, and completion lengths. Times are in seconds, speeds in tokens per second."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.pipeline.scheduling.rules import Schedule

Lengths = npt.NDArray[np.int64]
Sampler = Callable[[np.random.Generator, int], npt.NDArray[np.float64]]
"""(random generator, count) -> `count` sampled lengths."""


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A distribution of completion lengths, of at least one token each."""

    name: str
    sample: Sampler
    mean: float
    longest: float
    """Largest possible length; `inf` without a limit."""

    def of_group(self, group: int, *, samples: int, seed: int) -> Lengths:
        """Lengths [samples] of a group's completions."""
        return np.maximum(1, np.rint(self.sample(np.random.default_rng((seed, group)), samples))).astype(np.int64)


def constant(length: float) -> LengthDistribution:
    """All completions have the same length."""
    return LengthDistribution(f"constant:{length:g}", lambda _, count: np.full(count, length), length, length)


def uniform(longest: float) -> LengthDistribution:
    """Lengths from 1 to `longest` with equal probability (case study of arXiv 2509.19128)."""
    return LengthDistribution(
        f"uniform:{longest:g}",
        lambda random, count: random.integers(1, int(longest) + 1, count).astype(np.float64),
        (1 + longest) / 2,
        longest,
    )


def lognormal(mean: float, sigma: float, longest: float = np.inf) -> LengthDistribution:
    """Log-normal lengths with this mean and standard deviation of the logarithm, clipped at `longest`, as of reasoning models."""
    location = np.log(mean) - sigma**2 / 2

    def sample(random: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
        return np.minimum(random.lognormal(location, sigma, count), longest)

    cut = float(sample(np.random.default_rng(0), 100_000).mean()) if np.isfinite(longest) else mean
    return LengthDistribution(f"lognormal:{mean:g}:{sigma:g}" + (f":{longest:g}" if np.isfinite(longest) else ""), sample, cut, longest)


def recorded(groups: Mapping[int, Lengths], *, name: str) -> LengthDistribution:
    """Lengths of a run's groups: each group as recorded; later groups repeat a random recorded one.

    Samples of one prompt resemble each other, so groups are sampled as a whole. Raises `ValueError` without a group.
    """
    if not groups:
        raise ValueError(f"{name} has no group with all its samples: wait until the run has one, or choose another run")
    by_group = [np.asarray(groups[number], np.float64) for number in sorted(groups)]
    pooled = np.concatenate(by_group)

    @dataclass(frozen=True, slots=True)
    class Recorded(LengthDistribution):
        def of_group(self, group: int, *, samples: int, seed: int) -> Lengths:
            random = np.random.default_rng((seed, group))
            lengths = groups[group] if group in groups else by_group[int(random.integers(len(by_group)))]
            more = random.choice(lengths, max(0, samples - len(lengths)))
            return np.maximum(1, np.concatenate([lengths, more])[:samples]).astype(np.int64)

    return Recorded(name, lambda random, count: random.choice(pooled, count), float(pooled.mean()), float(pooled.max()))


def parse(text: str) -> LengthDistribution:
    """A distribution by name (`constant:N`, `uniform:LONGEST`, `lognormal:MEAN:SIGMA[:LONGEST]`), or a file with one length per line.

    Raises `ValueError`: no such distribution, or a length below 1.
    """
    name, _, rest = text.partition(":")
    makers: dict[str, tuple[Callable[..., LengthDistribution], tuple[int, ...]]] = {
        "constant": (constant, (1,)),
        "uniform": (uniform, (1,)),
        "lognormal": (lognormal, (2, 3)),
    }
    if name in makers:
        make, counts = makers[name]
        numbers = _numbers(rest, text)
        if len(numbers) not in counts or numbers[0] < 1 or min(numbers) <= 0:
            raise ValueError(f"lengths {text!r}: expected constant:N, uniform:LONGEST or lognormal:MEAN:SIGMA[:LONGEST], in tokens")
        return make(*numbers)
    path = Path(text)
    if not path.is_file():
        raise ValueError(f"lengths {text!r}: neither a file nor constant:N, uniform:LONGEST, lognormal:MEAN:SIGMA[:LONGEST]")
    listed = np.array(_numbers(":".join(path.read_text(encoding="utf-8").split()), text))
    if not listed.size or listed.min() < 1:
        raise ValueError(f"lengths {text!r}: each line of the file must contain a length of at least 1")
    return LengthDistribution(path.name, lambda random, count: random.choice(listed, count), float(listed.mean()), float(listed.max()))


def _numbers(text: str, whole: str) -> list[float]:
    """The numbers between colons. Raises `ValueError`, which quotes the option `whole`, for anything else."""
    try:
        numbers = [float(word) for word in text.split(":") if word]
    except ValueError:
        raise ValueError(f"lengths {whole!r}: {text[:40]!r} contains something other than numbers") from None
    if not np.isfinite(numbers).all():
        raise ValueError(f"lengths {whole!r}: a length must be finite")
    return numbers


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """Seconds of one decode step of an engine by the number of samples in it, interpolated linearly between points.

    Constant below the first point; constant tokens per second beyond the last one.
    """

    samples: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, samples: int) -> float:
        if samples > self.samples[-1]:
            return self.seconds[-1] * samples / self.samples[-1]
        return float(np.interp(samples, self.samples, self.seconds))


def linear(base_s: float, each_s: float, *, most: int = 1 << 20) -> DecodeTimes:
    """Decode steps of `base_s` plus `each_s` per sample: weights are read once, the KV cache for each sample."""
    return DecodeTimes((0.0, float(most)), (base_s, base_s + each_s * most))


def from_speeds(points: Sequence[tuple[int, float]]) -> DecodeTimes:
    """Decode times from (concurrent samples, tokens per second of one engine).

    Raises `ValueError`: no point, one that is not positive, or a step that is faster with more samples.
    """
    ordered = sorted(points)
    if not ordered or any(samples < 1 or not speed > 0 for samples, speed in ordered):
        raise ValueError("--speed: expected at least one SAMPLES:TOKENS_PER_S, both above 0")
    if len({samples for samples, _ in ordered}) < len(ordered):
        raise ValueError("--speed: a number of concurrent samples occurs twice; list each number once")
    times = [samples / speed for samples, speed in ordered]
    if any(later < earlier * 0.999 for earlier, later in itertools.pairwise(times)):
        raise ValueError("--speed: a decode step would get faster with more concurrent samples; give the tokens/s of all samples together")
    return DecodeTimes(tuple(float(samples) for samples, _ in ordered), tuple(times))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """All inputs that determine the time of a run."""

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
