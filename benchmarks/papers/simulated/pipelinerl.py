"""PipelineRL's case study (arXiv 2509.19128): in-flight updates against rollout and training in turns, on 128 accelerators.

The paper's formulas are pure functions; the simulator runs the split that they give, under the scheduling rules of a run.
"""

import math
from dataclasses import dataclass

from benchmarks.support.comparison import Comparison, Figure
from penstock.pipeline.launch.planning.engine import Outcome
from penstock.pipeline.launch.planning.simulator import simulate
from penstock.pipeline.launch.planning.workload import DecodeTimes, Workload, linear, uniform
from penstock.pipeline.scheduling.rules import preset

ACCELERATORS = SAMPLES_PER_STEP = 128
TRAIN_TOKEN = 4.918
"""Time of one accelerator for training one token, in the paper's unit, in which a flash is one."""
MAX_LAG = 133
"""Optimizer steps; also the steps of the conventional run with one set of samples."""
PUBLISHED_BATCH, PUBLISHED_UTILISATION = 192, 0.384
PUBLISHED_CONVENTIONAL_RATE = 18.3
"""Tokens per unit of time that the conventional run generates."""
LONGEST = 1000
"""Lengths are uniform from 1 to this; the ratio of rates does not depend on it."""
WARM_UP, MEASURED = 6, 2
"""Periods of `MAX_LAG` steps: until the initial queue of samples that start together has drained, and those that are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """`generating` accelerators generate `batch` samples each; rates are tokens per unit of time."""

    batch: int
    generating: int
    generation_rate: float
    train_rate: float

    @property
    def rate(self) -> float:
        """The slower of the two."""
        return min(self.generation_rate, self.train_rate)


def token_lag_bound(*, batch: int, generating: int, longest: float, mean: float, samples_per_step: int) -> int:
    """g_max = ceil(H·I·L / (L̄·B)): most optimizer steps between generating a token and training it."""
    return math.ceil(batch * generating * longest / (mean * samples_per_step))


def best_split(decode: DecodeTimes, *, accelerators: int, samples_per_step: int, max_lag: int, train_token: float) -> Split:
    """The batch H and the generating accelerators I that maximise min(U(H)·I, (N - I) / τ) with g_max within `max_lag`."""
    splits = []
    for generating in range(1, accelerators):
        # g_max = ceil(2·H·I / B), as the longest of uniform lengths is twice the mean
        batch = max_lag * samples_per_step // (2 * generating)
        for size in {batch, min(batch, int(decode.samples[-1]))} - {0}:
            generation, train = size / decode(size) * generating, (accelerators - generating) / train_token
            splits.append(Split(batch=size, generating=generating, generation_rate=generation, train_rate=train))
    return max(splits, key=lambda split: (split.rate, -split.generating))


def conventional_rates(decode: DecodeTimes, *, accelerators: int, each: int, train_token: float) -> tuple[float, float, float]:
    """(generation, training, both in turns): all accelerators generate `each` samples of uniform lengths, then all train.

    r_gen = S·L̄ / Σ_l (h(l)/N) / U(h(l)/N), where h(l) samples have at least l tokens.
    """
    steps = sum(decode(round(each * (1 - token / LONGEST)) or 1) for token in range(LONGEST))
    generation, train = accelerators * each * (LONGEST + 1) / 2 / steps, accelerators / train_token
    return generation, train, 1 / (1 / generation + 1 / train)


def through_published_points() -> DecodeTimes:
    """The straight line for a decode step through the paper's U(192) and its conventional generation rate."""
    at_batch = PUBLISHED_BATCH / PUBLISHED_UTILISATION
    # all accelerators generate MAX_LAG samples each, of which half are in flight on average
    at_half = ACCELERATORS * MAX_LAG / 2 / PUBLISHED_CONVENTIONAL_RATE
    each = (at_batch - at_half) / (PUBLISHED_BATCH - MAX_LAG / 2)
    return linear(at_batch - each * PUBLISHED_BATCH, each, most=PUBLISHED_BATCH)


def proportional() -> DecodeTimes:
    """The paper's other curve, U(h) = 0.002·min(h, 200): a decode step takes 500 up to 200 samples."""
    return DecodeTimes((200.0,), (500.0,))


def in_flight(split: Split, *, decode: DecodeTimes) -> tuple[float, float, int]:
    """(tokens per unit of time, mean lag of a token, largest of a group) of the simulated pipeline in its steady state."""
    engines = split.generating
    schedule = preset("in_flight", prompts_per_step=SAMPLES_PER_STEP, samples_per_prompt=1, steps_per_version=1, max_lag=2 * MAX_LAG)
    work = Workload(
        schedule=schedule,
        steps=(WARM_UP + MEASURED + 2) * MAX_LAG,  # no prompt is admitted for steps beyond the last: the run's end is not measured
        lengths=uniform(LONGEST),
        engines=engines,
        concurrency=split.batch,
        slots=split.batch + 2,
        decode=decode,
        train_token_s=TRAIN_TOKEN / (ACCELERATORS - engines),
    )
    steps = simulate(work).steps[WARM_UP * MAX_LAG : (WARM_UP + MEASURED) * MAX_LAG]
    tokens = sum(step.tokens for step in steps)
    passed = steps[-1].ended_s - steps[0].ended_s
    return (tokens - steps[0].tokens) / passed, sum(step.token_lag for step in steps) / tokens, max(max(step.lags) for step in steps)


