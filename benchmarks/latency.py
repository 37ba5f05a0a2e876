"""Latency from a finished sample to the trainer, and from committed weights to a rollout worker, against a chain of bare client calls.

    python -m benchmarks latency --rounds 200

A group's samples pass from this process, with a worker's producer, to a real scorer process, whose scored group is read and decoded by the
trainer's reader. The bare chain moves as many bytes without Penstock: a producer, a process that reads as a member of a consumer group and
writes in a transaction with its offsets, a reader of committed records; nothing is encoded, decoded or scored. A version takes from its
manifest's transaction to its bytes in a worker's copy, digest checked; the bare chain commits a record, reads it, and reads the chunks.
Both chains alternate on one embedded broker; the bare one runs in processes that import only the client. Status 1 if a median or a 99th
percentile is more than twice the bare one.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.command import WORKER, command_of, failed, own_broker, parser_of, processes, with_numbers
from tests.support.bare_clients import python_client

LIMIT = 2.0
WAIT_S = 30.0
SAMPLES_TOPIC, GROUPS_TOPIC, WEIGHTS_TOPIC, MANIFESTS_TOPIC = "bare-samples", "bare-groups", "bare-weights", "bare-manifests"
TOPICS = (SAMPLES_TOPIC, GROUPS_TOPIC, WEIGHTS_TOPIC, MANIFESTS_TOPIC)
TOKENS, SAMPLES, CHUNK_BYTES = 256, 8, 8 << 20
READING: dict[str, Any] = {"enable_auto_commit": False, "max_partition_fetch_bytes": 16 << 20, "retry_backoff_ms": 20}


def main(arguments: Sequence[str]) -> int:
    """Measure, print, compare with the limit."""
    parser = parser_of(__name__, __doc__)
    with_numbers(parser, rounds=200)
    parser.add_argument("--mib", type=float, default=4.0, help="size of a version")
    parser.add_argument("--bare", metavar="BOOTSTRAP", help=argparse.SUPPRESS)
    parser.add_argument("--echo", metavar="BOOTSTRAP", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.echo:
        echo(chosen.echo, chosen.bytes[1])
    if chosen.bare:
        bare(chosen.bare, *chosen.bytes)
        return 0
    with own_broker("latency") as (home, broker):
        return compared(home, broker.bootstrap, rounds=chosen.rounds, version_bytes=int(chosen.mib * 2**20))


def compared(home: Path, bootstrap: str, *, rounds: int, version_bytes: int) -> int:
    """Alternate both chains, `rounds` times."""
    times: dict[str, list[float]] = {}
    with ExitStack() as stack:
        samples, sizes = stack.enter_context(our_samples(home, bootstrap))
        version = stack.enter_context(our_weights(bootstrap, version_bytes))
        bare_samples, bare_version = stack.enter_context(bare_chains(bootstrap, [*sizes, version_bytes]))
        turns = {"sample": samples, "sample, bare": bare_samples, "version": version, "version, bare": bare_version}
        for number in range(rounds + 5):
            for name, turn in turns.items():
                time.sleep(0.02 + 0.001 * (number * 7 % 31))  # at another moment of every reader's poll each time
                seconds = turn()
                if number >= 5:
                    times.setdefault(name, []).append(1000 * seconds)
    print(f"{'[ms]':<16}{'p50':>8}{'p99':>8}   {rounds} rounds; {sizes[0]:,} bytes of samples, {version_bytes / 2**20:g} MiB of weights")
    ratios = []
    for name, values in times.items():
        print(f"{name:<16}{np.percentile(values, 50):>8.1f}{np.percentile(values, 99):>8.1f}")
    for name in ("sample", "version"):
        p50, p99 = (float(np.percentile(times[name], rank) / np.percentile(times[f"{name}, bare"], rank)) for rank in (50, 99))
        ratios += [p50, p99]
        print(f"{name}: p50 {p50:.2f}, p99 {p99:.2f} times the bare chain; limit {LIMIT:g}")
    return int(max(ratios) > LIMIT)


@contextmanager
def our_samples(home: Path, bootstrap: str) -> Iterator[tuple[Callable[[], float], list[int]]]:
    """One turn of the chain with a real scorer; and the bytes of a group's samples and of the scored group."""
    from benchmarks.topics_overhead.run import settings_of
    from penstock.infra.kafka.log import KafkaLog
    from penstock.pipeline.config.load import from_table
    from penstock.pipeline.launch.create import create
    from penstock.topics import groups, rollouts
    from penstock.topics.wire.record import Outgoing
    from tests.support.a_run import RecordBuilder

    log, run = KafkaLog(bootstrap, client_id="latency"), "latency"
    schedule = {"prompts_per_step": 1, "samples_per_prompt": SAMPLES}
    settings = settings_of(home, bootstrap, context=1024, run={"steps": 10_000}, schedule=schedule, kafka={"partitions": 1})
    create(from_table(settings), log=log, run_id=run, notify=lambda _: None)
    builder, producer = RecordBuilder(run, created_s=time.time()), log.producer(linger_ms=5.0)
    tail = log.tail({(f"{run}.groups", 0): "earliest"})

    def turn() -> float:
        records = builder.group([0.0] * SAMPLES, version=0, tokens=TOKENS)
        producer.send(records[0])
        producer.flush()
        samples = [replace(rollouts.decode(record.value), token_ids=np.full(TOKENS, 5, np.int32)) for record in records[1 : 1 + SAMPLES]]
        time.sleep(0.05)  # the scorer has the prompt before its samples
        started = time.monotonic()
        value = rollouts.encode(*samples)
        headers = rollouts.headers(*samples, run=run).encode(value)
        producer.send(Outgoing(topic=f"{run}.rollouts", partition=0, key=records[0].key, headers=headers, value=value))
        sizes[:] = [len(value), 0]
        while time.monotonic() - started < WAIT_S + 60:
            for record in tail.poll(0.5):
                group = groups.read(record, run=run)[1]
                if group.group == samples[0].group:
                    sizes[1] = len(record.value)
                    return time.monotonic() - started
        raise failed("no scored group arrived", home / "scorer.txt")

    sizes: list[int] = []
    with processes({"scorer": [*WORKER, "scorer", "--run", run, "--bootstrap", bootstrap, "--slot", "0"]}, home):
        turn()
        yield turn, sizes
        tail.close()
        producer.close()
        log.close()


