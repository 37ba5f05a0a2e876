"""RollArt's rules on the system, one switched off at a time: timed environments, rewards, engine and trainer, all else real."""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.support.command import ROOT
from benchmarks.support.timed import pages
from benchmarks.support.timed.stages import Stages
from benchmarks.support.timed.workers import Fleet, Measured, fleet
from penstock.pipeline.launch.planning.workload import DecodeTimes, Workload, constant
from penstock.pipeline.scheduling.rules import preset

GROUPS, SAMPLES, STEPS, LEFT_OUT = 16, 8, 12, 3
"""Steps until the pipeline is full are left out."""
TURN_TOKENS, TURN_S = 5, 2.0
ENVIRONMENT = {"mean": 10.0, "sigma": 5.0, "turns": 10, "uneven": 0.6}
TRAIN_S = 150.0
"""Seconds of a step's training: as long as most trajectories, so that rollout with its stragglers takes about twice as long."""
REWARD_S = 40.0
"""Seconds of the reward of one group, as of a judge model."""
SLOTS = 8
"""Groups that the reward service scores at the same time."""
IN_SECONDS = ("mean", "sigma")


TASKS = {"SWE-bench": 40, "WebShop": 17, "FrozenLake": 60, "GEM-math": 3, "GEM-game": 1}
"""Turns of a trajectory: the middle of the paper's ranges."""
PREFILL = {"SWE-bench": 0.8, "WebShop": 0.8, "FrozenLake": 0.8, "GEM-math": 0.1, "GEM-game": 0.1}
"""Assumed share of prefill in a turn's generation, if both kinds of machines had the better one's speed."""
MACHINES = {"compute": (1.0, 4.0 / 3.35), "bandwidth": (989.0 / 148.0, 1.0)}
"""Time of prefill and of decoding on H800 (989 TFLOP/s, 3.35 TB/s) and H20 (148 TFLOP/s, 4.0 TB/s), over that of the better one."""
POOLS = {"compute": ("SWE-bench", "WebShop", "FrozenLake"), "bandwidth": ("GEM-math", "GEM-game")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One arrangement: its schedule, and what is switched off."""

    mode: str = "bounded"
    max_lag: int | None = None
    together: bool = False
    """Lock-step: each turn waits for the slowest environment of all."""
    inline: bool = False
    """Rewards of all groups are computed one after another."""
    slots: int = SLOTS
    published: str = "-"
    """The paper's step time over RollArt's, if it has one."""
    environment: Mapping[str, float] = field(default_factory=dict)
    more_samples: int = 0
    """r of K + r."""
    more_groups: int = 0
    """s of R + s."""
    tasks: bool = False
    """Five tasks on two kinds of machines instead of one task."""
    by_task: bool = True
    """Prompts of a task are sampled by the suitable machine; otherwise by any."""


FULL = "all rules"
VARIANTS: Mapping[str, Variant] = {
    FULL: Variant(published="1"),
    "no overlap (Sync+)": Variant(mode="synchronous", published="2.05"),
    "weights between rounds (One-off)": Variant(mode="one_step_off", published="1.35"),
    "no bound of 1, lag 4 (AReaL)": Variant(mode="in_flight", max_lag=4, published="1.31"),
    "lock-step environments (R2 off)": Variant(mode="synchronous", together=True),
    "rewards one after another (R3 off)": Variant(inline=True),
    "alpha = 2": Variant(max_lag=2),
    "4 reward slots": Variant(slots=4),
    "2 reward slots": Variant(slots=2),
    "32 reward slots": Variant(slots=32),
    "1 in 10 resets fails": Variant(environment={"failing": 0.1, "failing_s": 30.0}, published="1.40"),
    "12 samples started for 8": Variant(more_samples=4),
    "18 groups started for 16": Variant(more_groups=2),
    "five tasks": Variant(tasks=True, environment={"uneven": 0.2}),
    "five tasks on any machine (R1 off)": Variant(tasks=True, by_task=False, environment={"uneven": 0.2}),
}


def columns(row: int) -> dict[str, Any]:
    """Task, its turns, and the machine of a row that any machine may sample."""
    task = list(TASKS)[row % len(TASKS)]
    return {"task": task, "turns": TASKS[task], "machine": list(POOLS)[row % len(POOLS)]}


def paces() -> tuple[tuple[float, ...], ...]:
    """For each machine, the time of a turn of each task, over the time at the better speeds."""
    return tuple(tuple(PREFILL[task] * prefill + (1.0 - PREFILL[task]) * decode for task in TASKS) for prefill, decode in MACHINES.values())


def job(variant: Variant, *, speed_up: float) -> tuple[Workload, Stages, dict[str, Any]]:
    """Workload, stages, and sections of the configuration."""
    sizes = {
        "prompts_per_step": GROUPS, "samples_per_prompt": SAMPLES, "steps_per_version": 1, "oversample": variant.more_samples,
        "oversample_groups": variant.more_groups,
    }  # fmt: skip
    schedule = preset(variant.mode, max_lag=variant.max_lag, **sizes)
    work = Workload(
        schedule=schedule, steps=STEPS, lengths=constant(TURN_TOKENS), engines=1, concurrency=1 << 14, slots=4 * GROUPS,
        decode=DecodeTimes((1.0, 1e6), (TURN_S / TURN_TOKENS,) * 2), train_group_s=TRAIN_S / GROUPS,
    )  # fmt: skip
    options = {**ENVIRONMENT, **variant.environment}
    options = {name: value / speed_up if name in IN_SECONDS or name.endswith("_s") else value for name, value in options.items()}
    options |= {"together": GROUPS * SAMPLES} if variant.together else {}
    words = "&".join(f"{name}={value}" for name, value in options.items())
    reward = f"{ROOT / 'benchmarks/support/timed/rewards.py'}:{'inline' if variant.inline else 'served'}?seconds={REWARD_S / speed_up}"
    sections = {
        "environment": {
            "source": f"{ROOT / 'benchmarks/support/sleeping_environment.py'}:Sleeping?{words}", "processes": 1, "in_flight": 1 << 12,
            "max_turns": 100, "max_tokens": 2048, "retries": 8,
        },
        "reward": {"functions": [reward], "concurrency": variant.slots}, "sampling": {"max_new_tokens": TURN_TOKENS + 1},
    }  # fmt: skip
    stages = replace(Stages.of(work, speed_up=speed_up), samples=1)
    if variant.tasks:
        field = "task" if variant.by_task else "machine"
        sections["data"] = {"tag_field": field}
        sections["rollout"] = {
            "pools": {pool: {"workers": 1, "tags": list(tasks) if variant.by_task else [pool]} for pool, tasks in POOLS.items()}
        }
        work, stages = replace(work, engines=len(POOLS)), replace(stages, paces=paces())
    return work, stages, {**sections, "columns": columns} if variant.tasks else sections


def figures(name: str, measured: Measured, *, speed_up: float) -> dict[str, Any]:
    """A variant's step time, lag, and utilisation of the reward service."""
    ends = [speed_up * ended for ended, _ in measured.steps]
    step_s = (ends[-1] - ends[LEFT_OUT]) / (len(ends) - 1 - LEFT_OUT)
    report = measured.report
    return {
        "variant": name, "step_s": step_s, "published": VARIANTS[name].published, "lag_mean": report["lag"]["mean"],
        "reward_utilisation": report["scoring"]["utilisation"], "waiting": report["time"]["trainer_waiting_ratio"],
        "losses": report["episodes"]["losses"], "stale": report["groups"]["stale"] + report["groups"]["abandoned"],
    }  # fmt: skip


def measure(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """All variants, several at once."""
    with fleet("rollart") as runs:
        rows = []
        for row in runs.map(lambda name: _one(runs, name, speed_up=chosen.speed_up), chosen.variants, at_once=chosen.at_once):
            rows.append(row)
            print(f"{row['variant']}: {row['step_s']:.0f} s a step", file=sys.stderr, flush=True)
    return rows


def _one(runs: Fleet, name: str, *, speed_up: float) -> dict[str, Any]:
    work, stages, sections = job(VARIANTS[name], speed_up=speed_up)
    return figures(name, runs.run(work, stages, **sections), speed_up=speed_up)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The variants for the page."""
    full = next((row["step_s"] for row in rows if row["variant"] == FULL), statistics.fmean(row["step_s"] for row in rows))
    lines = [
        [
            row["variant"], f"{row['step_s']:.0f}", f"{row['step_s'] / full:.2f}", row["published"], f"{row['waiting']:.0%}",
            f"{row['lag_mean']:.2f}", f"{row['reward_utilisation']:.0%}", str(row["stale"]),
        ]
        for row in rows
    ]  # fmt: skip
    heads = ("", "step s", "of all rules", "paper", "trainer waits", "mean lag", "reward service used", "groups aborted or stale")
    return pages.markdown(heads, lines)


def plot(rows: Sequence[dict[str, Any]]) -> None:
    """Step times as bars."""
    canvas, axes = pages.figure(width=7.0)
    axes.barh([row["variant"] for row in rows], [row["step_s"] for row in rows], color="#0b7285", height=0.6)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step, in the paper's time")
    pages.save(canvas, "papers-rollart")


def main(chosen: argparse.Namespace) -> None:
    """Measure, print, and write the page if asked."""
    rows = measure(chosen)
    print(json.dumps(rows, indent=1) if chosen.json else table(rows))
    if chosen.write:
        pages.replace_table("rollart", table(rows))
        plot(rows)
