"""A run whose digests are SHA-256, begun by an earlier release, goes on with them: a run has one hash function."""

from pathlib import Path

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.workers.trainer import worker
from tests.support import listed_records
from tests.support.trainer_alone import config_for, group_of, killed, trained, written
from tests.support.worker_set import audited


def test_a_trainer_goes_on_in_the_hash_function_that_the_run_was_begun_with(
    tiny_model: Path, tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MemoryLog()
    written(log, run_id, config_for(tiny_model, tmp_path), [group_of(n, version=max(0, n // 2 - 1)) for n in range(12)])
    with monkeypatch.context() as earlier:
        earlier.setattr(worker, "HASH", "sha256")
        killed(log, run_id, "ledger.step.after:3")
    found = trained(log, run_id)
    assert found["status"] == "finished"
    assert {":" in digest for _, digest in found["versions"]} == {False}
    broken = listed_records.broken(audited(log, run_id))
    assert not broken & {"version-numbers", "chunks", "digests", "last-digests"}
