"""Runs of timed stages: the worker processes of a run, on a real broker, each forked from a process that has imported what they import."""

import json
import multiprocessing
import resource
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from benchmarks.support.command import own_broker
from benchmarks.support.timed import backend, engine
from benchmarks.support.timed.stages import Stages
from penstock.infra.backends.registry import BACKENDS
from penstock.infra.broker.embedded import BrokerInfo
from penstock.infra.engines.registry import ENGINES
from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline.config.load import from_table
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.inspect.report.summary import summarise
from penstock.pipeline.inspect.run_view import load
from penstock.pipeline.launch.create import create
from penstock.pipeline.launch.planning.workload import Workload
from penstock.pipeline.runtime.main import work as run_worker
from penstock.pipeline.runtime.roles import ROLES

PIPELINE = ("trainer", "rollout", "scorer", "feeder")
PRELOADED = [ROLES[role].module for role in PIPELINE]
LIMIT_S = 900.0

Columns = Callable[[int], Mapping[str, Any]]
Job = TypeVar("Job")
Result = TypeVar("Result")


def register(stages: Stages, *, slot: int = 0) -> None:
    """Make the timed engine and backend known in this process."""
    ENGINES["timed"] = engine.kind(stages, slot=slot)  # type: ignore[index]
    BACKENDS["timed"] = backend.kind(stages)  # type: ignore[index]


def work(role: str, slot: int, run: str, bootstrap: str, stages: Stages, output: Path, result: Any) -> None:
    """Target of a worker process: one role until its run is over; sends its exit status and processor seconds."""
    import os
    import sys

    with (output / f"{run}-{role}-{slot}.txt").open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    register(stages, slot=slot)
    started = time.process_time()
    status = run_worker(role, run=run, bootstrap=bootstrap, slot=slot, model=None)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    result.send((role, status, time.process_time() - started + children.ru_utime + children.ru_stime))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A finished run: its report, (end, trained tokens) of each step, and its workers' processor seconds by role."""

    report: dict[str, Any]
    steps: list[tuple[float, float]]
    cpu_s: Mapping[str, float]


