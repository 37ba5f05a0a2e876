"""What vLLM finds in its environment: its processes are spawned, as a forked one would inherit the locks of Kafka's threads."""

import os
from typing import Any

import pytest

from penstock.infra.engines.vllm import start


@pytest.mark.parametrize("given", [None, "fork"])
def test_processes_of_the_engine_are_spawned_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    seen: dict[str, str] = {}

    def made(arguments: Any, *, engine_process: bool) -> None:
        del arguments, engine_process
        seen.update(os.environ)

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", given or "")
    monkeypatch.setattr(start, "_engine", made)
    start.start_vllm({}, threads=1, engine_process=True, on_cpu=False)[1].rmdir()
    assert seen["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
