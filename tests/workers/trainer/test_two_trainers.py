"""Two trainers of one run, each process 1 of its own container: exactly one goes on, whoever is started again and in whatever order."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.containers import contained, containers_work
from tests.support.worker_set import WorkerSet, clean, config_of

LIMIT_S = 120.0
"""For a process to import torch, join and end, on a machine that is busy."""


def signalled(container: "subprocess.Popen[str]", number: signal.Signals) -> None:
    for process in psutil.Process(container.pid).children(recursive=True):
        process.send_signal(number)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not containers_work(), reason="this system lets nobody make PID namespaces here")
def test_of_two_trainers_in_containers_one_goes_on_and_the_other_ends_for_good(
    broker: str, run_id: str, tiny_model: Path, tmp_path: Path
) -> None:
    config = config_of(tiny_model, tmp_path, run={"steps": 120, "seed": 7}, rollout={"workers": 1}, trainer={"checkpoint_every": 2})
    command = [sys.executable, "-m", "penstock.workers", "trainer", "--run", run_id, "--bootstrap", broker]
    with WorkerSet(broker, run_id) as worker_set:
        worker_set.create(config, ("rollout", "scorer", "feeder"))
        first = contained(command)
        worker_set.wait(lambda: worker_set.report()["steps"] >= 2)

        second = contained(command)
        said, _ = second.communicate(timeout=LIMIT_S)
        assert second.returncode == 2, said
        assert "is already running" in said.splitlines()[-1]
        assert first.poll() is None

        signalled(first, signal.SIGSTOP)  # its machine is cut off: a third one takes its place
        done = worker_set.report()["steps"]
        third = contained(command)
        worker_set.wait(lambda: worker_set.report()["steps"] >= done + 2)
        signalled(first, signal.SIGCONT)
        said, _ = first.communicate(timeout=LIMIT_S)
        assert first.returncode == 2, said
        assert f"{run_id}.trainer: this process must stop" in said  # by its transaction, or by the lease if it read first
        assert "dead letter" not in said  # what its successor has written is sound

        again = contained(command)  # as a policy does that always starts it again
        said, _ = again.communicate(timeout=LIMIT_S)
        assert again.returncode == 2, said
        signalled(third, signal.SIGTERM)
        said, _ = third.communicate(timeout=LIMIT_S)
        assert third.returncode == 0, said
    clean(broker, run_id)
