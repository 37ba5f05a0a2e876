"""How fast records go through TLS with SCRAM, against the same broker's plain listener.

    python benchmarks/tls.py --jit full c1

Writes and reads records of 1 MiB through both listeners in turn, several times, with the clients the workers use: kafka-python writes and
reads, librdkafka reads. `--jit c1` starts the broker as the embedded one is started, without Java's optimising compiler, which alone
makes AES fast; `full` as a cluster's broker is. Prints the median of each and ends with 1 when, with `full`, TLS stays below 150 MB/s
in both directions and below half of what the plain listener does: a busy machine slows both.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from penstock.infra.broker import settings
from penstock.infra.kafka.bulk import BulkReader
from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline.launch.acls import Rule
from penstock.topics.catalogue import TopicSpec
from penstock.topics.wire.record import Outgoing
from tests.support.secured_broker import SecuredBroker

RECORD_BYTES = 1 << 20
WANTED_MB_S, WANTED_SHARE = 150.0, 0.5
STOPS_AT_C1 = "-XX:TieredStopAtLevel=1"
PASSWORD = "right"


def measured(log: KafkaLog, topic: str, records: int) -> dict[str, float]:
    """MB/s of writing and of both ways of reading."""
    value, producer = os.urandom(RECORD_BYTES), log.producer(linger_ms=0)
    began = time.perf_counter()
    sent = [producer.send(Outgoing(topic=topic, partition=0, key=None, headers=(), value=value)) for _ in range(records)]
    offsets = [pending.offset(120.0) for pending in sent]
    times = {"write": time.perf_counter() - began}
    producer.close()
    began = time.perf_counter()
    log.read(topic, 0, offsets, timeout_s=300.0)
    times["read"] = time.perf_counter() - began
    began = time.perf_counter()
    assert sum(map(len, BulkReader(log.connection).read(topic, 0, first=offsets[0], end=offsets[-1] + 1))) == records
    times["bulk read"] = time.perf_counter() - began
    return {name: records * RECORD_BYTES / 1e6 / seconds for name, seconds in times.items()}


def compared(jit: str, *, records: int, rounds: int) -> dict[str, dict[str, float]]:
    """Listener -> median MB/s of each, with a broker that is compiled so."""
    stock, home = settings.JVM, Path(tempfile.mkdtemp(prefix="penstock-tls-"))
    settings.JVM = stock if jit == "c1" else tuple(option for option in stock if option != STOPS_AT_C1)
    broker = SecuredBroker(home)
    try:
        broker.add_user("ann", PASSWORD)
        rules = [Rule("topic", "speed", "prefixed", operation) for operation in ("READ", "WRITE", "DESCRIBE")]
        broker.allow("ann", [*rules, Rule("group", "penstock-bulk", "literal", "DESCRIBE")])
        logs = {"plain": KafkaLog(broker.plain), "tls": KafkaLog(broker.secure, security=broker.credentials("ann", PASSWORD))}
        found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in logs}
        for name in logs:
            logs["plain"].create_topics({f"speed.{name}": TopicSpec(name=f"speed.{name}", partitions=1, configs={})})
        for turn in range(rounds + 1):
            for name, log in logs.items():
                for what, speed in measured(log, f"speed.{name}", records).items():
                    if turn:  # in the first turn Java compiles
                        found[name][what].append(speed)
        for log in logs.values():
            log.close()
        return {name: {what: statistics.median(speeds) for what, speeds in by_what.items()} for name, by_what in found.items()}
    finally:
        broker.close()
        settings.JVM = stock


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jit", nargs="+", choices=["full", "c1"], default=["full", "c1"])
    parser.add_argument("--records", type=int, default=128, help="of 1 MiB, each way and turn")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    kept = True
    for jit in chosen.jit:
        found = compared(jit, records=chosen.records, rounds=chosen.rounds)
        print(f"broker compiled by {'C1 and C2' if jit == 'full' else 'C1 only'}")
        for what, plain in found["plain"].items():
            speed = found["tls"][what]
            print(f"  {what:<10}{plain:>8.0f} MB/s plain{speed:>8.0f} MB/s TLS{speed / plain:>7.0%}", flush=True)
            kept = kept and (jit == "c1" or speed >= WANTED_MB_S or speed >= WANTED_SHARE * plain)
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
