"""`penstock topics export` of synthetic samples against pyarrow alone writing the same table to the same disk.

    python -m benchmarks export --samples 1000000

Samples of 16 to 100 tokens by four workers are encoded and written to `rollouts` uncompressed, as workers write them. Each export is a
process of its own; pyarrow then writes the exported rows, row group by row group, from memory with the settings of the export. They
alternate, `--rounds` times at a tenth of the size and once at the full size; the ratio is their samples/s.
Status 1 if fewer samples/s are exported than the limit, or peak memory grows with their number.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from confluent_kafka import Producer

from benchmarks.support.command import command_of, own_broker, parser_of, with_numbers
from penstock.infra.broker.embedded import BrokerInfo
from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline.archive.export import export
from penstock.pipeline.archive.files import Archive, PartitionFile
from penstock.pipeline.archive.layout import KINDS
from penstock.pipeline.runtime.registration.run_registry import write
from penstock.topics import rollouts
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, topics_of
from penstock.topics.rollouts import Rollout
from penstock.topics.runs import RunRecord
from tests.support.bare_clients import c_client

LIMIT = 20_000
"""[samples/s]"""
MEMORY_LIMIT = 1.5
"""Peak memory at the full size relative to a tenth of it: row groups fill up only with many samples."""
PARTITIONS = 4
KIND = KINDS["rollouts"]


def samples(count: int) -> Iterator[tuple[int, Rollout]]:
    """(partition, sample): lengths, ids and logprobs differ from sample to sample."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 150_000, 1 << 20).astype(np.int32)
    logprobs = -rng.exponential(1.0, 1 << 20).astype(np.float32)
    for number in range(count):
        tokens, start = int(rng.integers(16, 101)), int(rng.integers(0, (1 << 20) - 101))
        group, worker = number // 8, number % 4
        started_ns = 1_700_000_000_000_000_000 + number * 1_000_000
        yield (
            group % PARTITIONS,
            Rollout(
                group=group, sample=number % 8, token_ids=ids[start : start + tokens], behaviour_logprobs=logprobs[start : start + tokens],
                loss_mask=np.ones(tokens, np.bool_), span_versions=np.array([group // 64], np.int32), span_starts=np.zeros(1, np.int32),
                finish="length" if tokens == 100 else "stop", temperature=1.0, top_p=1.0, top_k=0, started_ns=started_ns,
                ended_ns=started_ns + tokens * 1_000_000, worker=f"rollout-{worker}",
            ),
        )  # fmt: skip


def fill(bootstrap: str, run: str, count: int) -> int:
    """Register a run and write its samples; returns the bytes of their payloads."""
    log = KafkaLog(bootstrap)
    log.create_topics({RUNS_TOPIC: RUNS_SPEC})
    log.create_topics(topics_of(run, partitions=PARTITIONS))
    now = time.time_ns()
    write(log, RunRecord(run=run, status="finished", config="{}", info="{}", created_ns=now, updated_ns=now))
    log.close()
    producer = Producer(
        {
            **c_client(bootstrap),
            "enable.idempotence": True,
            "linger.ms": 10,  # as in `KafkaLog.producer`
            "batch.size": 1_000_000,
            "compression.type": "none",
            "queue.buffering.max.kbytes": 64 << 10,
        }
    )
    size = 0
    for partition, sample in samples(count):
        value = rollouts.encode(sample)
        size += len(value)
        headers = list(rollouts.headers(sample, run=run).encode(value))
        while True:
            try:
                producer.produce(f"{run}.rollouts", value=value, key=b"%d" % sample.group, headers=headers, partition=partition)
                break
            except BufferError:
                producer.poll(0.05)
        producer.poll(0)
    producer.flush()
    return size


def export_once(bootstrap: str, run: str, directory: Path) -> dict[str, Any]:
    """Export in a process of its own; seconds, CPU seconds and peak memory."""
    command = [*command_of(__name__), "--export", run, str(directory), bootstrap]
    return dict(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def pyarrow_once(source: Archive, directory: Path) -> float:
    """Seconds in which pyarrow writes the archived rows; reading does not count."""
    shutil.rmtree(directory, ignore_errors=True)
    target, spent = Archive(directory, source.run), 0.0
    for partition in source.partitions(KIND):
        for path in source.files(KIND, partition):
            with pq.ParquetFile(path) as parquet:
                tables = [parquet.read_row_group(group) for group in range(parquet.num_row_groups)]
            started = time.monotonic()
            file = PartitionFile(target, KIND, partition, int(path.stem))
            for table in tables:
                file.write(table)
            file.finish(0)
            spent += time.monotonic() - started
    return spent


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(broker: BrokerInfo, count: int, *, rounds: int, scratch: Path) -> tuple[float, float]:
    """Median samples/s and peak MiB of `rounds` exports of `count` samples; prints each."""
    assert broker.pid is not None
    run, started = f"samples-{count}", time.monotonic()
    size = fill(broker.bootstrap, run, count)
    print(f"{count:,} samples, {size / 1e6:,.0f} MB of payloads, written to Kafka in {time.monotonic() - started:.0f} s", flush=True)
    rates, peaks = [], []
    for number in range(rounds):
        directory = scratch / "archive"
        shutil.rmtree(directory, ignore_errors=True)
        before = cpu_s(broker.pid)
        done = export_once(broker.bootstrap, run, directory)
        broker_us = 1e6 * (cpu_s(broker.pid) - before) / count
        archive = Archive(directory, run)
        assert done["rows"]["rollouts"] == count, done
        alone = pyarrow_once(archive, scratch / "alone")
        rates.append(count / done["seconds"])
        peaks.append(done["peak_mib"])
        print(
            f"  round {number}: export {done['seconds']:6.2f} s ({count / done['seconds']:,.0f} samples/s, "
            f"{size / 1e6 / done['seconds']:,.0f} MB/s of payloads, {done['bytes'] / 1e6:,.0f} MB on disk, "
            f"peak memory {done['peak_mib']:,.0f} MiB); pyarrow alone {alone:6.2f} s; ratio {alone / done['seconds']:.2f}; "
            f"us of CPU a sample: reader {1e6 * done['reader_s'] / count:.1f}, "
            f"writer {1e6 * (done['cpu_s'] - done['reader_s']) / count:.1f}, broker {broker_us:.1f}; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    log = KafkaLog(broker.bootstrap)
    log.delete_topics(log.topics(f"{run}."))
    log.close()
    return statistics.median(rates), statistics.median(peaks)


def main(arguments: Sequence[str]) -> int:
    """Measure at both sizes."""
    parser = parser_of(__name__, __doc__)
    with_numbers(parser, samples=1_000_000, rounds=3)
    parser.add_argument("--export", nargs=3, metavar=("RUN", "DIR", "BOOTSTRAP"), help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.export:
        run, directory, bootstrap = chosen.export
        log = KafkaLog(bootstrap)
        started, reading = time.process_time(), time.thread_time()
        done = export(log, run, Path(directory), topics=["rollouts"])
        spent = {"cpu_s": time.process_time() - started, "reader_s": time.thread_time() - reading}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"seconds": done.seconds, **spent, "rows": done.rows, "bytes": done.bytes, "peak_mib": peak}))
        return 0
    print(f"pyarrow {pa.__version__}, {os.cpu_count()} cores")
    with own_broker("export") as (home, broker):
        rate, peak = measure(broker, chosen.samples // 10, rounds=chosen.rounds, scratch=home)
        whole_rate, whole_peak = measure(broker, chosen.samples, rounds=1, scratch=home)
    print(f"{rate:,.0f} samples/s (median of {chosen.rounds}), at full size {whole_rate:,.0f}; limit {LIMIT:,}")
    print(f"peak memory {peak:,.0f} MiB, at full size {whole_peak:,.0f}; limit {MEMORY_LIMIT} times as much")
    return 0 if min(rate, whole_rate) >= LIMIT and whole_peak <= MEMORY_LIMIT * peak else 1
