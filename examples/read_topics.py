"""Reads every topic of a run without Penstock: python examples/read_topics.py HOST:PORT RUN [SETTINGS]; format: docs/reference/topics.md"""

import sys
from collections import Counter

import pyarrow as pa
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, TopicPartition

bootstrap, run, *files = sys.argv[1:]
login = dict(line.strip().split("=", 1) for file in files for line in open(file, encoding="utf-8"))  # noqa: SIM115
reading = {"group.id": "reader", "enable.auto.commit": False, "enable.partition.eof": True}
consumer = Consumer({"bootstrap.servers": bootstrap, **reading, **login})
topics = {name: topic for name, topic in consumer.list_topics(timeout=10).topics.items() if name.startswith(f"{run}.")}
left = {(name, partition) for name, topic in topics.items() for partition in topic.partitions}
consumer.assign([TopicPartition(name, partition, OFFSET_BEGINNING) for name, partition in left])
records, rewards = Counter(dict.fromkeys(topics, 0)), {}
while left:
    if (message := consumer.poll(10.0)) is None:
        sys.exit("the broker sends nothing more")
    if (error := message.error()) is not None:
        if error.name() != "_PARTITION_EOF":
            raise KafkaException(error)
        left.discard((message.topic(), message.partition()))
        continue
    records[message.topic()] += 1
    row = pa.ipc.open_stream(message.value()).read_all().to_pylist()[0]
    for one in row["samples"] if message.topic() == f"{run}.groups" else ():
        rewards.setdefault(row["group"], {}).setdefault(one["sample"], one["reward"])  # of records that repeat another the first counts
consumer.close()
for topic, count in records.items():
    print(f"{topic}: {count} records")
for group, found in sorted(rewards.items()):
    print(f"group {group}: rewards {' '.join(str(found[sample]) for sample in sorted(found))}")
