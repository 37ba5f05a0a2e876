"""`penstock ui` and `penstock runs` on a broker with many finished runs: start, list, memory with as many opened as are followed.

    python -m benchmarks page many_runs
    python -m benchmarks page many_runs --runs 50 --home STATE

Writes small runs with the views that their trackers would save. Prints medians of three.
"""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.page.server import median_of, memory_mb, requested, served
from benchmarks.speed.commands import took
from benchmarks.support.command import own_broker, parser_of, with_numbers
from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline.cli.ui.store import OPEN_RUNS
from penstock.pipeline.inspect.live.saved_view import ViewWriter
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.status import WATCHED
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, topics_of
from tests.support.a_run import RecordBuilder, as_records

REPEATS = 3


def write(log: KafkaLog, count: int, steps: int) -> None:
    """The runs, one after the other."""
    log.create_topics({RUNS_TOPIC: RUNS_SPEC})
    producer = log.producer()
    for number in range(count):
        run = f"run-{number:03}"
        log.create_topics(topics_of(run, partitions=1))
        records = [*RecordBuilder(run, steps=steps, created_s=time.time()).whole(), RecordBuilder(run, steps=steps).record("finished")]
        view = RunView(run=run)
        for outgoing, record in zip(records, as_records(records), strict=True):
            producer.send(outgoing)
            view.fold(record)
        producer.flush(60.0)
        ends = log.end_offsets([(f"{run}.{topic}", 0) for topic in WATCHED])
        ViewWriter(log, producer, "tracker").write(view, ends, now=True)
    producer.flush(60.0)
    producer.close()


def main(arguments: Sequence[str]) -> None:
    """Write, start, request."""
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--home", type=Path, help="state directory to use and keep")
    with_numbers(parser, runs=200, steps=20)
    chosen = parser.parse_args(arguments)
    with own_broker("runs", chosen.home) as (_, broker):
        with contextlib.closing(KafkaLog(broker.bootstrap, client_id="runs")) as log:
            if log.partitions("run-000.run") is None:
                write(log, chosen.runs, chosen.steps)
        wall, cpu, peak = median_of(REPEATS, lambda: took("runs"))
        print(f"penstock runs: {wall:.2f} s, {cpu:.2f} s of CPU, {peak:.0f} MB")
        started = time.monotonic()
        with served(broker.bootstrap) as (address, process):
            print(f"server started in {time.monotonic() - started:.2f} s, {memory_mb(process):.0f} MB")
            seconds, size = requested(address)
            print(f"list of {chosen.runs} runs, first request: {seconds:.2f} s, {size / 1000:.0f} kB")
            print(f"list, then: {median_of(REPEATS, lambda: requested(address))[0]:.2f} s, {memory_mb(process):.0f} MB")
            for number in range(min(chosen.runs, 2 * OPEN_RUNS)):
                requested(f"{address}r/run-{number:03}")
                if number + 1 in (1, OPEN_RUNS, 2 * OPEN_RUNS):
                    print(f"{number + 1} opened, {min(number + 1, OPEN_RUNS)} followed: {memory_mb(process):.0f} MB, "
                          f"{process.num_threads()} threads, {len(process.net_connections())} connections")  # fmt: skip
            print(f"list, with them: {median_of(REPEATS, lambda: requested(address))[0]:.2f} s")
