"""Very many groups of one sample through real workers: groups per second, and the cost of a group at the start and at the end.

    python -m benchmarks topics_overhead many_groups
    python -m benchmarks topics_overhead many_groups --groups 100000 --window 10000
    python -m benchmarks topics_overhead many_groups --groups 20000 --per-step 2 --window 2000 --keep-steps 100

Feeder, toy engine, scorer, tracker, broker and a trainer whose backend computes nothing are separate processes; every step takes 1,000
groups, or `--per-step`. After each window of groups, prints the CPU time of every process divided by the window's groups, and its memory.
`--keep-steps` deletes the records of older steps. Status 1 if a group of the last window costs more than 1.1 times one of the second
window: in the first one Java compiles and workers start.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.support.command import WORKER, failed, own_broker, parser_of, processes
from benchmarks.topics_overhead.run import FREE_TRAINER, settings_of
from penstock.infra.broker.embedded import BrokerInfo
from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline.config.load import from_table
from penstock.pipeline.launch.create import create
from penstock.topics import ledger

LIMIT = 1.1
SILENCE_S = 300.0


def used(running: Mapping[str, psutil.Process]) -> dict[str, tuple[float, float]]:
    """Process -> (CPU seconds so far, MiB of its own memory), children included."""
    families = {name: [process, *process.children(recursive=True)] for name, process in running.items()}
    return {
        name: (sum(sum(each.cpu_times()[:2]) for each in family), sum(each.memory_full_info().uss for each in family) / 2**20)
        for name, family in families.items()
    }


def windows(log: KafkaLog, run: str, running: Mapping[str, psutil.Process], chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Follow the ledger; for each window of groups: seconds, CPU by process in ms a group, memory by process in MiB."""
    tail = log.tail({(f"{run}.ledger", 0): "earliest"})
    rows: list[dict[str, Any]] = []
    trained, before, began = 0, used(running), time.monotonic()
    last = began
    while trained < chosen.groups:
        if time.monotonic() - last > SILENCE_S:
            raise SystemExit(f"no step for {SILENCE_S:.0f} s after {trained:,} groups")
        for record in tail.poll(1.0):
            last = time.monotonic()
            if ledger.read(record, run=run)[1].kind != "step":
                continue
            trained += chosen.per_step
            if trained % chosen.window == 0:
                after, now = used(running), time.monotonic()
                cpu = {name: 1000 * (after[name][0] - before[name][0]) / chosen.window for name in running}
                rows.append({"groups": trained, "s": now - began, "ms": cpu, "mib": {name: after[name][1] for name in running}})
                parts = "  ".join(f"{name} {cpu[name]:.2f} ms {after[name][1]:,.0f} MiB" for name in cpu)
                rate = f"{chosen.window / (now - began):>5,.0f}/s"
                print(f"{trained:>9,} groups  {rate}  {sum(cpu.values()):.2f} ms  {parts}", flush=True)
                before, began = after, now
    tail.close()
    return rows


def measured(home: Path, broker: BrokerInfo, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """The windows of a run in real processes."""
    log, run = KafkaLog(broker.bootstrap, client_id="many"), f"many-{int(time.time()):x}"
    settings = settings_of(
        home, broker.bootstrap, context=64, run={"steps": chosen.groups // chosen.per_step + 1},
        schedule={"prompts_per_step": chosen.per_step, "samples_per_prompt": 1}, sampling={"max_new_tokens": 8},
        rollout={"slots": chosen.slots}, trainer={"checkpoint_every": 50 if chosen.keep_steps else 0}, weights={"keep": "chain"},
        kafka={"keep_steps": chosen.keep_steps},
    )  # fmt: skip
    create(from_table(settings), log=log, run_id=run, notify=lambda _: None)
    common = ["--run", run, "--bootstrap", broker.bootstrap]
    commands = {role: [*WORKER, role, *common, "--slot", "0"] for role in ("feeder", "rollout", "scorer", "tracker")}
    with processes({"trainer": [*FREE_TRAINER, *common], **commands}, home) as started:
        try:
            running = {name: psutil.Process(process.pid) for name, process in started.items()}
            return windows(log, run, {**running, "broker": psutil.Process(broker.pid)}, chosen)
        except psutil.NoSuchProcess as missing:
            name = next((name for name, process in started.items() if process.pid == missing.pid), "a child process")
            raise failed(f"{name} exited", home / f"{name}.txt") from missing
        finally:
            log.close()


def main(arguments: Sequence[str]) -> int:
    """Measure, print, compare with the limit."""
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--per-step", type=int, default=1000, help="groups that one step trains")
    parser.add_argument("--slots", type=int, default=256, help="rollout.slots: groups in flight")
    parser.add_argument("--keep-steps", type=int, help="kafka.keep_steps, with a checkpoint at every 50th step")
    parser.add_argument("--window", type=int, default=100_000)
    parser.add_argument("--json", action="store_true", help="the windows as one JSON list at the end")
    chosen = parser.parse_args(arguments)
    with own_broker("many-groups") as (home, broker):
        rows = measured(home, broker, chosen)
    if chosen.json:
        print(json.dumps(rows))
    early, late = rows[1], rows[-1]
    first, last = sum(early["ms"].values()), sum(late["ms"].values())
    seconds = sum(row["s"] for row in rows)
    print(f"{chosen.groups:,} groups in {seconds:,.0f} s, {chosen.groups / seconds:,.0f}/s")
    print(f"CPU a group {first:.2f} -> {last:.2f} ms, {last / first:.2f} times")
    for name in early["mib"]:
        memory = f"{early['mib'][name]:>7,.0f} -> {late['mib'][name]:>7,.0f} MiB"
        print(f"  {name:<8} {memory}   {early['ms'][name]:.3f} -> {late['ms'][name]:.3f} ms")
    return int(last > LIMIT * first)