@dataclass(slots=True, kw_only=True)
class Fleet:
    """Runs whole runs, several at once; `cpu_s` are the broker's processor seconds."""

    broker: BrokerInfo
    folder: Path
    model: Path
    names: Iterator[str] = field(default_factory=lambda: iter(lambda: uuid.uuid4().hex[:8], ""))
    _context: Any = field(default_factory=lambda: multiprocessing.get_context("forkserver"))
    _starting: threading.Lock = field(default_factory=threading.Lock)
    _processes: list[Any] = field(default_factory=list)

    def broker_cpu_s(self) -> float:
        """Processor seconds of the broker so far."""
        times = psutil.Process(self.broker.pid).cpu_times()
        return float(times.user + times.system)

    def config(self, workload: Workload, columns: Columns, **sections: Mapping[str, Any]) -> Config:
        """The configuration of a run of this workload; `columns` gives further columns of a row; sections replace defaults."""
        schedule, groups = workload.schedule, workload.steps * workload.schedule.prompts_per_step
        data = self.folder / f"{next(self.names)}.jsonl"
        rows = groups + schedule.round_groups * (schedule.max_lag + 1)
        data.write_text(
            "".join(json.dumps({"prompt": f"{row}+1=", "answer": str(row + 1), "seed": row, **columns(row)}) + "\n" for row in range(rows))
        )
        longest = 32768
        table: dict[str, dict[str, Any]] = {
            "run": {"steps": workload.steps, "seed": workload.seed}, "model": {"path": str(self.model)},
            "data": {"source": str(data), "max_prompt_tokens": 32, "shuffle": False},
            "reward": {"functions": [f"soft_overlong?cache={longest}"]},
            "schedule": {
                "mode": schedule.mode, "prompts_per_step": schedule.prompts_per_step, "samples_per_prompt": schedule.samples_per_prompt,
                "steps_per_version": schedule.steps_per_version, "order": schedule.order, "max_lag": schedule.max_lag,
                "oversample": schedule.oversample, "oversample_groups": schedule.oversample_groups,
                "stale_in_hand": schedule.stale_in_hand,
            },
            "sampling": {"max_new_tokens": longest}, "algorithm": {"filter_zero_variance": False},
            "rollout": {
                "engine": "timed", "workers": workload.engines, "slots": workload.group_slots, "concurrency": workload.concurrency,
            },
            "trainer": {"backend": "timed", "lr": 1e-5, "export": False, "checkpoint_every": 0, "micro_batch_tokens": longest},
            "kafka": {"partitions": workload.engines}, "mlflow": {"enabled": False},
        }  # fmt: skip
        for name, section in sections.items():
            table[name] = {**table.get(name, {}), **section}
        if schedule.max_lag == 0:
            del table["schedule"]["max_lag"]
        return from_table(table)

    def run(self, workload: Workload, stages: Stages, *, columns: Columns = lambda _: {}, **sections: Mapping[str, Any]) -> Measured:
        """One run to its end. Raises `SystemExit` with the output of a worker that fails."""
        run, bootstrap = f"timed-{next(self.names)}", self.broker.bootstrap
        log = KafkaLog(bootstrap, client_id=f"{run}.benchmark")
        try:
            with self._starting:
                register(stages)
                config = self.config(workload, columns, **sections)
                create(config, log=log, run_id=run, notify=lambda _: None)
                started = [self._start(role, slot, run, stages) for role in PIPELINE for slot in range(ROLES[role].workers(config))]
            results = [self._result(process, receiver, run) for process, receiver in started]
            cpu_s: dict[str, float] = {}
            for role, seconds in results:
                cpu_s[role] = cpu_s.get(role, 0.0) + seconds
            view = load(log, run)
            steps = [(view.steps[number].time_s, view.steps[number].metrics["tokens"]) for number in sorted(view.steps)]
            return Measured(report=summarise(view), steps=steps, cpu_s=cpu_s)
        finally:
            log.close()

    def _start(self, role: str, slot: int, run: str, stages: Stages) -> tuple[Any, Any]:
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=work, args=(role, slot, run, self.broker.bootstrap, stages, self.folder, sender))
        process.start()
        self._processes.append(process)
        sender.close()
        return process, receiver

    def _result(self, process: Any, receiver: Any, run: str) -> tuple[str, float]:
        try:
            role, status, cpu_s = receiver.recv() if receiver.poll(LIMIT_S) else ("", None, 0.0)
        except EOFError:
            role, status, cpu_s = "", None, 0.0
        if status:
            raise SystemExit(f"worker {role} of {run} ended with status {status}:\n{self._output(run)}")
        if status is None:
            process.terminate()
            raise SystemExit(f"a worker of {run} gave no result:\n{self._output(run)}")
        process.join(60.0)
        return role, cpu_s

    def _output(self, run: str) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-600:]}" for path in sorted(self.folder.glob(f"{run}-*.txt")))

    def run_all(self, jobs: Sequence[tuple[Workload, Stages]], *, at_once: int, notify: Callable[[str], None]) -> list[Measured]:
        """Several runs, at most `at_once` concurrently, in order."""
        results = []
        for result in self.map(lambda job: self.run(*job), jobs, at_once=at_once):
            results.append(result)
            notify(f"{len(results)} of {len(jobs)} runs: {result.report['time']['train_s']:.1f} s")
        return results

    def map(self, run_one: Callable[[Job], Result], jobs: Iterable[Job], *, at_once: int) -> Iterator[Result]:
        """Results in the order of the jobs. The first failure, or an interrupt, ends all workers."""
        with ThreadPoolExecutor(at_once) as pool:
            try:
                yield from pool.map(run_one, jobs)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in self._processes:
                    process.kill()
                raise


@contextmanager
def fleet(name: str) -> Iterator[Fleet]:
    """A broker of its own, a small model and processes to fork workers from."""
    from benchmarks.support.random_model import SIZES, make_model

    with own_broker(name) as (folder, broker):
        SIZES["tiny"]["max_position_embeddings"] = 65536
        model = folder / "model"
        make_model(model, size="tiny")
        multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED, __name__])
        yield Fleet(broker=broker, folder=folder, model=model)