@contextmanager
def our_weights(bootstrap: str, nbytes: int) -> Iterator[Callable[[], float]]:
    """One turn: send a version's chunks, commit its manifest, and wait until a worker's copy has it."""
    from penstock.infra.kafka.log import KafkaLog
    from penstock.infra.tensors.stream import TensorBytes
    from penstock.pipeline.runtime.weights.publish import chunk_partitions, manifest_record, send_version
    from penstock.pipeline.runtime.weights.receive import WeightPrefetch
    from penstock.topics.catalogue import topics_of
    from tests.support.a_run import RecordBuilder

    log, run = KafkaLog(bootstrap, client_id="versions"), "versions"
    log.create_topics(topics_of(run, partitions=1))
    producer, transactions, builder = (
        log.producer(linger_ms=5.0),
        log.transactions(f"{run}.trainer"),
        RecordBuilder(run, created_s=time.time()),
    )
    transactions.commit([builder.opened()])
    rng, number = np.random.default_rng(0), iter(range(1 << 30))

    def commit() -> float:
        version = next(number)
        tensors = [TensorBytes(name="all", dtype="bfloat16", shape=(nbytes // 2,), data=rng.bytes(nbytes))]
        manifest = send_version(
            producer, tensors, run=run, version=version, step=version,
            partitions=chunk_partitions(version, count=log.partitions(f"{run}.weights") or 0), max_bytes=8 << 20,
        )  # fmt: skip
        started = time.monotonic()
        transactions.commit([manifest_record(manifest, run=run), builder.version(version)])
        return started

    commit()
    prefetch = WeightPrefetch(log, run)

    def turn() -> float:
        started, version = commit(), builder.seq - 2
        while prefetch.version < version:
            prefetch.wait(0.5)
            if time.monotonic() - started > WAIT_S:
                raise SystemExit(f"version {version} did not arrive")
        return time.monotonic() - started

    try:
        turn()
        yield turn
    finally:
        prefetch.close()
        transactions.close()
        producer.close()
        log.close()


@contextmanager
def bare_chains(bootstrap: str, sizes: list[int]) -> Iterator[tuple[Callable[[], float], Callable[[], float]]]:
    """The same two turns without Penstock, in processes of their own."""
    from kafka.admin import KafkaAdminClient, NewTopic

    admin, large = KafkaAdminClient(**python_client(bootstrap)), {"max.message.bytes": str(16 << 20)}
    admin.create_topics([NewTopic(name, 1, 1, topic_configs=large) for name in TOPICS])
    admin.close()
    command, words = command_of(__name__), ["--bytes", *map(str, sizes)]
    echoing = subprocess.Popen([*command, "--echo", bootstrap, *words])
    driver = subprocess.Popen([*command, "--bare", bootstrap, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    requests, replies = driver.stdin, driver.stdout
    assert requests is not None and replies is not None

    def turn(chain: str) -> float:
        requests.write(f"{chain}\n")
        requests.flush()
        if not (line := replies.readline()):
            raise SystemExit("the bare chain ended")
        return float(line)

    try:
        yield lambda: turn("sample"), lambda: turn("version")
    finally:
        for process in (driver, echoing):
            process.terminate()
            process.wait(30)


def echo(bootstrap: str, nbytes: int) -> None:
    """Write a record for each record read, in a transaction with its offset."""
    from kafka import KafkaConsumer, OffsetAndMetadata

    consumer = KafkaConsumer(SAMPLES_TOPIC, **python_client(bootstrap), group_id="bare", auto_offset_reset="earliest", **READING)
    producer, value = transactional(bootstrap, "bare-echo"), os.urandom(nbytes)
    while True:
        for partition, records in consumer.poll(500).items():
            producer.begin_transaction()
            for _ in records:
                producer.send(GROUPS_TOPIC, value)
            offsets = {partition: OffsetAndMetadata(records[-1].offset + 1, "", -1)}
            producer.send_offsets_to_transaction(offsets, consumer.group_metadata())
            producer.commit_transaction()


def bare(bootstrap: str, sample_bytes: int, _group_bytes: int, version_bytes: int) -> None:
    """Take one turn for each line of the input and print its seconds."""
    from kafka import KafkaProducer

    producer = KafkaProducer(**python_client(bootstrap), acks="all", linger_ms=0, max_request_size=16 << 20)
    committing, samples, chunks = transactional(bootstrap, "bare-trainer"), os.urandom(sample_bytes), os.urandom(version_bytes)
    groups, manifests, weights = (reader(bootstrap, topic) for topic in (GROUPS_TOPIC, MANIFESTS_TOPIC, WEIGHTS_TOPIC))
    for line in sys.stdin:
        if line.strip() == "sample":
            started = time.monotonic()
            producer.send(SAMPLES_TOPIC, samples)
            receive(groups, 1)
        else:
            for start in range(0, version_bytes, CHUNK_BYTES):
                producer.send(WEIGHTS_TOPIC, chunks[start : start + CHUNK_BYTES])
            producer.flush()
            started = time.monotonic()
            committing.begin_transaction()
            committing.send(MANIFESTS_TOPIC, samples[:2000])
            committing.commit_transaction()
            receive(manifests, 1)
            receive(weights, version_bytes)
        print(time.monotonic() - started, flush=True)


def receive(consumer: Any, nbytes: int) -> None:
    """Read at least `nbytes`."""
    size = 0
    while size < nbytes:
        size += sum(len(record.value) for records in consumer.poll(500).values() for record in records)


def reader(bootstrap: str, topic: str) -> Any:
    """A reader of committed records, at the topic's end."""
    from kafka import KafkaConsumer, TopicPartition

    consumer = KafkaConsumer(**python_client(bootstrap), group_id=None, isolation_level="read_committed", **READING)
    consumer.assign([TopicPartition(topic, 0)])
    consumer.seek_to_end()
    consumer.position(TopicPartition(topic, 0))
    return consumer


def transactional(bootstrap: str, name: str) -> Any:
    """A transactional producer with the retry pause of Penstock's."""
    from kafka import KafkaProducer

    producer = KafkaProducer(**python_client(bootstrap), transactional_id=name, acks="all", linger_ms=0, retry_backoff_ms=2)
    producer.init_transactions()
    return producer
