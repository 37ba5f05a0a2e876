"""RollArt's environments of uneven latency (arXiv 2512.22560) with real workers: trajectory-level rollout and redundancy.

    python -m benchmarks environments turns --sigma 1 3 5 10 --rounds 4
    python -m benchmarks environments redundancy --rounds 8
    python -m benchmarks environments redundancy --failing 0.1 --rounds 8

Feeder, rollout worker, scorer and trainer are those of every run, on the in-memory log; environment (a child process) and engine sleep.
`turns`: 16 groups of 8, turns of N(10 s, sigma), about ten a trajectory (standard deviation 6), 2 s to generate one, all scaled by
`--scale`; in lock-step every turn waits for the slowest of all. A round lasts from the start of its first sample to the end of its last.
`redundancy`: 32 groups of 8 are needed; more groups of more samples start, a group closes with its first 8, and the round ends when 32
have closed. Times are log-normal, deviation 0.15 within a group and 0.30 between groups; a failing reset costs three median durations.
Rounds are synchronous; the first one starts the environments' process and is left out.
"""

import argparse
import json
import statistics
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.support.command import ROOT, parser_of, with_numbers
from benchmarks.support.sleeping_engine import TOKENS, kind
from penstock.infra.engines.registry import ENGINES
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.config.load import from_table
from penstock.pipeline.inspect.report.summary import collect
from penstock.pipeline.launch.create import create
from penstock.topics import groups, rollouts
from tests.support.worker_set import PIPELINE, WorkerSet, records_of

PUBLISHED = {1: 1.23, 3: 1.51, 5: 1.69, 7: 2.18, 10: 2.27}
"""RollArt: sigma (s) -> lock-step over trajectory-level time."""
PUBLISHED_REDUNDANCY = {(32, 8): 1.0, (36, 8): 1.30, (32, 12): 1.24, (36, 12): 1.62, (34, 10): 1.38}
"""RollArt: groups and samples started, of 32 x 8 needed -> speed-up."""
GROUPS, SAMPLES = 32, 8
TURNS = 4
"""Turns of a trajectory under `redundancy`, where only its whole time matters."""


def environment(**options: float) -> str:
    """Configuration value of the environment with these options."""
    words = "&".join(f"{name}={value}" for name, value in options.items())
    return f"{ROOT / 'benchmarks/support/sleeping_environment.py'}:Sleeping?{words}"


def recorded(
    model: Path, source: str, *, rounds: int, started: int, samples: int, oversample: int = 0, turn_s: float = 0.0
) -> tuple[MemoryLog, str]:
    """Log and id of a run of `rounds` rounds after the first."""
    log, run = MemoryLog(), f"uneven-{uuid.uuid4().hex[:6]}"
    with tempfile.TemporaryDirectory() as folder, patch.dict(ENGINES, {"sleeping": kind(turn_s / TOKENS)}):  # type: ignore[arg-type]
        data = Path(folder) / "data.jsonl"
        data.write_text("".join(json.dumps({"prompt": "lake ", "seed": row, "answer": ""}) + "\n" for row in range(started * (rounds + 1))))
        table: dict[str, Mapping[str, Any]] = {
            "run": {"steps": rounds + 1}, "model": {"path": str(model)}, "data": {"source": str(data), "max_prompt_tokens": 16},
            "environment": {"source": source, "processes": 1, "in_flight": 4096, "max_turns": 100, "max_tokens": 1024, "retries": 8},
            "reward": {"functions": ["environment"]},
            "schedule": {"mode": "synchronous", "prompts_per_step": started, "samples_per_prompt": samples, "oversample": oversample},
            "sampling": {"max_new_tokens": TOKENS + 1}, "algorithm": {"filter_zero_variance": False},
            "rollout": {"engine": "sleeping", "workers": 1, "slots": started},
            "trainer": {"lr": 1e-9, "export": False, "checkpoint_every": 0, "micro_batch_tokens": 65536}, "mlflow": {"enabled": False},
        }  # fmt: skip
        with WorkerSet(log, run) as worker_set:
            config = from_table(dict(table))
            create(config, log=log, run_id=run, notify=lambda _: None)
            worker_set.start_all(config, PIPELINE)
            worker_set.wait(limit_s=3600.0)
    return log, run


