"""A live run on vLLM whose rollout worker is killed in the middle: nothing of its engine stays, and the run goes on to a clean end."""

import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from penstock.pipeline.inspect.audit.kafka_reader import KafkaSource
from penstock.pipeline.inspect.audit.report import as_text, audit
from tests.support.bare_clients import c_client
from tests.support.processes import Processes
from tests.support.worker_set import WorkerSet, config_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]

GONE_S = 15.0


def left_behind(temporary: Path) -> set[str]:
    """What engines may leave in shared memory and in the directory for temporary files."""
    return {str(path) for path in [*Path("/dev/shm").glob("psm_*"), *temporary.rglob("*vllm*")]}


@pytest.mark.parametrize("engine_process", [False, True], ids=["engine in the worker", "engine in its own process"])
def test_a_killed_rollout_worker_under_vllm_leaves_nothing_and_the_run_is_clean(
    broker: str, run_id: str, tiny_model: Path, tmp_path: Path, engine_process: bool
) -> None:
    config = config_of(
        tiny_model,
        tmp_path,
        run={"steps": 12, "seed": 5},
        schedule={"mode": "in_flight", "prompts_per_step": 2, "samples_per_prompt": 4},
        sampling={"max_new_tokens": 48},
        rollout={"engine": "vllm", "workers": 1, "concurrency": 16, "engine_process": engine_process},
        trainer={"lr": 1e-3, "micro_batch_tokens": 512, "export": False},
    )
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # a short path: longer ones are not taken, sockets lie there
    before = left_behind(temporary)
    with WorkerSet(broker, run_id) as worker_set, Processes(broker, run_id, tmp_path) as workers:
        worker_set.create(config)
        for role in ("trainer", "rollout", "scorer", "feeder"):
            workers.start(role, environment={"TMPDIR": str(temporary)})
        worker_set.wait(lambda: worker_set.report()["steps"] >= 3)
        family = psutil.Process(workers.running["rollout-0"].pid).children(recursive=True)
        assert bool(family) == engine_process
        workers.kill("rollout-0")
        _, alive = psutil.wait_procs(family, GONE_S)
        assert not alive, f"{[process.cmdline() for process in alive]} outlived their worker"
        workers.start("rollout", environment={"TMPDIR": str(temporary)})
        report = workers.finish(worker_set)
    found = audit(KafkaSource(broker, run_id, settings=c_client(broker)))
    assert found.clean, as_text(found)
    assert report["groups"]["trained"] == 24
    assert report["lag"]["max"] <= 4
    assert left_behind(temporary) <= before, left_behind(temporary) - before
    shutil.rmtree(temporary)
    assert not any(process.pid != os.getpid() and "EngineCore" in process.name() for process in psutil.process_iter())
