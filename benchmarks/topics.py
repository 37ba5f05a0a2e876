"""What a record of each topic costs: encode, write, read and decode, beside a copy of its bytes in memory and Kafka's own perf tools.

    python benchmarks/topics.py --rounds 3

Penstock writes with a worker's producer and reads with a worker's tail, one process each after the other; Kafka's `ProducerPerformance`
and `ConsumerPerformance` (org.apache.kafka:kafka-tools, fetched by jgo at first use) write and read records of the same size in a topic
of the same settings, all acknowledged by the same embedded broker. Both take turns within a round; figures are medians over the rounds.
"Share" is Penstock's records per second divided by the tool's: above 1 Penstock is faster. A tool's start of its Java is not counted.
"""

import argparse
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from wire import a_group, a_sample, cpu_us

from penstock.infra.broker import embedded
from penstock.infra.broker.jars import KAFKA
from penstock.infra.broker.java import find_java
from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline.runtime.topic_reader import scan
from penstock.topics import groups, prompts, rollouts, weights
from penstock.topics.catalogue import topics_of
from penstock.topics.wire.record import Outgoing

RUN = "perf"
BYTES, FEWEST, MOST = 64 << 20, 32, 20_000
"""So many bytes of a kind are written in a round, in at least and at most so many records."""
TOOLS = f"org.apache.kafka:kafka-tools:{KAFKA.rpartition(':')[2]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of record."""

    name: str
    topic: str
    encode: Callable[[], bytes]
    decode: Callable[[bytes], Any]


def kinds() -> Iterator[Kind]:
    """Records of the four topics that grow with a run, small and large."""
    prompt = prompts.Prompt(
        group=3, slot=3, min_version=4, samples_per_prompt=16, epoch=0, row=7, prompt="What is 1 + 1?" * 20, messages=None,
        token_ids=np.arange(100, dtype=np.int32), columns='{"answer": "2"}', created_ns=10**18,
    )  # fmt: skip
    yield Kind(name="prompt of 100 tokens", topic="prompts", encode=partial(prompts.encode, prompt), decode=prompts.decode)
    for tokens in (8, 2000):
        drawn = [a_sample(number, tokens) for number in range(16)]
        scored = a_group(drawn)
        yield Kind(name=f"sample of {tokens:,}", topic="rollouts", encode=partial(rollouts.encode, drawn[0]), decode=rollouts.decode)
        yield Kind(
            name=f"16 samples of {tokens:,}",
            topic="rollouts",
            encode=partial(rollouts.encode, *drawn),
            decode=rollouts.decode_all,
        )
        yield Kind(name=f"group of 16 x {tokens:,}", topic="groups", encode=partial(groups.encode, scored), decode=groups.decode)
    chunk = weights.Chunk(version=1, index=0, data=os.urandom(8 << 20))
    yield Kind(name="weights, 8 MiB", topic="weights", encode=partial(weights.encode_chunk, chunk), decode=weights.decode_chunk)


@contextmanager
def topic_of(log: KafkaLog, kind: Kind) -> Iterator[str]:
    """An empty topic with the settings of the kind's own, of one partition."""
    specs = topics_of(RUN, partitions=1, weight_partitions=2)
    name = f"{RUN}.{kind.topic}"
    log.create_topics({name: specs[name]})
    try:
        yield name
    finally:
        log.delete_topics([name])


def ours(log: KafkaLog, topic: str, value: bytes, count: int) -> tuple[float, float]:
    """Records per second that are written and acknowledged, and read."""
    outgoing = Outgoing(topic=topic, partition=0, key=b"3", headers=(("run", RUN.encode()), ("group", b"3")), value=value)
    producer = log.producer()
    began = time.monotonic()
    for pending in [producer.send(outgoing) for _ in range(count)]:
        pending.offset()
    written = time.monotonic()
    producer.close()
    before = time.monotonic()
    read = sum(1 for _ in scan(log, topic))
    after = time.monotonic()
    assert read == count, f"{read} of {count} records were read"
    return count / (written - began), count / (after - before)


class Tools:
    """Kafka's perf tools."""

    def __init__(self, bootstrap: str) -> None:
        import jgo

        self._bootstrap = bootstrap
        jars = os.pathsep.join(str(artifact.resolve()) for artifact in jgo.resolve(TOOLS))
        self._java = [str(find_java().program), "-cp", jars]

    def measure(self, topic: str, size: int, count: int) -> tuple[float, float]:
        """Records per second that are written and acknowledged, and read."""
        largest = str(size + (1 << 20))
        wrote = self._run(
            "ProducerPerformance", "--topic", topic, "--num-records", str(count), "--record-size", str(size), "--throughput", "-1",
            "--command-property", "acks=all", f"max.request.size={largest}", "batch.size=1000000", "linger.ms=10", "buffer.memory=67108864",
        )  # fmt: skip
        sent = re.findall(r"([\d.]+) records/sec", wrote)
        read = self._run("ConsumerPerformance", "--topic", topic, "--num-records", str(count), "--fetch-size", largest)
        return float(sent[-1]), float(read.strip().splitlines()[-1].split(",")[-1])

    def _run(self, tool: str, *words: str) -> str:
        command = [*self._java, f"org.apache.kafka.tools.{tool}", "--bootstrap-server", self._bootstrap, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{tool}: {(done.stderr or done.stdout)[-1000:]}")
        return done.stdout


def measured(log: KafkaLog, tools: Tools, kind: Kind, *, rounds: int) -> str:
    """The kind's line of the table."""
    value = kind.encode()
    kind.decode(value)
    count = min(MOST, max(FEWEST, BYTES // len(value)))
    found: list[tuple[float, ...]] = []
    for _ in range(rounds):
        cpu = cpu_us(lambda: bytearray(value)), cpu_us(kind.encode), cpu_us(lambda: kind.decode(value))
        with topic_of(log, kind) as topic:
            own = ours(log, topic, value, count)
        with topic_of(log, kind) as topic:
            found.append((*cpu, *own, *tools.measure(topic, len(value), count)))
    copy, encode, decode, write, read, tool_write, tool_read = (statistics.median(column) for column in zip(*found, strict=True))
    return (
        f"{kind.name:22}{len(value):>10,}{copy:>8.0f}{encode:>8.0f}{decode:>8.0f}"
        f"{write:>10,.0f}{tool_write:>10,.0f}{write / tool_write:>7.2f}{read:>10,.0f}{tool_read:>10,.0f}{read / tool_read:>7.2f}"
    )


def main() -> None:
    """Measure every kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="topics-") as home:
        broker = embedded.start(home=Path(home))
        try:
            log, tools = KafkaLog(broker.bootstrap), Tools(broker.bootstrap)
            print(f"{'':32}{'us of CPU a record':>24}{'written/s':>20}{'':7}{'read/s':>20}")
            print(f"{'record':22}{'bytes':>10}{'copy':>8}{'encode':>8}{'decode':>8}" + 2 * f"{'ours':>10}{'Kafka':>10}{'share':>7}")
            for kind in kinds():
                print(measured(log, tools, kind, rounds=chosen.rounds), flush=True)
            log.close()
        finally:
            embedded.stop(Path(home))


if __name__ == "__main__":
    main()
