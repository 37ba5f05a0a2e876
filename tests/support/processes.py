"""Real worker processes that can be killed at any instant, forked from a server that has imported torch already.

A process that imports torch and transformers itself takes ten seconds; a forked one is at work within one.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from penstock.infra.broker import access
from penstock.pipeline.runtime.leases import ENDED, TOKEN, new_token
from penstock.pipeline.runtime.main import work
from penstock.pipeline.runtime.roles import ROLES
from tests.support.worker_set import WorkerSet

PRELOADED = [
    "torch",
    "transformers",
    "transformers.models.auto.modeling_auto",  # with it comes what the first model loaded would import: six seconds
    "transformers.models.qwen3.modeling_qwen3",
    "penstock.infra.engines.transformers.engine",
    "penstock.infra.backends.torch_backend",
    "penstock.pipeline.runtime.main",
    "penstock.infra.kafka.log",
]
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(PRELOADED)


class Processes:
    """The worker processes of one run; leaving the block kills what is left of them."""

    def __init__(self, bootstrap: str, run: str, directory: Path) -> None:
        self.bootstrap, self.run, self.directory = bootstrap, run, directory
        self.running: dict[str, BaseProcess] = {}
        self._tokens: dict[str, list[str]] = {}

    def start(
        self,
        role: str,
        slot: int = 0,
        *,
        environment: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
        **options: Any,
    ) -> str:
        """Start a worker with these options of `work` and return its name.

        `before` runs in the new process first, and must be importable by name.
        """
        name = ROLES[role].worker(slot)
        tokens, before_it = self._tokens.setdefault(name, []), self.running.get(name)
        ended = tokens[:-1] if before_it is not None and before_it.is_alive() else tokens  # as a launcher tells it
        own = {TOKEN: new_token(), ENDED: ",".join(ended)}
        tokens.append(own[TOKEN])
        settings = {"OMP_NUM_THREADS": "1", "PENSTOCK_HOME": os.environ["PENSTOCK_HOME"], **own, **(environment or {})}
        arguments = (role, slot, self.run, self.bootstrap, settings, self.output(name), before, options, access.started)
        process = _FORKS.Process(target=_work, args=arguments, name=f"{self.run}.{name}")
        process.start()
        self.running[name] = process
        return name

    def output(self, name: str) -> Path:
        """Where a worker's output goes, that of all processes of this name."""
        return self.directory / f"{self.run}.{name}.log"

    def text(self, name: str) -> str:
        """What the processes of this name have printed so far."""
        return self.output(name).read_text(encoding="utf-8") if self.output(name).exists() else ""

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a worker a signal."""
        pid = self.running[name].pid
        assert pid is not None
        os.kill(pid, number)

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(name, signal.SIGKILL)
        self.ended(name)

    def ended(self, name: str, *, limit_s: float = 400.0) -> int:
        """Wait for the end of a worker and return its exit status, negative for a signal."""
        self.running[name].join(limit_s)
        status = self.running[name].exitcode
        assert status is not None, f"{name} did not end within {limit_s:g} s; it printed:\n{self.text(name)}"
        return status

    def finish(self, worker_set: WorkerSet) -> dict[str, Any]:
        """Wait until the run is finished and all its workers have ended with 0; returns its report."""
        worker_set.wait(lambda: worker_set.report()["status"] == "finished")
        for name in self.running:
            assert self.ended(name) == 0, self.text(name)
        return worker_set.report()

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            if process.is_alive():
                process.kill()
            process.join(120.0)


def _work(
    role: str, slot: int, run: str, bootstrap: str, environment: dict[str, str], output: Path, before: Callable[[], None] | None,
    options: Mapping[str, Any], brokers: set[Path],
) -> None:  # fmt: skip
    """The whole life of a forked worker: what `python -m workers` does, with its output in a file."""
    os.setsid()
    os.environ.update(environment)
    access.started.update(brokers)  # their passwords are in their folders
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(file, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    if before is not None:
        before()
    os._exit(work(role, run=run, bootstrap=bootstrap, slot=slot, model=None, **options))
