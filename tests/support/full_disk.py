"""What a broker does when the disk under it is full: `unshare -rm python -m tests.support.full_disk HOME`, in a mount namespace.

Prints one JSON object.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from penstock.infra.broker import embedded
from penstock.infra.errors import BrokerError, LogError
from penstock.infra.kafka.log import KafkaLog
from penstock.topics.catalogue import TopicSpec
from penstock.topics.wire.record import Outgoing

_LIMIT_S = 60.0


def main(home: Path) -> None:
    """Fill the disk, look, make room, look again."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(home)], check=True)
    found: dict[str, object] = {"home": str(home)}
    bootstrap = embedded.start(home=home).bootstrap
    log = KafkaLog(bootstrap, give_up_s=2)
    log.create_topics({"a": TopicSpec(name="a", partitions=1, configs={"retention.ms": "-1"})})
    producer = log.producer()
    acknowledged = []
    try:
        while len(acknowledged) < 100:
            value = os.urandom(1 << 20)
            producer.send(Outgoing(topic="a", partition=0, key=None, headers=(), value=value)).offset()
            acknowledged.append(value)
    except LogError as error:
        found["writer"] = str(error)
    producer.close(0)
    deadline = time.monotonic() + _LIMIT_S
    while embedded.status(home).running and time.monotonic() < deadline:
        time.sleep(0.05)
    found["running"], found["why"] = embedded.status(home).running, embedded.status(home).ended
    try:
        embedded.start(home=home)
    except BrokerError as error:
        found["start"] = str(error)
    subprocess.run(["mount", "-o", "remount,size=200m", str(home)], check=True)
    found["same_address"] = embedded.start(home=home).bootstrap == bootstrap
    tail = KafkaLog(bootstrap).tail({("a", 0): "earliest"})
    there = [record.value for record in tail.read_to_end(_LIMIT_S)]
    found["acknowledged"], found["missing"] = len(acknowledged), len(set(acknowledged) - set(there))
    found["why_while_it_runs"] = embedded.status(home).ended
    embedded.stop(home)
    found["why_after_stop"] = embedded.status(home).ended
    print(json.dumps(found), flush=True)
    os._exit(0)  # clients of the dead broker have threads that would wait


if __name__ == "__main__":
    main(Path(sys.argv[1]))
