"""A recorded run read by a client that knows the documented wire format and none of our code."""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
from blake3 import blake3
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

import penstock
from penstock.infra.broker.access import LOGIN_FILE
from penstock.topics.catalogue import topics_of
from tests.support.bare_clients import c_client
from tests.support.paths import ROOT
from tests.support.recorded_run import RecordedRun

BYTES = {"float32": 4, "bfloat16": 2}


def test_the_foreign_client_prints_the_rewards_that_the_facade_gives(recorded: RecordedRun, penstock_home: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "read_topics.py"), recorded.bootstrap, recorded.run,
         str(penstock_home / "broker" / LOGIN_FILE)],
        capture_output=True, text=True, timeout=180, check=False, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = {int(group): rewards.split() for group, rewards in re.findall(r"^group (\d+): rewards (.*)$", done.stdout, re.MULTILINE)}
    counted = dict(re.findall(rf"^{recorded.run}\.([a-z-]+): (\d+) records$", done.stdout, re.MULTILINE))
    expected: dict[int, list[str]] = {}
    with penstock.open(recorded.run, bootstrap=recorded.bootstrap) as run:
        rows = run.samples().to_pylist()
        admitted = run.groups().num_rows
    for row in rows:
        if row["reward"] is not None:
            expected.setdefault(row["group"], []).append(str(row["reward"]))
    assert printed == expected
    assert len(printed) >= 32
    assert {f"{recorded.run}.{topic}" for topic in counted} == set(topics_of(recorded.run, partitions=1))
    assert (int(counted["prompts"]), int(counted["groups"])) == (admitted, admitted)
    assert admitted <= int(counted["rollouts"]) < len(rows)  # samples that were published together are one record
    assert int(counted["dead-letters"]) == recorded.report["dead_letters"]["total"]


def test_a_version_is_put_together_as_it_is_documented(recorded: RecordedRun) -> None:
    """docs/explanation/the-log.md, "Weights without Penstock", step by step."""
    consumer = Consumer({**c_client(recorded.bootstrap), "group.id": "reader", "enable.auto.commit": False})

    def row(partition: int, offset: int) -> dict[str, object]:
        consumer.assign([TopicPartition(f"{recorded.run}.weights", partition, offset)])
        message = consumer.poll(30.0)
        assert message is not None and message.error() is None
        return pa.ipc.open_stream(message.value()).read_all().to_pylist()[0]

    manifest = row(0, OFFSET_BEGINNING)
    assert (manifest["version"], manifest["encoding"], manifest["base_version"]) == (0, "full", None)
    pieces = []
    chunks = zip(manifest["chunk_partitions"], manifest["chunk_offsets"], manifest["chunk_sizes"], manifest["chunk_sha256"], strict=True)
    for partition, offset, size, sha256 in chunks:
        data = row(partition, offset)["data"]
        assert (len(data), hashlib.sha256(data).hexdigest()) == (size, sha256)
        pieces.append(data)
    consumer.close()
    stream, digest, start = b"".join(pieces), blake3(), 0
    assert len(stream) == manifest["nbytes"]
    assert manifest["names"] == sorted(manifest["names"])
    for name, dtype, shape in zip(manifest["names"], manifest["dtypes"], manifest["shapes"], strict=True):
        size = BYTES[dtype]
        for length in shape:
            size *= length
        digest.update(f"{len(name)}:{name};{dtype};{','.join(map(str, shape))};{size};".encode() + stream[start : start + size])
        start += size
    assert start == len(stream)
    assert f"blake3:{digest.hexdigest()}" == manifest["digest"]
