"""GPUs and cores: each belongs to one worker, what does not fit is one line, and what nobody placed is left as it is."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.backends.hardware import VISIBLE, visible_gpus
from penstock.pipeline.config.load import Config, ConfigError, load
from penstock.pipeline.launch.placement import cores_of, on_cores, place
from penstock.pipeline.runtime.roles import ROLES
from tests.support.least_config import least_config
from tests.support.refusals import one_line

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "gsm8k.toml"


def config_of(
    *, trainer: dict[str, Any] | None = None, rollout: dict[str, Any] | None = None, evaluated: bool = False, placement: str = "separate"
) -> Config:
    held_out = {"source": "e.jsonl"} if evaluated else {}
    return least_config(trainer=trainer or {}, rollout=rollout or {}, launch={"placement": placement}, eval=held_out)


def test_the_map_names_every_worker_that_has_gpus() -> None:
    placement = place(config_of(trainer={"gpus": 1}, rollout={"workers": 2, "gpus_per_worker": 1}, evaluated=True), list("3567"))
    assert str(placement) == "trainer: GPU 3; rollout-0: GPU 5; rollout-1: GPU 6; evaluator: GPU 7; the others: none"
    assert placement.environment("rollout-1") == {VISIBLE: "6"}
    assert placement.environment("scorer-0") == {VISIBLE: ""}


def test_an_evaluator_without_an_engine_of_its_own_has_no_gpu_and_two_do_for_the_example() -> None:
    assert str(place(load(EXAMPLE, gpus=2), ["0", "1"])) == "trainer: GPU 0; rollout-0: GPU 1; the others: none"
    for here in ([], ["0"]):
        with pytest.raises(ConfigError, match=rf"2 GPUs are required \(trainer 1 \+ rollout-0 1\), {len(here)} are visible here; lower"):
            place(load(EXAMPLE, gpus=len(here)), here)
    shared = load(EXAMPLE, ["trainer.gpus=0", "rollout.gpus_per_worker=0"], gpus=1)
    assert place(shared, ["0"]).environment("rollout-0") == {} and ROLES["evaluator"].workers(shared) == 0


def test_where_there_is_one_gpu_the_example_says_how_two_share_it_and_then_they_do() -> None:
    with one_line(ConfigError, match=r"or set launch.placement = 'colocated' and trainer.backend = 'torch': .* time-share"):
        place(load(EXAMPLE, gpus=1), ["4"])
    with pytest.raises(ConfigError, match=r"which 'deepspeed' does not; set trainer\.backend = 'torch'"):
        load(EXAMPLE, ["launch.placement=colocated"], gpus=1)
    shared = place(load(EXAMPLE, ["launch.placement=colocated", "trainer.backend=torch"], gpus=1), ["4"])
    assert str(shared) == "trainer, rollout-0: GPU 4, time-shared; the other workers: none"
    assert shared.environment("trainer") == shared.environment("rollout-0") == {VISIBLE: "4"} and shared.environment("scorer-0") == {
        VISIBLE: ""
    }


def test_a_device_is_shared_by_two_on_a_cpu_too_and_by_no_more() -> None:
    config = config_of(rollout={"workers": 1}, placement="colocated")
    assert str(place(config, [])) == "trainer and rollout worker time-share the CPU" and place(config, []).environment("trainer") == {}
    with pytest.raises(ConfigError, match=r"rollout.gpus_per_worker: 2, but launch.placement = 'colocated' shares a single GPU"):
        place(config_of(rollout={"workers": 1, "gpus_per_worker": 2}, placement="colocated"), ["0", "1"])
    for trainer, rollout, evaluated, said in (
        ({}, {"workers": 2}, False, "set rollout.workers = 1, not 2"),
        ({"processes": 2}, {"workers": 1}, False, "set trainer.processes = 1, not 2"),
        ({}, {"workers": 1}, True, "set eval.engine = 'rollout'"),
    ):
        with one_line(ConfigError, match=said):
            config_of(trainer=trainer, rollout=rollout, evaluated=evaluated, placement="colocated")


def test_what_nobody_placed_is_left_as_it_is() -> None:
    placement = place(config_of(), ["0", "1"])
    assert placement.environment("trainer") == {}
    assert "every worker sees all" in str(placement)


@given(workers=st.integers(1, 8), each=st.integers(1, 4), trainer=st.integers(0, 1), available=st.integers(0, 40), evaluated=st.booleans())
def test_no_gpu_is_given_twice_and_too_few_are_refused(workers: int, each: int, trainer: int, available: int, evaluated: bool) -> None:
    rollout = {"engine": "vllm", "workers": workers, "gpus_per_worker": each, "vllm": {"tensor_parallel_size": each}}
    config = config_of(trainer={"gpus": trainer}, rollout=rollout, evaluated=evaluated)
    needed = trainer + each * (workers + evaluated)
    if needed > available:
        with pytest.raises(ConfigError, match=f"{needed} GPUs are required .* {available} are visible"):
            place(config, [str(number) for number in range(available)])
        return
    gpus = place(config, [str(number) for number in range(available)]).gpus
    assert gpus is not None
    given_out = [number for numbers in gpus.values() for number in numbers]
    assert len(given_out) == len(set(given_out)) == needed


@pytest.mark.parametrize(
    ("trainer", "rollout", "said"),
    [
        ({"gpus": 2}, {"gpus_per_worker": 1}, "trainer.gpus: 2, but each of trainer.processes = 1"),
        ({"gpus": 1, "device": "cpu"}, {}, "trainer.gpus: 1 GPUs, but trainer.device = 'cpu'"),
        ({"gpus": 1}, {"device": "cuda"}, "rollout.gpus_per_worker: 0 for rollout.device = 'cuda'"),
        ({}, {"gpus_per_worker": 2}, "the transformers engine computes on one GPU"),
        ({}, {"engine": "vllm", "gpus_per_worker": 2}, "set rollout.vllm.tensor_parallel_size = 2"),
    ],
)
def test_what_cannot_be_is_one_line_that_names_the_key(trainer: dict[str, Any], rollout: dict[str, Any], said: str) -> None:
    with one_line(ConfigError, match=said):
        place(config_of(trainer=trainer, rollout=rollout), list("01234567"))


def test_the_environment_says_which_gpus_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "2, GPU-5a")
    assert visible_gpus() == ("2", "GPU-5a")
    monkeypatch.setenv(VISIBLE, "")
    assert visible_gpus() == ()


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


def test_a_process_that_is_started_on_cores_runs_there_and_the_starter_keeps_its_own() -> None:
    own = os.sched_getaffinity(0)
    command = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    for cores in ((max(own),), ()):
        with on_cores(cores):
            printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
        assert printed.strip() == str(sorted(cores or own))
        assert os.sched_getaffinity(0) == own
