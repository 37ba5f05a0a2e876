"""A version is damaged on disk, cut off, or deleted while a run is at work: the run goes on, and the audit at its end is clean."""

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Log
from penstock.pipeline.runtime.weights import receive as weight_prefetch
from penstock.topics import weights
from penstock.topics.weights import Manifest
from penstock.workers.trainer import weight_publisher
from penstock.workers.trainer import worker as trainer
from tests.support import small_chunks
from tests.support.own_broker import OwnBroker
from tests.support.worker_set import PIPELINE, WorkerSet, audited, complete, config_of, same_run

pytestmark = pytest.mark.slow
DAMAGED = 2
"""The version that is lost once all of its chunks are sent, before its manifest is."""
Damage = Callable[[OwnBroker, KafkaLog, str, Manifest], None]


def segment_of(broker: OwnBroker, topic: str, partition: int) -> Path:
    return max((broker.home / "broker").rglob(f"{topic}-{partition}/*.log"))


def chunk_at(log: KafkaLog, topic: str, place: tuple[int, int]) -> bytes:
    """The bytes of a chunk record."""
    (record,) = log.read(topic, place[0], [place[1]])
    return bytes(record.value)


def flip_a_byte(broker: OwnBroker, log: KafkaLog, topic: str, manifest: Manifest) -> None:
    """Damage a chunk on the disk beneath the broker."""
    place = weights.chunk_places(manifest)[1]
    value, path = chunk_at(log, topic, place), segment_of(broker, topic, place[0])
    with path.open("r+b") as file:
        at = file.read().index(value) + len(value) // 2
        file.seek(at)
        file.write(bytes([value[len(value) // 2] ^ 1]))


def cut_off_the_tail(broker: OwnBroker, log: KafkaLog, topic: str, manifest: Manifest) -> None:
    """The broker dies, and comes back with a partition that ends in the middle of the version's last chunk there."""
    place = weights.chunk_places(manifest)[-1]
    value, path = chunk_at(log, topic, place), segment_of(broker, topic, place[0])
    at = path.read_bytes().index(value)
    broker.kill()
    with path.open("r+b") as file:
        file.truncate(at + len(value) // 2)
    broker.start()


def delete_all_chunks(_: OwnBroker, log: KafkaLog, topic: str, manifest: Manifest) -> None:
    partitions = {(topic, partition) for partition in manifest.chunk_partitions}
    log.delete_records(log.end_offsets(sorted(partitions)))


def manifests_of(log: Log, run: str) -> list[Manifest]:
    with closing(log.tail({(f"{run}.weights", weights.MANIFESTS): "earliest"})) as tail:
        return [weights.read(record, run=run)[1] for record in tail.read_to_end(60.0)]


@pytest.mark.parametrize("damage", [flip_a_byte, cut_off_the_tail, delete_all_chunks])
@pytest.mark.parametrize("mode", ["pipelined", "one_step_off"])
def test_a_run_whose_newest_version_is_lost_goes_on_to_its_end(
    own_broker: OwnBroker, tiny_model: Path, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Damage, mode: str
) -> None:
    config = config_of(tiny_model, tmp_path, run={"steps": 6, "seed": 7}, schedule={"mode": mode}, rollout={"workers": 1})
    bootstrap = own_broker.start()
    plain = complete(bootstrap, f"{run_id}-plain", config)
    damaged, send = threading.Event(), small_chunks.sent_small

    def sent_and_lost(*arguments: Any, **named: Any) -> Manifest:
        manifest = send(*arguments, **named)
        if manifest.version == DAMAGED and not damaged.is_set():
            with closing(KafkaLog(bootstrap)) as log:
                damage(own_broker, log, f"{run_id}.weights", manifest)
            damaged.set()
        return manifest

    monkeypatch.setattr(weight_publisher, "send_version", sent_and_lost)
    monkeypatch.setattr(trainer, "LOOK_S", 2.0)
    monkeypatch.setattr(weight_prefetch, "RETRY_S", 1.0)
    with WorkerSet(bootstrap, run_id) as worker_set:
        worker_set.create(config)
        worker_set.start_all(config, PIPELINE)
        worker_set.wait()
        report = worker_set.report()
        found = manifests_of(worker_set.log, run_id)
    assert damaged.is_set()
    sent = [manifest for manifest in found if manifest.version == DAMAGED]
    assert len({manifest.digest for manifest in sent}) == 1
    result = audited(bootstrap, run_id)
    if len(sent) == 2 or damage is delete_all_chunks:
        assert result.clean, [violation for one in result.results for violation in one.violations]
    else:  # a newer version came before anybody needed this one: the loss stays, and the audit names it
        violations = [violation for one in result.results for violation in one.violations]
        assert violations and all(found.where is not None and found.where.topic == "weights" for found in violations), violations
    assert report["status"] == "finished"
    if mode == "pipelined":
        assert len(sent) == 2, "the newest version was sent again"
        same_run(report, plain)
