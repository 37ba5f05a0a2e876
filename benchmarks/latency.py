"""How long a finished sample takes to the trainer, and committed weights to a rollout worker, beside the same chain of bare client calls.

    python benchmarks/latency.py --rounds 200

A group's samples go from this process, with a worker's producer, to a real scorer process, whose outcome comes back through the trainer's
reader, decoded. The bare chain moves as many bytes the same way without Penstock: a producer, a process that reads as a member of a group
and writes in a transaction with its offsets, a reader of committed records; nothing is encoded, decoded or rewarded. A version is taken
from its manifest's transaction to its bytes in a worker's copy, digest checked; the bare chain commits a record, reads it, and reads the
chunks. Both chains take turns on one embedded broker; the bare one runs in processes that import nothing but the client. Ends with 1 when
a median or a 99th percentile is more than twice the bare one.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.bare_clients import python_client

LIMIT = 2.0
WAIT_S = 30.0
SAMPLES_TOPIC, GROUPS_TOPIC, WEIGHTS_TOPIC, MANIFESTS_TOPIC = "bare-samples", "bare-groups", "bare-weights", "bare-manifests"
TOPICS = (SAMPLES_TOPIC, GROUPS_TOPIC, WEIGHTS_TOPIC, MANIFESTS_TOPIC)
TOKENS, SAMPLES, CHUNK_BYTES = 256, 8, 8 << 20
READING: dict[str, Any] = {"enable_auto_commit": False, "max_partition_fetch_bytes": 16 << 20, "retry_backoff_ms": 20}


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--mib", type=float, default=4.0, help="size of a version")
    parser.add_argument("--bare", metavar="BOOTSTRAP", help=argparse.SUPPRESS)
    parser.add_argument("--echo", metavar="BOOTSTRAP", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.echo:
        echo(chosen.echo, chosen.bytes[1])
    if chosen.bare:
        bare(chosen.bare, *chosen.bytes)
        return 0
    with tempfile.TemporaryDirectory(prefix="latency-") as name:
        os.environ["PENSTOCK_HOME"] = name
        return compared(Path(name), rounds=chosen.rounds, version_bytes=int(chosen.mib * 2**20))


def compared(home: Path, *, rounds: int, version_bytes: int) -> int:
    """Both chains in turn, `rounds` times."""
    from penstock.infra.broker import embedded

    broker = embedded.start(home=home)
    found: dict[str, list[float]] = {}
    try:
        with ExitStack() as stack:
            samples, sizes = stack.enter_context(our_samples(home, broker.bootstrap))
            version = stack.enter_context(our_weights(broker.bootstrap, version_bytes))
            bare_samples, bare_version = stack.enter_context(bare_chains(broker.bootstrap, [*sizes, version_bytes]))
            turns = {"sample": samples, "sample, bare": bare_samples, "version": version, "version, bare": bare_version}
            for number in range(rounds + 5):
                for what, turn in turns.items():
                    time.sleep(0.02 + 0.001 * (number * 7 % 31))  # at another moment of every reader's poll each time
                    taken = turn()
                    if number >= 5:
                        found.setdefault(what, []).append(1000 * taken)
    finally:
        embedded.stop(home)
    print(f"{'[ms]':<16}{'p50':>8}{'p99':>8}   {rounds} rounds; {sizes[0]:,} bytes of samples, {version_bytes / 2**20:g} MiB of weights")
    ratios = []
    for what, values in found.items():
        print(f"{what:<16}{np.percentile(values, 50):>8.1f}{np.percentile(values, 99):>8.1f}")
    for what in ("sample", "version"):
        of = [float(np.percentile(found[what], at) / np.percentile(found[f"{what}, bare"], at)) for at in (50, 99)]
        ratios += of
        print(f"{what}: p50 {of[0]:.2f}, p99 {of[1]:.2f} times the bare chain; at most {LIMIT:g}")
    return int(max(ratios) > LIMIT)


@contextmanager
def our_samples(home: Path, bootstrap: str) -> Iterator[tuple[Callable[[], float], list[int]]]:
    """One turn of the chain with a real scorer; and the bytes of a group's samples and of its outcome."""
    from many_groups import Size, settings_of

    from penstock.infra.kafka.log import KafkaLog
    from penstock.pipeline.config.load import from_table
    from penstock.pipeline.launch.create import create
    from penstock.topics import groups, rollouts
    from penstock.topics.wire.record import Outgoing

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.support.a_run import Teller

    log, run = KafkaLog(bootstrap, client_id="latency"), "latency"
    settings = settings_of(home, bootstrap, Size(groups=10_000, per_step=1, slots=1, window=1, keep_steps=None))
    settings["schedule"]["samples_per_prompt"], settings["kafka"]["partitions"] = SAMPLES, 1
    create(from_table(settings), log=log, run_id=run, notify=lambda _: None)
    command = [sys.executable, "-m", "penstock.workers", "scorer", "--run", run, "--bootstrap", bootstrap, "--slot", "0"]
    with (home / "scorer.txt").open("wb") as output:
        scorer = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    teller, producer = Teller(run, created_s=time.time()), log.producer(linger_ms=5.0)
    tail = log.tail({(f"{run}.groups", 0): "earliest"})

    def turn() -> float:
        told = teller.group([0.0] * SAMPLES, version=0, tokens=TOKENS)
        producer.send(told[0])
        producer.flush()
        samples = [replace(rollouts.decode(record.value), token_ids=np.full(TOKENS, 5, np.int32)) for record in told[1 : 1 + SAMPLES]]
        time.sleep(0.05)  # the prompt is known before its samples are drawn
        began = time.monotonic()
        value = rollouts.encode(*samples)
        headers = rollouts.headers(*samples, run=run).encode(value)
        producer.send(Outgoing(topic=f"{run}.rollouts", partition=0, key=told[0].key, headers=headers, value=value))
        sizes[:] = [len(value), 0]
        while time.monotonic() - began < WAIT_S + 60:
            for record in tail.poll(0.5):
                group = groups.read(record, run=run)[1]
                if group.group == samples[0].group:
                    sizes[1] = len(record.value)
                    return time.monotonic() - began
        raise SystemExit(f"no outcome came:\n{(home / 'scorer.txt').read_text()[-2000:]}")

    sizes: list[int] = []
    turn()
    try:
        yield turn, sizes
    finally:
        scorer.terminate()
        scorer.wait(60)
        tail.close()
        producer.close()
        log.close()


