"""What vLLM finds in its environment: its processes are spawned, as a forked one would inherit the locks of Kafka's threads."""

import os
from functools import partial
from pathlib import Path
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


LOGGED = """(EngineCore pid=7) ERROR 11-27 08:00:08 [core.py:1510]     from flashinfer import (
(EngineCore pid=7) ERROR 11-27 08:00:08 [core.py:1510] {error}
Process EngineCore:
"""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            "ModuleNotFoundError: No module named 'flashinfer'",
            "cannot start with the model in m: ModuleNotFoundError: No module named 'flash",
        ),
        ("ValueError: To serve at least one request, 1.5 GiB KV cache is needed", "raise rollout.vllm.gpu_memory_utilization"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "lower rollout.vllm.gpu_memory_utilization"),
    ],
)
def test_an_error_of_the_engines_own_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, expected: str) -> None:
    (tmp_path / "rollout-0.log").write_text(LOGGED.format(error=error))
    with (tmp_path / "rollout-0.log").open() as log:
        logged = partial(start._logged_error, log.fileno())
        monkeypatch.setattr(start, "_logged_error", logged)
        told = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
        assert expected in str(start.translated(told, {"model": "m", "max_model_len": 64}))


def test_a_system_library_that_vllm_only_logs_as_missing_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError("libnuma.so.1: cannot open shared object file: No such file or directory", name=name)

    monkeypatch.setattr(start, "import_module", missing)
    told = AttributeError("'_OpNamespace' '_C' object has no attribute 'init_cpu_memory_env'")
    text = str(start.translated(told, {"model": "m"}))
    assert text.startswith("vLLM cannot load its compiled module: libnuma.so.1: cannot open shared object file")
    assert "libnuma1 on Debian" in text
