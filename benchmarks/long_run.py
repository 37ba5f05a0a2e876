"""Cost of `penstock status` after few steps and after many, and the memory of a view that has followed all of them.

    python -m benchmarks long_run --steps 10 10000

Writes runs of synthetic steps, a second each, to a broker; a reader follows each as the tracker does and saves its view every 15 steps.
Then the command runs alternately for each run. Status 1 if it takes more than 1.2 times as long, or as much memory, after the most steps
as after the fewest, or prints another number of steps or groups.
"""

import contextlib
import json
import os
import statistics
import subprocess
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.support.command import PENSTOCK, own_broker, parser_of
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Log
from penstock.pipeline.inspect.live.saved_view import ViewWriter, from_json, to_json
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.status import WATCHED
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, topics_of
from tests.support.a_run import RecordBuilder

RATIO_LIMIT, ROUNDS = 1.2, 7
SAVED_EVERY, BATCH = 15, 100


class Took(NamedTuple):
    """One run of the command."""

    wall_s: float
    cpu_s: float
    peak_mb: float
    printed: dict[str, object]


def write(log: Log, run: str, steps: int) -> tuple[float, float]:
    """Write a running run of `steps` steps and its saved views; returns (MiB of the view, KiB of a saved one)."""
    log.create_topics({**topics_of(run, partitions=1), RUNS_TOPIC: RUNS_SPEC})
    builder, producer = RecordBuilder(run, steps=2 * steps, created_s=time.time() - steps), log.producer()
    for record in (builder.made(), builder.record("running"), builder.opened(), builder.version(0)):
        producer.send(record)
    partitions = [(f"{run}.{topic}", 0) for topic in WATCHED]
    tail, writer = log.tail(dict.fromkeys(partitions, "earliest")), ViewWriter(log, producer, "tracker")
    view = RunView(run=run)
    for step in range(steps):
        for record in builder.round(step):
            if not record.topic.endswith(".rollouts"):
                producer.send(record)
        if (step + 1) % BATCH == 0 or ((step + 1) % SAVED_EVERY == 0 and step + SAVED_EVERY >= steps):
            producer.flush(60.0)
            for read in tail.read_to_end():
                view.fold(read)
            view.forget()
            writer.write(view, {tp: tail.position(tp) for tp in partitions}, now=True)
    producer.flush(60.0)
    tail.close()
    producer.close()
    text = to_json(view)
    tracemalloc.start()
    again = from_json(run, text)  # a copy, as encoding all those records would be slow while memory is traced
    view_mib = tracemalloc.get_traced_memory()[0] / 2**20
    tracemalloc.stop()
    assert again.steps_done == view.steps_done
    return view_mib, len(text) / 1024


def run_status(run: str, bootstrap: str) -> Took:
    """Run the command once."""
    started = time.monotonic()
    process = subprocess.Popen([*PENSTOCK, "status", run, "--json", "--bootstrap", bootstrap], stdout=subprocess.PIPE)
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = status
    return Took(time.monotonic() - started, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, json.loads(printed))


def measure(bootstrap: str, lengths: list[int]) -> bool:
    """Write the runs, alternate the commands, print; True if no limit is missed."""
    took: dict[int, list[Took]] = {steps: [] for steps in lengths}
    with contextlib.closing(KafkaLog(bootstrap, client_id="long")) as log:
        for steps in (steps for steps in lengths if log.partitions(f"long-{steps}.run") is None):
            started = time.monotonic()
            view_mib, saved = write(log, f"long-{steps}", steps)
            seconds = time.monotonic() - started
            print(f"{steps} steps written in {seconds:.0f} s; the view takes {view_mib:.1f} MiB, saved {saved:.0f} KiB", flush=True)
    for _ in range(ROUNDS):
        for steps in lengths:
            took[steps].append(run_status(f"long-{steps}", bootstrap))
    print(f"{'steps':>8}{'wall s':>10}{'CPU s':>10}{'peak MB':>10}")
    medians = {}
    for steps in lengths:
        medians[steps] = [statistics.median(values) for values in zip(*[each[:3] for each in took[steps]], strict=True)]
        print(f"{steps:>8}{medians[steps][0]:>10.2f}{medians[steps][1]:>10.2f}{medians[steps][2]:>10.0f}")
    ratios = [most / fewest for most, fewest in zip(medians[max(lengths)], medians[min(lengths)], strict=True)]
    right = all(
        each.printed["steps_done"] == steps and each.printed["groups"] == {"trained": 2 * steps}
        for steps in lengths
        for each in took[steps]
    )
    print(f"wall {ratios[0]:.2f}, CPU {ratios[1]:.2f}, memory {ratios[2]:.2f} times as much; at most {RATIO_LIMIT}; figures right: {right}")
    return right and max(ratios) <= RATIO_LIMIT


def main(arguments: Sequence[str]) -> int:
    """Measure; 1 if a limit is missed."""
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[10, 10_000])
    parser.add_argument("--home", type=Path, help="state directory to use and keep; its runs are measured again")
    chosen = parser.parse_args(arguments)
    with own_broker("long", chosen.home) as (_, broker):
        return int(not measure(broker.bootstrap, sorted(chosen.steps)))