@contextmanager
def our_weights(bootstrap: str, nbytes: int) -> Iterator[Callable[[], float]]:
    """One turn: a version's chunks are sent, then its manifest is committed; until a worker's copy holds it."""
    from penstock.infra.kafka.log import KafkaLog
    from penstock.infra.tensors.stream import TensorBytes
    from penstock.pipeline.runtime.weights.prefetch import WeightPrefetch
    from penstock.pipeline.runtime.weights.publish import chunk_partitions, manifest_record, send_version
    from penstock.topics.catalogue import topics_of
    from tests.support.a_run import Teller

    log, run = KafkaLog(bootstrap, client_id="versions"), "versions"
    log.create_topics(topics_of(run, partitions=1))
    producer, transactions, teller = log.producer(linger_ms=5.0), log.transactions(f"{run}.trainer"), Teller(run, created_s=time.time())
    transactions.commit([teller.opened()])
    rng, number = np.random.default_rng(0), iter(range(1 << 30))

    def commit() -> float:
        version = next(number)
        tensors = [TensorBytes(name="all", dtype="bfloat16", shape=(nbytes // 2,), data=rng.bytes(nbytes))]
        manifest = send_version(
            producer,
            tensors,
            run=run,
            version=version,
            step=version,
            partitions=chunk_partitions(version, count=log.partitions(f"{run}.weights") or 0),
            max_bytes=8 << 20,
        )
        began = time.monotonic()
        transactions.commit([manifest_record(manifest, run=run), teller.version(version)])
        return began

    commit()
    prefetch = WeightPrefetch(log, run)

    def turn() -> float:
        began, version = commit(), teller.seq - 2
        while prefetch.version < version:
            prefetch.wait(0.5)
            if time.monotonic() - began > WAIT_S:
                raise SystemExit(f"version {version} did not come")
        return time.monotonic() - began

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
    command, words = [sys.executable, __file__], ["--bytes", *map(str, sizes)]
    echoing = subprocess.Popen([*command, "--echo", bootstrap, *words])
    driver = subprocess.Popen([*command, "--bare", bootstrap, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    asked, answered = driver.stdin, driver.stdout
    assert asked is not None and answered is not None

    def turn(which: str) -> float:
        asked.write(f"{which}\n")
        asked.flush()
        if not (line := answered.readline()):
            raise SystemExit("the bare chain ended")
        return float(line)

    try:
        yield lambda: turn("sample"), lambda: turn("version")
    finally:
        for process in (driver, echoing):
            process.terminate()
            process.wait(30)


def echo(bootstrap: str, nbytes: int) -> None:
    """For each record a record, written in a transaction with the offset of what was read."""
    from kafka import KafkaConsumer, OffsetAndMetadata

    consumer = KafkaConsumer(SAMPLES_TOPIC, **python_client(bootstrap), group_id="bare", auto_offset_reset="earliest", **READING)
    producer, answer = transactional(bootstrap, "bare-echo"), os.urandom(nbytes)
    while True:
        for partition, records in consumer.poll(500).items():
            producer.begin_transaction()
            for _ in records:
                producer.send(GROUPS_TOPIC, answer)
            marks = {partition: OffsetAndMetadata(records[-1].offset + 1, "", -1)}
            producer.send_offsets_to_transaction(marks, consumer.group_metadata())
            producer.commit_transaction()


def bare(bootstrap: str, sample_bytes: int, _group_bytes: int, version_bytes: int) -> None:
    """For each line of the input one turn; prints its seconds."""
    from kafka import KafkaProducer

    producer = KafkaProducer(**python_client(bootstrap), acks="all", linger_ms=0, max_request_size=16 << 20)
    committing, samples, chunks = transactional(bootstrap, "bare-trainer"), os.urandom(sample_bytes), os.urandom(version_bytes)
    groups, manifests, weights = (reader(bootstrap, topic) for topic in (GROUPS_TOPIC, MANIFESTS_TOPIC, WEIGHTS_TOPIC))
    for line in sys.stdin:
        if line.strip() == "sample":
            began = time.monotonic()
            producer.send(SAMPLES_TOPIC, samples)
            taken(groups, 1)
        else:
            for start in range(0, version_bytes, CHUNK_BYTES):
                producer.send(WEIGHTS_TOPIC, chunks[start : start + CHUNK_BYTES])
            producer.flush()
            began = time.monotonic()
            committing.begin_transaction()
            committing.send(MANIFESTS_TOPIC, samples[:2000])
            committing.commit_transaction()
            taken(manifests, 1)
            taken(weights, version_bytes)
        print(time.monotonic() - began, flush=True)


def taken(consumer: Any, nbytes: int) -> bytes:
    """What comes next, so many bytes of it at least."""
    found = bytearray()
    while len(found) < nbytes:
        for records in consumer.poll(500).values():
            for record in records:
                found += record.value
    return bytes(found)


def reader(bootstrap: str, topic: str) -> Any:
    """A reader of committed records, at the topic's end."""
    from kafka import KafkaConsumer, TopicPartition

    consumer = KafkaConsumer(**python_client(bootstrap), group_id=None, isolation_level="read_committed", **READING)
    consumer.assign([TopicPartition(topic, 0)])
    consumer.seek_to_end()
    consumer.position(TopicPartition(topic, 0))
    return consumer


def transactional(bootstrap: str, name: str) -> Any:
    """A producer of transactions, with the pause between two questions that Penstock's has."""
    from kafka import KafkaProducer

    producer = KafkaProducer(**python_client(bootstrap), transactional_id=name, acks="all", linger_ms=0, retry_backoff_ms=2)
    producer.init_transactions()
    return producer


if __name__ == "__main__":
    sys.exit(main())
