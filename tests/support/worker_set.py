"""Whole runs inside one test process: every worker is a thread, on a broker with its own connection or on one in-memory log.

Threads share one import of torch, so a run takes seconds; what differs from a live run is only the process boundary.
"""

import importlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Log
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.config.load import from_table
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.inspect.audit.kafka_reader import KafkaSource
from penstock.pipeline.inspect.audit.report import Audit, as_text, audit
from penstock.pipeline.inspect.report.summary import collect
from penstock.pipeline.inspect.run_view import load
from penstock.pipeline.launch.create import create
from penstock.pipeline.runtime.roles import ROLES
from penstock.pipeline.runtime.session import join
from penstock.topics.wire.record import Record
from tests.support.bare_clients import c_client
from tests.support.least_config import merged
from tests.support.listed_records import Listed

LIMIT_S = 400.0
PIPELINE = ("trainer", "rollout", "scorer", "feeder")
"""The roles without which no run goes on."""

LogLocation = str | MemoryLog
"""Where the topics of a run are: a broker's address, or the in-memory log that all its workers share."""


def connect(place: LogLocation, *, client_id: str = "tests") -> Log:
    """A connection to a broker, or the in-memory log itself, which needs no closing."""
    return place if isinstance(place, MemoryLog) else KafkaLog(place, client_id=client_id)


class WorkerSet:
    """Starts and ends the workers of one run; leaving the block ends all of them."""

    def __init__(self, place: LogLocation, run: str) -> None:
        self.place, self.run = place, run
        self.threads: dict[str, threading.Thread] = {}
        self.stops: dict[str, threading.Event] = {}
        self.failures: dict[str, BaseException] = {}
        self.log = connect(place)

    def create(self, config: Config, roles: Sequence[str] = ()) -> None:
        """Create the run, and start one worker of each of these roles."""
        create(config, log=self.log, run_id=self.run, notify=lambda _: None)
        for role in roles:
            self.start(role)

    def start(self, role: str, slot: int = 0) -> None:
        """Start one worker, whether the run exists or not."""
        name = ROLES[role].worker(slot)
        self.stops[name] = threading.Event()
        self.threads[name] = threading.Thread(target=self._work, args=(role, name), name=name, daemon=True)
        self.threads[name].start()

    def stop(self, name: str) -> None:
        """Ask one worker to hand back and end."""
        self.stops[name].set()
        self.threads[name].join(200.0)
        assert not self.threads[name].is_alive(), f"{name} did not stop"

    def start_all(self, config: Config, roles: Sequence[str] = PIPELINE) -> None:
        """Start the workers of a run, as many of each role as it asks for."""
        for role in roles:
            for slot in range(ROLES[role].workers(config)):
                self.start(role, slot)

    def abandon(self, name: str) -> None:
        """Forget a worker that `deaths.dying_at` has ended: its thread never goes on."""
        del self.threads[name], self.stops[name]

    def wait(self, until: Callable[[], bool] | None = None, *, limit_s: float = LIMIT_S) -> None:
        """Wait until every worker has ended, or `until` holds; a worker's failure is raised at once."""
        tick = threading.Event()
        for _ in range(int(limit_s / 0.1)):
            if self.failures:
                name, error = next(iter(self.failures.items()))
                raise AssertionError(f"{name} failed: {error}") from error
            if until is not None and until():
                return
            if until is None and not any(thread.is_alive() for thread in self.threads.values()):
                return
            tick.wait(0.1)
        workers = load(self.log, self.run).workers
        alive = {name: workers[name].labels.get("doing") for name, thread in self.threads.items() if thread.is_alive() and name in workers}
        raise AssertionError(f"not done after {limit_s:g} s; still at work: {alive}")

    def report(self) -> dict[str, Any]:
        """What the log says of the run."""
        return collect(self.log, self.run)

    def __enter__(self) -> "WorkerSet":
        return self

    def __exit__(self, *_: object) -> None:
        for stop in self.stops.values():
            stop.set()
        for thread in self.threads.values():
            thread.join(120.0)
        self.log.close()

    def _connect(self, role: str, name: str) -> Log:
        """The connection of one worker."""
        del role
        return connect(self.place, client_id=f"{self.run}.{name}")

    def _work(self, role: str, name: str) -> None:
        log = self._connect(role, name)
        try:
            session = join(run=self.run, role=role, log=log, worker=name, model=None, stop=self.stops[name])
            if session is not None:
                importlib.import_module(ROLES[role].module).main(session)
                session.close(status="finished")
        except BaseException as error:
            self.failures[name] = error
        finally:
            log.close()


