"""RolloutPipe's 12 settings on the system: timed engines and trainer, all else real."""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.papers.simulated import rolloutpipe as paper
from benchmarks.support.timed import pages
from benchmarks.support.timed.stages import Stages
from benchmarks.support.timed.workers import Measured, fleet
from penstock.pipeline.launch.planning.simulator import simulate
from penstock.pipeline.launch.planning.workload import Workload

SYNCHRONOUS, COMPLETE, FRONTIER, NARROW = "synchronous", "CGP", "CGP + FGD", "CGP + FGD, 8 rows"
VARIANTS = (SYNCHRONOUS, COMPLETE, FRONTIER, NARROW)
NARROW_ROWS = paper.SAMPLES_PER_PROMPT
"""Concurrent samples of an engine that has one group at a time: with two engines, a frontier of F_w = 2 groups."""
PAPER_SAVING = {32: "30.7 to 32.9 %", 64: "-", 96: "39.8 to 42.3 %"}
PAPER_LEAST = {32: 0.307, 64: 0.307, 96: 0.398}
"""Least saving of a round; no figure of R = 64 is in our extract, and savings grow with R."""
SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One measured round, in the paper's seconds, next to its simulation."""

    workload: str
    groups: int
    variant: str
    end_s: float
    rollout_s: float
    compute_s: float
    first_dispatch_s: float
    simulated_s: float | None
    """None for rows that are filled in random order, which the simulator has not."""
    cpu_s: float
    """Processor seconds of all workers."""

    @property
    def waiting(self) -> float:
        """Share of the round in which the trainer does not compute."""
        return 1 - self.compute_s / self.end_s


def job(speeds: paper.Calibrated, *, groups: int, variant: str, speed_up: float) -> tuple[Workload, Stages]:
    """The workload of one round, and its stages."""
    if variant == NARROW:
        decode_s = speeds.decode_s * NARROW_ROWS / speeds.concurrency
        speeds = replace(speeds, concurrency=NARROW_ROWS, decode_s=decode_s)
    mode = "synchronous" if variant == SYNCHRONOUS else "pipelined"
    work = replace(paper.workload(speeds, groups=groups, mode=mode, seed=SEED), slots=None)
    return work, Stages.of(work, speed_up=speed_up, by_group=variant != COMPLETE)


def as_round(name: str, groups: int, variant: str, work: Workload, stages: Stages, measured: Measured) -> Round:
    """A run's only round."""
    figures, k = measured.report["rounds"][0], stages.speed_up
    return Round(
        workload=name, groups=groups, variant=variant, end_s=k * figures["rollout_to_train_end_s"], rollout_s=k * figures["rollout_s"],
        compute_s=k * figures["compute_s"], first_dispatch_s=k * figures["first_dispatch_s"],
        simulated_s=simulate(work).wall_s if stages.by_group else None, cpu_s=sum(measured.cpu_s.values()),
    )  # fmt: skip


def measure(chosen: argparse.Namespace) -> tuple[list[Round], float]:
    """All chosen rounds, and the broker's processor seconds for all that were measured; those of `chosen.keep` are not repeated."""
    speeds = {}
    for published in paper.PUBLISHED:
        if published.name in chosen.workloads:
            synchronous_s, pipelined_s = paper.targets(published)
            compute_s = published.compute_s[paper.CALIBRATED_AT]
            speeds[published.name] = paper.calibrate(synchronous_s=synchronous_s, pipelined_s=pipelined_s, compute_s=compute_s)
    kept = json.loads(chosen.keep.read_text()) if chosen.keep is not None and chosen.keep.exists() else {"rounds": [], "broker_s": 0.0}
    rounds = [Round(**each) for each in kept["rounds"]]
    done = {(each.workload, each.groups, each.variant) for each in rounds}
    wanted = [(name, groups, variant) for variant in VARIANTS for groups in sorted(chosen.groups, reverse=True) for name in speeds]
    missing = [each for each in wanted if each not in done]
    jobs = [job(speeds[name], groups=groups, variant=variant, speed_up=chosen.speed_up) for name, groups, variant in missing]
    broker_s = kept["broker_s"]
    if jobs:
        with fleet("rolloutpipe") as runs:
            before = runs.broker_cpu_s()
            results = runs.run_all(jobs, at_once=chosen.at_once, notify=lambda text: print(text, file=sys.stderr, flush=True))
            broker_s += runs.broker_cpu_s() - before
        rounds += [as_round(*each, *made, result) for each, made, result in zip(missing, jobs, results, strict=True)]
    if chosen.keep is not None:
        chosen.keep.write_text(json.dumps({"rounds": [asdict(each) for each in rounds], "broker_s": broker_s}))
    return [each for each in rounds if (each.workload, each.groups, each.variant) in wanted], broker_s