def round_times(log: MemoryLog, run: str, *, started: int) -> list[float]:
    """Seconds of each round, until the needed groups have closed."""
    first: dict[int, list[float]] = {}
    closed: dict[int, list[float]] = {}
    for record in records_of(log, f"{run}.groups"):
        group = groups.read(record, run=run)[1]
        number = group.group // started
        first.setdefault(number, []).extend(sample.rollout.started_ns / 1e9 for sample in group.samples)
        closed.setdefault(number, []).append(max(sample.rollout.ended_ns for sample in group.samples) / 1e9)
    last = min(started, GROUPS) - 1
    return [sorted(closed[number])[last] - min(first[number]) for number in sorted(closed)][1:]


def published_turns(log: MemoryLog, run: str) -> float:
    """Mean turns of the trajectories that were published."""
    return statistics.fmean(
        sum(turn.source == "model" for turn in sample.turns or ())
        for record in records_of(log, f"{run}.rollouts")
        for sample in rollouts.read_all(record, run=run)[1]
    )


def turns(model: Path, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Lock-step and trajectory-level rounds, alternating."""
    rows = []
    scale, size = chosen.scale, 16 * 8
    for sigma in chosen.sigma:
        options = {"mean": 10.0 * scale, "sigma": sigma * scale, "turns": 10, "uneven": 0.6}
        times: dict[int, list[float]] = {}
        for together in (size, 0):
            source = environment(**options, together=together)
            log, run = recorded(model, source, rounds=chosen.rounds, started=16, samples=8, turn_s=2.0 * scale)
            times[together] = round_times(log, run, started=16)
        locked, free = (statistics.fmean(times[together]) for together in (size, 0))
        ratio, published = locked / free, PUBLISHED.get(int(sigma))
        rows.append({"sigma_s": sigma, "lock_step_s": locked, "trajectory_s": free, "speed_up": ratio, "published": published})
        off = f", RollArt {published:.2f}x, {ratio / published - 1:+.0%}" if published else ""
        print(f"sigma {sigma:4.1f} s: lock-step {locked:.2f} s, by trajectory {free:.2f} s a round: {ratio:.2f}x{off}", flush=True)
    return rows


def redundancy(model: Path, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Rounds with more groups and more samples than needed, against exactly those, which have no failing resets."""
    rows: list[dict[str, Any]] = []
    median_s, baseline = 40.0 * chosen.scale * TURNS, 0.0
    options = {"mean": median_s / TURNS, "turns": TURNS, "within": 0.15, "between": 0.30}
    for started, samples in [(GROUPS, SAMPLES)] * bool(chosen.failing) + list(PUBLISHED_REDUNDANCY):
        failing = chosen.failing if baseline else 0.0
        source = environment(**options, failing=failing, failing_s=3.0 * median_s)
        log, run = recorded(model, source, rounds=chosen.rounds, started=started, samples=SAMPLES, oversample=samples - SAMPLES)
        seconds = statistics.fmean(round_times(log, run, started=started))
        baseline = baseline or seconds
        episodes = collect(log, run)["episodes"]
        row = {
            "groups": started, "samples": samples, "failing": failing, "round_s": seconds, "speed_up": baseline / seconds,
            "published": None if chosen.failing else PUBLISHED_REDUNDANCY[started, samples], "losses": episodes["losses"],
            "published_turns": published_turns(log, run), "dropped": episodes["dropped"], "dropped_turns": episodes["dropped_turns_mean"],
        }  # fmt: skip
        rows.append(row)
        of = f", RollArt {row['published']:.2f}x" if row["published"] else f", {failing:.0%} of resets fail, {row['losses']} losses"
        dropped = f"; turns: published {row['published_turns']:.2f}, {row['dropped']} dropped after {row['dropped_turns'] or 0:.2f}"
        print(f"{started} groups of {samples:2d}: {seconds:.2f} s a round, {row['speed_up']:.2f}x{of}{dropped}", flush=True)
    return rows


def main(arguments: Sequence[str]) -> None:
    """Run, compare, print."""
    parser = parser_of(__name__, __doc__)
    parser.add_argument("what", choices=("turns", "redundancy"))
    parser.add_argument("--sigma", type=float, nargs="+", default=[1.0, 3.0, 5.0, 10.0])
    with_numbers(parser, failing=0.0, rounds=4, scale=0.01)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    from penstock.pipeline.data.tiny.model import LAKE, make_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", task=LAKE, steps=0)
        rows = {"turns": turns, "redundancy": redundancy}[chosen.what](model, chosen)
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=2))