def in_turns(decode: DecodeTimes) -> Outcome:
    """One simulated round of the conventional run: all accelerators generate MAX_LAG·B samples, then all train."""
    schedule = preset("synchronous", prompts_per_step=SAMPLES_PER_STEP, samples_per_prompt=1, steps_per_version=MAX_LAG)
    work = Workload(
        schedule=schedule, steps=MAX_LAG, lengths=uniform(LONGEST), engines=ACCELERATORS, concurrency=MAX_LAG, slots=MAX_LAG + 2,
        decode=decode, train_token_s=TRAIN_TOKEN / ACCELERATORS,
    )  # fmt: skip
    return simulate(work)


def reproduce() -> Comparison:
    """The case study."""
    decode, other = through_published_points(), proportional()
    limits = {"accelerators": ACCELERATORS, "samples_per_step": SAMPLES_PER_STEP, "max_lag": MAX_LAG}
    split = best_split(decode, **limits, train_token=TRAIN_TOKEN)
    second = best_split(other, **limits, train_token=TRAIN_TOKEN)
    generation, train, turns = conventional_rates(decode, accelerators=ACCELERATORS, each=MAX_LAG, train_token=TRAIN_TOKEN)
    _, _, second_turns = conventional_rates(other, accelerators=ACCELERATORS, each=MAX_LAG, train_token=TRAIN_TOKEN)
    rate, token_lag, most = in_flight(split, decode=decode)
    bound = token_lag_bound(
        batch=split.batch, generating=split.generating, longest=LONGEST, mean=(LONGEST + 1) / 2, samples_per_step=SAMPLES_PER_STEP
    )
    simulated_turns = in_turns(decode).tokens_per_s
    figures = (
        Figure(name="best batch per engine, H", simulated=split.batch, published=192, tolerance=0.02),
        Figure(name="best number of generating accelerators, I", simulated=split.generating, published=44, tolerance=0.0),
        Figure(name="tokens trained, in flight, by the formula", simulated=split.rate, published=16.9, tolerance=0.02),
        Figure(name="tokens trained, in flight, simulated", simulated=rate, published=16.9, tolerance=0.02),
        Figure(name="tokens trained in turns, simulated", simulated=simulated_turns, published=10.74, tolerance=0.02),
        Figure(name="speed-up by the formula", simulated=split.rate / turns, published=1.57, tolerance=0.02, unit="x"),
        Figure(name="speed-up, simulated", simulated=rate / simulated_turns, published=1.57, tolerance=0.02, unit="x"),
        Figure(name="mean lag of a token, g_max / 3", simulated=token_lag, published=MAX_LAG / 3, tolerance=0.02),
        Figure(name="U(h) = 0.002·min(h, 200): in flight", simulated=second.rate, published=17.0, tolerance=0.02),
        Figure(name="U(h) = 0.002·min(h, 200): in turns", simulated=second_turns, published=10.3, tolerance=0.02),
    )
    return Comparison(
        paper="PipelineRL, arXiv 2509.19128, case study",
        inputs={
            "accelerators, N": ACCELERATORS,
            "samples per optimizer step, B": SAMPLES_PER_STEP,
            "lag allowed, g_max": MAX_LAG,
            "training time of a token, τ": TRAIN_TOKEN,
            "lengths": f"uniform from 1 to L (simulated with L = {LONGEST})",
            "U(192)": PUBLISHED_UTILISATION,
            "generation rate of the conventional run": PUBLISHED_CONVENTIONAL_RATE,
        },
        assumed={
            "U(h) up to 192": "h / (a + b·h): a decode step reads the weights once and the cache of each sample",
            "U(h) above 192": "constant, as no point is published; with the line continued 198 x 43 would be best, 0.4 % faster",
        },
        figures=figures,
        notes=(
            "The conventional generation rate is an input, as it fixes U(h) below 192; the split, both rates in flight, the rate in turns "
            "and the lag follow.",
            "The two last figures use no input but the formula for U(h).",
        ),
        more={
            "speedup": rate / simulated_turns,
            "speedup_by_formula": split.rate / turns,
            "split": {
                "batch": split.batch,
                "generating": split.generating,
                "generation_rate": split.generation_rate,
                "train_rate": split.train_rate,
            },
            "conventional": {"generation_rate": generation, "train_rate": train, "rate": turns, "simulated_rate": simulated_turns},
            "token_lag_mean": token_lag,
            "lag_bound": bound,
            "lag_max": most,
            "proportional": {"batch": second.batch, "generating": second.generating, "rate": second.rate, "conventional": second_turns},
        },
    )