def config_of(model: Path, directory: Path, **sections: Mapping[str, Any]) -> Config:
    """A small run on arithmetic prompts whose reward is the share of digits in the completion; sections are merged over the defaults."""
    data, reward = directory / "data.jsonl", directory / "digits.py"
    data.write_text("".join(json.dumps({"prompt": f"{i}+{i + 1}=", "answer": str(2 * i + 1)}) + "\n" for i in range(40)))
    reward.write_text("def share(prompts, completions, **_):\n    return [sum(c.isdigit() for c in text) / 8 for text in completions]\n")
    table: dict[str, dict[str, Any]] = {
        "run": {"steps": 4, "seed": 7},
        "model": {"path": str(model)},
        "data": {"source": str(data), "max_prompt_tokens": 32},
        "reward": {"functions": [f"{reward}:share"]},
        "schedule": {"mode": "pipelined", "prompts_per_step": 4, "samples_per_prompt": 4},
        "sampling": {"max_new_tokens": 8},
        "rollout": {"workers": 2},
        "trainer": {"lr": 1e-3, "micro_batch_tokens": 80, "export": False},
        "kafka": {"partitions": 8},
        "mlflow": {"enabled": False},
    }
    return from_table(merged(table, sections))


def forget_offsets(log: MemoryLog) -> None:
    """Lose what consumer groups have committed, as a broker does a week after their last member left."""
    with log._state.change:
        assert any(group.offsets for group in log._state.groups.values())
        for group in log._state.groups.values():
            group.offsets.clear()


def records_of(log: Log, topic: str) -> list[Record]:
    """All committed records of a topic."""
    tail = log.tail({(topic, partition): "earliest" for partition in range(log.partitions(topic) or 0)})
    try:
        return tail.read_to_end(60.0)
    finally:
        tail.close()


def audited(place: LogLocation, run: str) -> Audit:
    """The audit of a run; on a broker it reads with its own client."""
    if isinstance(place, MemoryLog):
        topics = place.topics(f"{run}.")
        begins = place.beginning_offsets([(topic, partition) for topic in topics for partition in range(place.partitions(topic) or 0)])
        plain = {(topic.removeprefix(f"{run}."), partition): begin for (topic, partition), begin in begins.items()}
        return audit(Listed(run, [record for topic in topics for record in records_of(place, topic)], begins=plain))
    return audit(KafkaSource(place, run, settings=c_client(place)))


def clean(place: LogLocation, run: str) -> Audit:
    """The audit, in which nothing is broken."""
    found = audited(place, run)
    assert found.clean, as_text(found)
    return found


def complete(place: LogLocation, run: str, config: Config, *, roles: Sequence[str] = PIPELINE) -> dict[str, Any]:
    """A whole undisturbed run; returns its report."""
    with WorkerSet(place, run) as worker_set:
        worker_set.create(config)
        worker_set.start_all(config, roles)
        worker_set.wait()
        return worker_set.report()


def finish(place: LogLocation, run: str, *, roles: Sequence[str] = PIPELINE, config: Config | None = None) -> dict[str, Any]:
    """Let workers end a run that exists, one of each role or as many as a configuration asks for; returns its report."""
    with WorkerSet(place, run) as worker_set:
        for role in roles:
            for slot in range(1 if config is None else ROLES[role].workers(config)):
                worker_set.start(role, slot)
        worker_set.wait()
        return worker_set.report()


def same_run(report: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    """Two runs ended in the same weights, and their groups with the same statuses."""
    assert report["weights"]["digest"] == plain["weights"]["digest"]
    assert report["groups"] == plain["groups"]
