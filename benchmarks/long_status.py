"""What `penstock status` costs after few steps and after many, and what a view holds that has followed all of them.

    python benchmarks/long_status.py --steps 10 10000

Writes runs of so many synthetic steps, a second each, to a broker of its own; a reader follows each as the tracker does and saves its view
every 15 steps. Then the command is run in turn for each run, in a process of its own. Ends with 1 when the command takes more than 1.2
times as long, or as much memory, after the most steps as after the fewest, or says another number of steps or groups.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import NamedTuple

from command import PENSTOCK

from penstock.infra.broker import embedded
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Log
from penstock.pipeline.inspect.live.saved_view import ViewWriter, from_json, to_json
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.status import WATCHED
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, topics_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.a_run import Teller

RATIO_LIMIT, ROUNDS = 1.2, 7
SAVED_EVERY, BATCH = 15, 100


class Took(NamedTuple):
    """One run of the command."""

    wall_s: float
    cpu_s: float
    peak_mb: float
    said: dict[str, object]


def write(log: Log, run: str, steps: int) -> tuple[float, float]:
    """A run that is under way after so many steps, and its saved views; returns (MiB held by the view, KiB of a saved one)."""
    log.create_topics({**topics_of(run, partitions=1), RUNS_TOPIC: RUNS_SPEC})
    teller, producer = Teller(run, steps=2 * steps, created_s=time.time() - steps), log.producer()
    for record in (teller.made(), teller.record("running"), teller.opened(), teller.version(0)):
        producer.send(record)
    partitions = [(f"{run}.{topic}", 0) for topic in WATCHED]
    tail, writer = log.tail(dict.fromkeys(partitions, "earliest")), ViewWriter(log, producer, "tracker")
    view = RunView(run=run)
    for step in range(steps):
        for record in teller.round(step):
            if not record.topic.endswith(".rollouts"):
                producer.send(record)
        if (step + 1) % BATCH == 0 or ((step + 1) % SAVED_EVERY == 0 and step + SAVED_EVERY >= steps):
            producer.flush(60.0)
            for read in tail.read_to_end():
                view.fold(read)
            view.forget()
            writer.write(view, {at: tail.position(at) for at in partitions}, now=True)
    producer.flush(60.0)
    tail.close()
    producer.close()
    text = to_json(view)
    tracemalloc.start()
    again = from_json(run, text)  # made anew, as the encoding of all those records would be slow while memory is traced
    held = tracemalloc.get_traced_memory()[0] / 2**20
    tracemalloc.stop()
    assert again.steps_done == view.steps_done
    return held, len(text) / 1024


def ask(run: str, bootstrap: str) -> Took:
    """The command, once."""
    began = time.monotonic()
    process = subprocess.Popen([*PENSTOCK, "status", run, "--json", "--bootstrap", bootstrap], stdout=subprocess.PIPE)
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = status
    return Took(time.monotonic() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, json.loads(said))


def measure(bootstrap: str, lengths: list[int]) -> bool:
    """Write the runs, ask in turn, print; whether all limits hold."""
    took: dict[int, list[Took]] = {steps: [] for steps in lengths}
    with contextlib.closing(KafkaLog(bootstrap, client_id="long")) as log:
        for steps in (steps for steps in lengths if log.partitions(f"long-{steps}.run") is None):
            began = time.monotonic()
            held, saved = write(log, f"long-{steps}", steps)
            print(
                f"{steps} steps written in {time.monotonic() - began:.0f} s; the view holds {held:.1f} MiB, saved {saved:.0f} KiB",
                flush=True,
            )
    for _ in range(ROUNDS):
        for steps in lengths:
            took[steps].append(ask(f"long-{steps}", bootstrap))
    print(f"{'steps':>8}{'wall s':>10}{'CPU s':>10}{'peak MB':>10}")
    medians = {}
    for steps in lengths:
        medians[steps] = [
            statistics.median(values) for values in zip(*[(one.wall_s, one.cpu_s, one.peak_mb) for one in took[steps]], strict=True)
        ]
        print(f"{steps:>8}{medians[steps][0]:>10.2f}{medians[steps][1]:>10.2f}{medians[steps][2]:>10.0f}")
    ratios = [most / fewest for most, fewest in zip(medians[max(lengths)], medians[min(lengths)], strict=True)]
    right = all(
        one.said["steps_done"] == steps and one.said["groups"] == {"trained": 2 * steps} for steps in lengths for one in took[steps]
    )
    print(f"wall {ratios[0]:.2f}, CPU {ratios[1]:.2f}, memory {ratios[2]:.2f} times as much; at most {RATIO_LIMIT}; figures right: {right}")
    return right and max(ratios) <= RATIO_LIMIT


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[10, 10_000])
    parser.add_argument("--home", type=Path, help="keeps the runs there, and measures those that are there already")
    chosen = parser.parse_args()
    home = chosen.home or Path(tempfile.mkdtemp(prefix="penstock-long-"))
    os.environ["PENSTOCK_HOME"] = str(home)
    try:
        return int(not measure(embedded.start(home=home).bootstrap, sorted(chosen.steps)))
    finally:
        embedded.stop(home)


if __name__ == "__main__":
    sys.exit(main())
