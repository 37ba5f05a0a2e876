"""Cores of workers: rollout apart from training wherever there are enough."""

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.launch.placement import cores_of, pin
from tests.support.children import child

SMALL = st.integers(1, 4)


@given(count=st.integers(1, 16), workers=SMALL, rollout_threads=SMALL, trainer_threads=SMALL)
def test_rollout_workers_share_no_core_with_the_trainer_nor_with_others_where_cores_are_left(
    count: int, workers: int, rollout_threads: int, trainer_threads: int
) -> None:
    found = cores_of(range(count), rollout_workers=workers, rollout_threads=rollout_threads, trainer_threads=trainer_threads)
    if count <= workers * rollout_threads:
        assert found == {}
        return
    taken = [core for name, cores in found.items() if name.startswith("rollout") for core in cores]
    assert len(taken) == len(set(taken)) == workers * rollout_threads
    assert not set(taken) & {*found["trainer"]}
    assert 1 <= len(found["trainer"]) <= trainer_threads
    left = set(range(count)) - {*taken, *found["trainer"]}
    assert {*found[""]} == (left or {*range(count)})


def test_a_process_keeps_to_its_core_and_one_that_has_ended_is_passed_over() -> None:
    core = min(os.sched_getaffinity(0))
    with child([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        pin(process.pid, (core,))
        assert os.sched_getaffinity(process.pid) == {core}
    pin(process.pid, (core,))
