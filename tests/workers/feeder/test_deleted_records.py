"""A feeder behind deleted records: it counts on an earlier one's note, and never on what happens to be left."""

from pathlib import Path

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.topics.wire.record import Outgoing
from tests.support.worker_set import WorkerSet, config_of

RUN = "cut"


def test_a_feeder_without_a_note_refuses_to_count_from_what_is_left(tiny_model: Path, tmp_path: Path) -> None:
    log, config = MemoryLog(), config_of(tiny_model, tmp_path, kafka={"partitions": 2})
    with WorkerSet(log, RUN) as worker_set:
        worker_set.create(config)
        log.producer().send(Outgoing(topic=f"{RUN}.groups", partition=1, key=None, headers=(), value=b"?"))
        log.delete_records({(f"{RUN}.groups", 1): 1})
        worker_set.start("feeder")
        line = "cannot resume: no feeder has committed how many groups were admitted and dropped, and "
        with pytest.raises(AssertionError, match=f"feeder failed: {line}{RUN}.groups/1: the records at offsets 0 to 0 were deleted"):
            worker_set.wait()
