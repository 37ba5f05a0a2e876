"""Completion lengths in tokens: named distributions, and the lengths of a recorded run.

The lengths of a group depend on (seed, group) only, so that all compared schedules generate the same samples.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]
Sampler = Callable[[np.random.Generator, int], npt.NDArray[np.float64]]
"""(generator, count) -> that many lengths."""


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Lengths of completions, at least one token each."""

    name: str
    sample: Sampler
    mean: float
    """Expected length."""
    longest: float
    """Upper limit; `inf` without one."""

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
    """The lengths of a run's groups: each group as recorded; later groups are like a random recorded one.

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
    """A distribution by name: `constant:N`, `uniform:LONGEST`, `lognormal:MEAN:SIGMA[:LONGEST]`, or a file with a length a line.

    Example:
        parse("uniform:1000").mean  # -> 500.5

    Raises:
        ValueError: no such distribution, or a length below 1.
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
        raise ValueError(f"lengths {text!r}: the file needs a length of at least 1 in each line")
    return LengthDistribution(path.name, lambda random, count: random.choice(listed, count), float(listed.mean()), float(listed.max()))


def _numbers(text: str, whole: str) -> list[float]:
    try:
        numbers = [float(word) for word in text.split(":") if word]
    except ValueError:
        raise ValueError(f"lengths {whole!r}: {text[:40]!r} holds something other than numbers") from None
    if not np.isfinite(numbers).all():
        raise ValueError(f"lengths {whole!r}: a length must be finite")
    return numbers