def compared(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """A row for each setting: savings by variant, of the attainable, simulated, waiting, first dispatch."""
    by_setting: dict[tuple[str, int], dict[str, Round]] = {}
    for each in rounds:
        by_setting.setdefault((each.workload, each.groups), {})[each.variant] = each
    rows = []
    for (name, groups), variants in sorted(by_setting.items(), key=lambda item: (item[0][1], item[0][0])):
        base = variants[SYNCHRONOUS]
        train_s = base.compute_s
        bound = min(base.rollout_s, train_s) / (base.rollout_s + train_s)
        saving = {variant: 1 - each.end_s / base.end_s for variant, each in variants.items()}
        simulated = {
            variant: 1 - each.simulated_s / base.simulated_s
            for variant, each in variants.items()
            if each.simulated_s is not None and base.simulated_s is not None
        }
        rows.append(
            {
                "workload": name, "groups": groups, "paper": PAPER_SAVING[groups], "bound": bound, "saving": saving,
                "simulated": simulated, "waiting": {variant: each.waiting for variant, each in variants.items()},
                "first_dispatch_s": {variant: each.first_dispatch_s for variant, each in variants.items()},
                "holds": max(saving[FRONTIER], saving[NARROW]) >= PAPER_LEAST[groups],
            }
        )  # fmt: skip
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for the page."""
    heads = (
        "setting", "paper: saving", "simulator", "CGP", "CGP + FGD", "8 rows", "attainable", "share reached",
        "waiting, synchronous", "CGP + FGD", "8 rows", "first dispatch s, CGP", "CGP + FGD", "8 rows",
    )  # fmt: skip
    lines = [
        [
            f"{row['workload']} R={row['groups']}", row["paper"], f"{row['simulated'][FRONTIER]:.1%}",
            *(f"{row['saving'][name]:.1%}" for name in (COMPLETE, FRONTIER, NARROW)), f"{row['bound']:.1%}",
            f"{row['saving'][NARROW] / row['bound']:.0%}", *(f"{row['waiting'][name]:.0%}" for name in (SYNCHRONOUS, FRONTIER, NARROW)),
            *(f"{row['first_dispatch_s'][name]:.0f}" for name in (COMPLETE, FRONTIER, NARROW)),
        ]
        for row in rows
    ]  # fmt: skip
    return pages.markdown(heads, lines)


def own_share(rounds: Sequence[Round], *, speed_up: float, broker_s: float) -> dict[str, float]:
    """What the system itself adds: to the rounds' times here and at the paper's speed, and in processor seconds."""
    known = [each for each in rounds if each.simulated_s is not None and each.variant != SYNCHRONOUS]
    added = [each.end_s / each.simulated_s - 1 for each in known if each.simulated_s]
    paper_s, cpu_s = sum(each.end_s for each in rounds), sum(each.cpu_s for each in rounds)
    deviations = [abs(each.end_s / each.simulated_s - 1) for each in rounds if each.simulated_s]
    return {
        "added_here": statistics.fmean(added), "added_at_paper_speed": statistics.fmean(added) / speed_up,
        "workers_cpu_share": cpu_s / paper_s, "broker_cpu_share": broker_s / paper_s, "largest_deviation": max(deviations),
    }  # fmt: skip


def sentence(share: dict[str, float], *, speed_up: float) -> str:
    """The system's own share in words."""
    return (
        f"Time runs {speed_up:g} times faster than in the paper. Against the simulation, which has no broker, a pipelined round takes "
        f"{share['added_here']:.1%} longer here, which is {share['added_at_paper_speed']:.2%} at the paper's speed. "
        f"For each second of the paper the workers compute {share['workers_cpu_share']:.1%} and the broker "
        f"{share['broker_cpu_share']:.1%} of a second on one core."
    )


def plot(rows: Sequence[dict[str, Any]]) -> None:
    """Savings of the 12 settings as bars, with the attainable saving."""
    canvas, axes = pages.figure(width=9.0)
    names = [f"{row['workload']}\nR={row['groups']}" for row in rows]
    for shift, (variant, colour) in enumerate({COMPLETE: "#99e9f2", FRONTIER: "#0b7285", NARROW: "#2b8a3e"}.items()):
        axes.bar([index + 0.27 * (shift - 1) for index in range(len(rows))], [row["saving"][variant] for row in rows], 0.25, color=colour,
                 label=variant)  # fmt: skip
    axes.plot(range(len(rows)), [row["bound"] for row in rows], "_", color="#e8590c", ms=26, mew=2, label="attainable")
    axes.plot(range(len(rows)), [PAPER_LEAST[row["groups"]] for row in rows], "k.", label="paper, least of all workloads")
    axes.set_xticks(range(len(rows)), names, fontsize=7)
    axes.set_ylabel("saving of rollout-to-train-end time")
    axes.legend(ncol=5, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.12))
    pages.save(canvas, "papers-rolloutpipe")


def main(chosen: argparse.Namespace) -> None:
    """Measure, print, and write the page if asked."""
    rounds, broker_s = measure(chosen)
    rows, share = compared(rounds), own_share(rounds, speed_up=chosen.speed_up, broker_s=broker_s)
    if chosen.json:
        print(json.dumps({"rows": rows, "own_share": share, "rounds": [asdict(each) for each in rounds]}, indent=1))
    else:
        print(table(rows), "", sentence(share, speed_up=chosen.speed_up), sep="\n")
    if chosen.write:
        pages.replace_table("rolloutpipe", f"{table(rows)}\n\n{sentence(share, speed_up=chosen.speed_up)}")
        plot(rows)
