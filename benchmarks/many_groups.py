"""Very many groups of one sample through real workers: groups per second, and whether a group costs at the end what it cost at the start.

    python benchmarks/many_groups.py
    python benchmarks/many_groups.py --groups 100000 --window 10000
    python benchmarks/many_groups.py --groups 20000 --per-step 2 --window 2000 --keep-steps 100

Feeder, toy engine, scorer, tracker, broker and a trainer whose backend computes nothing are processes apart; every step takes 1,000
groups, or `--per-step`: few make a run of many steps. After each window of groups the CPU time that every process has used is divided by
the window's groups, and its memory is read. `--keep-steps` deletes what older steps have left. Ends with 1 when a group of the last window
costs more than 1.1 times one of the second window: in the first one Java compiles and workers start.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from topics_overhead import make_model

from penstock.infra.broker import embedded
from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline.config.load import from_table
from penstock.pipeline.launch.create import create
from penstock.topics import ledger

LIMIT = 1.1
SILENCE_S = 300.0
FUNCTIONS = """def even(prompts, completions, **columns):
    return [len(text) % 2 for text in completions]


def raw(rewards):
    return rewards
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How long the run is."""

    groups: int
    per_step: int
    slots: int
    window: int
    keep_steps: int | None


def settings_of(home: Path, bootstrap: str, size: Size) -> dict[str, Any]:
    """The run as a table of the configuration."""
    functions = home / "functions.py"
    functions.write_text(FUNCTIONS)
    return {
        "run": {"steps": size.groups // size.per_step + 1},
        "model": {"path": str(make_model(home / "model", context=64))},
        "data": {"source": "tiny:successor", "size": 256, "max_prompt_tokens": 32},
        "reward": {"functions": [f"{functions}:even"]},
        "schedule": {"mode": "one_step_off", "prompts_per_step": size.per_step, "samples_per_prompt": 1},
        "sampling": {"max_new_tokens": 8},
        "algorithm": {"advantage": f"{functions}:raw", "filter_zero_variance": False},
        "rollout": {"engine": "toy", "workers": 1, "slots": size.slots},
        "trainer": {"micro_batch_tokens": 1 << 17, "export": False, "checkpoint_every": 50 if size.keep_steps else 0},
        "weights": {"keep": "chain"},
        "kafka": {"bootstrap": bootstrap, "keep_steps": size.keep_steps},
        "mlflow": {"enabled": False},
    }


def used(processes: dict[str, psutil.Process]) -> dict[str, tuple[float, float]]:
    """Process -> (CPU seconds so far, MiB of its own memory)."""
    found = {}
    for name, process in processes.items():
        family = [process, *process.children(recursive=True)]
        seconds = sum(sum(one.cpu_times()[:2]) for one in family)
        found[name] = (seconds, sum(one.memory_full_info().uss for one in family) / 2**20)
    return found


def windows(log: KafkaLog, run: str, processes: dict[str, psutil.Process], size: Size) -> list[dict[str, Any]]:
    """Follow the ledger; after each window of groups: seconds it took, CPU by process in ms a group, memory by process in MiB."""
    tail = log.tail({(f"{run}.ledger", 0): "earliest"})
    found: list[dict[str, Any]] = []
    trained, before, began = 0, used(processes), time.monotonic()
    heard = began
    while trained < size.groups:
        if time.monotonic() - heard > SILENCE_S:
            raise SystemExit(f"no step for {SILENCE_S:.0f} s after {trained:,} groups")
        for record in tail.poll(1.0):
            entry = ledger.read(record, run=run)[1]
            heard = time.monotonic()
            if entry.kind != "step":
                continue
            trained += size.per_step
            if trained % size.window == 0:
                after, now = used(processes), time.monotonic()
                cpu = {name: 1000 * (after[name][0] - before[name][0]) / size.window for name in processes}
                found.append({"groups": trained, "s": now - began, "ms": cpu, "mib": {name: after[name][1] for name in processes}})
                show(found[-1], size.window)
                before, began = after, now
    tail.close()
    return found


def show(row: dict[str, Any], window: int) -> None:
    """One line of the table."""
    parts = "  ".join(f"{name} {row['ms'][name]:.2f} ms {row['mib'][name]:,.0f} MiB" for name in row["ms"])
    print(f"{row['groups']:>9,} groups  {window / row['s']:>5,.0f}/s  {sum(row['ms'].values()):.2f} ms  {parts}", flush=True)


def measured(home: Path, size: Size) -> list[dict[str, Any]]:
    """Run all of it in real processes."""
    broker = embedded.start(home=home)
    log, run = KafkaLog(broker.bootstrap, client_id="many"), f"many-{int(time.time()):x}"
    create(from_table(settings_of(home, broker.bootstrap, size)), log=log, run_id=run, notify=lambda _: None)
    common = ["--run", run, "--bootstrap", broker.bootstrap]
    trainer = Path(__file__).with_name("topics_overhead.py")
    commands = {"trainer": [sys.executable, str(trainer), "--as-trainer", *common]}
    roles = ("feeder", "rollout", "scorer", "tracker")
    commands |= {role: [sys.executable, "-m", "penstock.workers", role, *common, "--slot", "0"] for role in roles}
    with ExitStack() as stack:
        outputs = {name: stack.enter_context((home / f"{name}.txt").open("wb")) for name in commands}
        started = {name: subprocess.Popen(commands[name], stdout=outputs[name], stderr=subprocess.STDOUT) for name in commands}
        try:
            processes = {name: psutil.Process(process.pid) for name, process in started.items()}
            return windows(log, run, {**processes, "broker": psutil.Process(broker.pid)}, size)
        except psutil.NoSuchProcess as gone:
            name = next(name for name, process in started.items() if process.pid == gone.pid)
            raise SystemExit(f"{name} ended:\n{(home / f'{name}.txt').read_text()[-2000:]}") from gone
        finally:
            for process in started.values():
                process.send_signal(signal.SIGTERM)
            for process in started.values():
                process.wait(120)
            log.close()


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--per-step", type=int, default=1000, help="groups that one step trains")
    parser.add_argument("--slots", type=int, default=256, help="rollout.slots: groups on their way at a time")
    parser.add_argument("--keep-steps", type=int, help="kafka.keep_steps, with a checkpoint at every 50th step")
    parser.add_argument("--window", type=int, default=100_000)
    parser.add_argument("--json", action="store_true", help="the windows as one JSON list at the end")
    chosen = parser.parse_args()
    size = Size(groups=chosen.groups, per_step=chosen.per_step, slots=chosen.slots, window=chosen.window, keep_steps=chosen.keep_steps)
    with tempfile.TemporaryDirectory(prefix="many-groups-") as name:
        os.environ["PENSTOCK_HOME"] = name
        try:
            found = measured(Path(name), size)
        finally:
            embedded.stop(Path(name))
    if chosen.json:
        print(json.dumps(found))
    first, last = (sum(found[which]["ms"].values()) for which in (1, -1))
    seconds = sum(row["s"] for row in found)
    print(f"{chosen.groups:,} groups in {seconds:,.0f} s, {chosen.groups / seconds:,.0f}/s")
    print(f"CPU a group {first:.2f} -> {last:.2f} ms, {last / first:.2f} times")
    begin, end = found[1], found[-1]
    for name in begin["mib"]:
        memory = f"{begin['mib'][name]:>7,.0f} -> {end['mib'][name]:>7,.0f} MiB"
        print(f"  {name:<8} {memory}   {begin['ms'][name]:.3f} -> {end['ms'][name]:.3f} ms")
    return int(last > LIMIT * first)


if __name__ == "__main__":
    sys.exit(main())
