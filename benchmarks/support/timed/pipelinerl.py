"""PipelineRL's case study on the system: timed engines and trainer, all else real. Times are in the paper's flashes."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.papers.simulated import pipelinerl as paper
from benchmarks.support.timed import pages
from benchmarks.support.timed.stages import Stages
from benchmarks.support.timed.workers import Measured, fleet
from penstock.pipeline.launch.planning.simulator import simulate
from penstock.pipeline.launch.planning.workload import DecodeTimes, Workload, uniform
from penstock.pipeline.scheduling.rules import preset

ACCELERATORS, SAMPLES_PER_STEP, MAX_LAG, SAMPLES_PER_PROMPT = 32, 224, 19, 2
SIZES = {"prompts_per_step": SAMPLES_PER_STEP // SAMPLES_PER_PROMPT, "samples_per_prompt": SAMPLES_PER_PROMPT}
"""A quarter of the paper's machines and as many samples for each: 19 x 224 / 32 = 133 x 128 / 128."""
LONGEST = 200
PERIODS = (1, 1, 1)
"""Periods of `MAX_LAG` steps: warming up, measured, and the end, for which no new prompts come."""
CURVE = (16, 32, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of accelerators of the curve, each with B = 128 and g_max = 133."""


def together(decode: DecodeTimes, *, accelerators: int) -> DecodeTimes:
    """Decode times of one engine that stands for several accelerators, over which its samples are spread evenly."""
    return DecodeTimes(tuple(count * accelerators for count in decode.samples), decode.seconds)


def in_flight() -> tuple[Workload, paper.Split]:
    """The pipeline with the best split; all its generating accelerators are one engine."""
    decode = paper.through_published_points()
    split = paper.best_split(
        decode, accelerators=ACCELERATORS, samples_per_step=SAMPLES_PER_STEP, max_lag=MAX_LAG, train_token=paper.TRAIN_TOKEN
    )
    schedule = preset("in_flight", **SIZES, steps_per_version=1, max_lag=2 * MAX_LAG)
    rows = split.batch * split.generating
    work = Workload(
        schedule=schedule, steps=sum(PERIODS) * MAX_LAG, lengths=uniform(LONGEST), engines=1, concurrency=rows,
        slots=2 * rows // SAMPLES_PER_PROMPT, decode=together(decode, accelerators=split.generating),
        train_token_s=paper.TRAIN_TOKEN / (ACCELERATORS - split.generating),
    )  # fmt: skip
    return work, split


def in_turns() -> Workload:
    """One round of the conventional run; its accelerators are two engines."""
    schedule = preset("synchronous", **SIZES, steps_per_version=MAX_LAG)
    half = ACCELERATORS // 2
    rows = MAX_LAG * SAMPLES_PER_STEP // 2
    return Workload(
        schedule=schedule, steps=MAX_LAG, lengths=uniform(LONGEST), engines=2, concurrency=rows, slots=3 * rows // SAMPLES_PER_PROMPT,
        decode=together(paper.through_published_points(), accelerators=half), train_token_s=paper.TRAIN_TOKEN / ACCELERATORS,
    )  # fmt: skip


def steady(steps: Sequence[tuple[float, float]]) -> float:
    """Tokens per flash over the measured periods, of (end, tokens) for each step."""
    first, last = PERIODS[0] * MAX_LAG, (PERIODS[0] + PERIODS[1]) * MAX_LAG
    return sum(tokens for _, tokens in steps[first + 1 : last]) / (steps[last - 1][0] - steps[first][0])


def measured_steps(measured: Measured, *, speed_up: float) -> list[tuple[float, float]]:
    """(end in flashes, tokens) of each step of a run."""
    return [(speed_up * ended, tokens) for ended, tokens in measured.steps]


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """Rates of both runs: by the formulas, simulated, and on the system."""
    pipeline, split = in_flight()
    turns = in_turns()
    speed_up = SAMPLES_PER_STEP * (LONGEST + 1) / 2 / split.rate / chosen.step_s
    with fleet("pipelinerl") as runs:
        before = runs.broker_cpu_s()
        flying = runs.run(pipeline, Stages.of(pipeline, speed_up=speed_up))
        print("in flight is done", file=sys.stderr, flush=True)
        conventional = runs.run(turns, Stages.of(turns, speed_up=speed_up))
        broker_s = runs.broker_cpu_s() - before
    simulated_rate = steady([(step.ended_s, step.tokens) for step in simulate(pipeline).steps])
    rate = steady(measured_steps(flying, speed_up=speed_up))
    conventional_tokens = sum(tokens for _, tokens in conventional.steps)
    turn_rate = conventional_tokens / (speed_up * conventional.report["rounds"][0]["rollout_to_train_end_s"])
    each = MAX_LAG * SAMPLES_PER_STEP // ACCELERATORS
    limits = {"accelerators": ACCELERATORS, "train_token": paper.TRAIN_TOKEN}
    _, _, formula_turns = paper.conventional_rates(paper.through_published_points(), each=each, **limits)
    wall_s = flying.report["time"]["train_s"] + conventional.report["time"]["train_s"]
    workers_s = sum(flying.cpu_s.values()) + sum(conventional.cpu_s.values())
    return {
        "in_flight": {"formula": split.rate, "simulated": simulated_rate, "measured": rate},
        "in_turns": {"formula": formula_turns, "simulated": simulate(turns).tokens_per_s, "measured": turn_rate},
        "lag": flying.report["lag"],
        "step_s": chosen.step_s,
        "cpu_share": workers_s / wall_s,
        "broker_share": broker_s / wall_s,
    }


def curve() -> list[tuple[int, float]]:
    """(accelerators, speed-up at equal largest lag) by the formulas."""
    decode, points = paper.through_published_points(), []
    for count in CURVE:
        limits = {"samples_per_step": paper.SAMPLES_PER_STEP, "max_lag": paper.MAX_LAG}
        split = paper.best_split(decode, accelerators=count, train_token=paper.TRAIN_TOKEN, **limits)
        each = max(1, paper.MAX_LAG * paper.SAMPLES_PER_STEP // count)
        rates = paper.conventional_rates(decode, accelerators=count, each=each, train_token=paper.TRAIN_TOKEN)
        points.append((count, split.rate / rates[2]))
    return points


def table(figures: dict[str, Any]) -> str:
    """The figures for the page; rates are scaled to the paper's 128 accelerators."""
    scale = paper.ACCELERATORS / ACCELERATORS
    rows = []
    for name, published in (("in_flight", 16.9), ("in_turns", 10.74)):
        rates = figures[name]
        rows.append([f"tokens per flash, {name.replace('_', ' ')}", f"{published:g}", *(f"{scale * rates[way]:.2f}" for way in WAYS)])
    rows.append(["speed-up", "1.57", *(f"{figures['in_flight'][way] / figures['in_turns'][way]:.2f}" for way in WAYS)])
    return pages.markdown(("", "paper", "formula", "simulator", "system"), rows)


WAYS = ("formula", "simulated", "measured")


def plot(figures: dict[str, Any]) -> None:
    """Speed-up by the number of accelerators, with the system's at 128."""
    canvas, axes = pages.figure(width=6.0)
    axes.plot(*zip(*curve(), strict=True), "-o", color="#0b7285", ms=3, label="formula, B = 128, lag at most 133")
    measured = figures["in_flight"]["measured"] / figures["in_turns"]["measured"]
    axes.plot([paper.ACCELERATORS], [measured], "s", color="#2b8a3e", label="system")
    axes.plot([paper.ACCELERATORS], [1.57], "x", color="#e8590c", ms=8, label="paper")
    axes.axhline(1.0, color="grey", lw=0.5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(CURVE, map(str, CURVE))
    axes.set_xlabel("accelerators, N")
    axes.set_ylabel("tokens trained per time, in flight over in turns")
    axes.legend(fontsize=8)
    pages.save(canvas, "papers-pipelinerl")


def main(chosen: argparse.Namespace) -> None:
    """Measure, print, and write the page if asked."""
    figures = measure(chosen)
    print(json.dumps(figures, indent=1) if chosen.json else table(figures))
    share = f"The workers compute {figures['cpu_share']:.0%} and the broker {figures['broker_share']:.0%} of the time on one core"
    text = f"{share}, with steps of {figures['step_s']:g} s."
    if not chosen.json:
        print("", text, sep="\n")
    if chosen.write:
        pages.replace_table("pipelinerl", f"{table(figures)}\n\n{text}")
        plot(figures)
