"""A consumer group's offsets expire when a run rests for a week: its workers then read everything, a batch at a time, and go on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.log import Partition, Start
from penstock.infra.memory.log import MemoryLog
from penstock.infra.memory.state import MemoryTail
from penstock.topics.catalogue import CONTROL
from penstock.topics.wire.record import Record
from tests.support.worker_set import PIPELINE, WorkerSet, complete, config_of, finish, forget_offsets

BATCH = 8
WHOLE = CONTROL
"""Topics of a few records a worker, which are read as one list."""


class BatchedTail(MemoryTail):
    """Notes how many records it gave at once, of topics that grow with the run."""

    most = 0

    def read_to_end(self, *arguments: Any, **named: Any) -> list[Record]:
        records = super().read_to_end(*arguments, **named)
        BatchedTail.most = max(BatchedTail.most, sum(record.topic.rpartition(".")[2] not in WHOLE for record in records))
        return records


class NotingLog(MemoryLog):
    """Hands out tails that note their largest batch."""

    def tail(self, starts: Mapping[Partition, Start], *, group: str | None = None, **_: Any) -> MemoryTail:
        return BatchedTail(self._state, starts, group=group)


@pytest.mark.slow
def test_a_run_that_rested_until_its_offsets_had_expired_ends_in_the_same_weights(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.infra.log.BATCH", BATCH)
    monkeypatch.setattr(BatchedTail, "most", 0)
    evaluated = {"source": str(tmp_path / "data.jsonl"), "limit": 2, "every": 2, "samples": 1}
    config, roles = config_of(tiny_model, tmp_path, run={"steps": 8, "seed": 7}, eval=evaluated), (*PIPELINE, "evaluator")
    log = NotingLog()
    plain = complete(log, "undisturbed", config, roles=roles)
    with WorkerSet(log, "rested") as worker_set:
        worker_set.create(config)
        worker_set.start_all(config, roles)
        worker_set.wait(lambda: worker_set.report()["steps"] >= 4)
        for name in list(worker_set.threads):
            worker_set.stop(name)
    forget_offsets(log)
    rested = finish(log, "rested", roles=roles, config=config)
    assert rested["weights"]["digest"] == plain["weights"]["digest"]
    assert (rested["status"], rested["groups"]) == ("finished", plain["groups"])
    plainly, again = ({one["version"]: one["greedy_accuracy"] for one in report["eval"]} for report in (plain, rested))
    assert len(again) == len(rested["eval"]), "a version was evaluated twice"
    assert {0, 8} <= again.keys() & plainly.keys()  # one between is passed over when a newer one is there before its turn
    assert all(again[version] == plainly[version] for version in again.keys() & plainly.keys())
    assert BatchedTail.most <= BATCH, "a worker has read a topic into one list"
