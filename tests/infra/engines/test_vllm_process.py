"""An engine in a process of its own: true labels there too, and nobody outlives the other, however they end."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.paths import ROOT, SUPPORT
from tests.support.vllm_helpers import LIMIT, completions, largest_error, request, save_model, version_values
from tests.support.waiting import until

pytestmark = [pytest.mark.costly, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]

SHARED = Path("/dev/shm")
GONE_S = 10.0
START_S = 150.0


@contextmanager
def owner(directory: Path, out: Path, then: str, temporary: Path, **settings: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """The process of vllm_owner.py, with a temporary directory of its own, and killed with all its children at the end."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SUPPORT / "vllm_owner.py"), str(directory), str(out), then, json.dumps(settings)]
    with (out.parent / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    seen: dict[int, psutil.Process] = {}
    try:
        until(lambda: out.exists() or process.poll() is not None, "the engine has started", limit_s=START_S, every_s=0.1)
        assert out.exists(), (out.parent / "log").read_text(encoding="utf-8")[-2000:]
        seen = {child.pid: child for child in psutil.Process(process.pid).children(recursive=True)}
        yield process
    finally:
        process.kill()
        process.wait()
        for child in seen.values():
            if child.is_running():
                child.kill()


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A directory with a short path: sockets lie there."""
    with tempfile.TemporaryDirectory(prefix="pt-", dir="/tmp") as name:
        yield Path(name)


@pytest.mark.slow
def test_a_killed_worker_leaves_no_engine_no_shared_memory_and_no_file(tmp_path: Path, temporary: Path) -> None:
    directory, out = save_model(tmp_path / "model", tied=True), tmp_path / "out"
    before = set(os.listdir(SHARED))
    with owner(directory, out, "wait", temporary) as process:
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.kill()
        process.wait()
        killed = time.monotonic()
        _, alive = psutil.wait_procs(children, timeout=GONE_S)
        took_s = time.monotonic() - killed
        assert not alive, [child.cmdline() for child in alive]
    print(f"{len(children)} processes gone {took_s:.1f} s after SIGKILL of their owner")
    assert {name for name in set(os.listdir(SHARED)) - before if name.startswith(("psm_", "penstock"))} == set()
    assert [name for name in os.listdir(temporary) if "vllm" in name] == []
    found = json.loads(out.read_text(encoding="utf-8"))
    assert Path(found["scratch"]).parent == temporary
    assert found["swaps"] >= 2
    drawn, asked = completions(found), {group: request(group, tokens=40) for group in range(4)}
    assert max(len(one.spans) for one in drawn) >= 2
    assert largest_error(directory, asked, drawn, version_values(directory)) < LIMIT


@pytest.mark.slow
def test_a_killed_engine_is_an_error_with_its_cause_at_the_next_step(tmp_path: Path, temporary: Path) -> None:
    directory, out = save_model(tmp_path / "model", tied=False), tmp_path / "out"
    with owner(directory, out, "kill-engine", temporary) as process:
        process.wait(60)
        found = json.loads(out.with_suffix(".death").read_text(encoding="utf-8"))
        print(found)
        assert "exit code -9" in found["words"]
        assert "restart the worker" in found["words"]
        assert found["after_s"] < GONE_S
    assert [name for name in os.listdir(temporary) if "vllm" in name] == []


@pytest.mark.slow
def test_an_engine_in_a_process_of_its_own_draws_with_true_labels_after_it_has_slept(tmp_path: Path, temporary: Path) -> None:
    directory, out = save_model(tmp_path / "model", tied=True), tmp_path / "out"
    with owner(directory, out, "end", temporary, sleeps=True) as process:
        assert process.wait(60) == 0
    drawn, asked = completions(json.loads(out.read_text(encoding="utf-8"))), {group: request(group, tokens=40) for group in range(4)}
    assert min(span.version for one in drawn for span in one.spans) == 0
    assert largest_error(directory, asked, drawn, version_values(directory)) < LIMIT
