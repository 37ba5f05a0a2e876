"""The other processes of a trainer: started here or by torchrun, they train the micro-batches that rank 0 assigns.

They read their groups from the log and verify the digests; they decide and write nothing. All ranks form one worker: if one exits, rank 0
exits too, and its launcher restarts the set.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.infra import faults
from penstock.infra.backends.base import Backend, TokenBatch
from penstock.infra.backends.ranks.lead_backend import run_command
from penstock.infra.errors import BackendError, ConfigError
from penstock.infra.log import Log
from penstock.infra.paths import IMPORT_ROOT
from penstock.infra.sandbox.keeper import ends_with
from penstock.infra.sandbox.signals import ignore
from penstock.pipeline.config.load import Config, from_json, with_values
from penstock.pipeline.config.security import VARIABLE
from penstock.pipeline.launch.restart_policy import how
from penstock.pipeline.learner.ledger_history import read_planned
from penstock.pipeline.learner.micro_batches import pack, train_empty_batch
from penstock.pipeline.learner.train_step import Objective
from penstock.pipeline.runtime.exit_status import FAILED
from penstock.pipeline.runtime.factories import make_backend
from penstock.pipeline.runtime.registration.run_registry import registration
from penstock.pipeline.runtime.registration.trust import NO_TRUST, Trust, require_trusted
from penstock.pipeline.runtime.session import Session
from penstock.topics.groups import Group
from penstock.topics.ledger import Planned
from penstock.topics.runs import RunRecord

if TYPE_CHECKING:
    from penstock.infra.backends.ranks.process_set import ProcessSet


@dataclass(slots=True)
class Follower:
    """A rank above 0: executes the messages of rank 0 until the message `end`."""

    processes: "ProcessSet"
    objective: Objective
    open: Callable[[], Backend]
    read: Callable[[Sequence[Planned]], Sequence[Group]]
    """Reads and verifies planned groups."""
    backend: Backend | None = None
    _stats: list[dict[str, float]] = field(default_factory=list)

    def follow(self) -> None:
        """Execute messages until `end`. Raises `BackendError` if rank 0 has exited, `PenstockError` if a message cannot be executed."""
        while (message := self.processes.receive())["do"] != "end":
            self._do(message)
        self.processes.reply("ended")

    def _do(self, message: Mapping[str, Any]) -> None:
        """Execute one message of rank 0: open the backend, train a micro-batch, report statistics, or a command of the backend."""
        if message["do"] == "open":
            self.backend = self.open()
            return
        assert self.backend is not None, "rank 0 sends `open` first"
        match message["do"]:
            case "train":
                plan = [Planned(group=group, sha256=digest, partition=p, offset=offset) for group, digest, p, offset in message["plan"]]
                batch = self._batch(plan, message["rows"])
                self._stats.append(self.objective.backward(self.backend, batch))
                faults.reach("rank.trained")
            case "nothing":
                train_empty_batch(self.backend)
            case "report":
                self.processes.reply(self._stats)
                self._stats = []
            case _:
                run_command(self.backend, dict(message), self.processes)

    def _batch(self, plan: Sequence[Planned], rows: Sequence[Sequence[int]]) -> TokenBatch:
        """The micro-batch of these (group, index of the sequence in its group) pairs; the groups of `plan` are read from the log."""
        sequences = {group.group: self.objective.sequences(group) for group in self.read(plan)}
        return pack([sequences[group][number] for group, number in rows])


END_LIMIT_S = 60.0
"""Time for the other ranks to exit after the end was broadcast."""
PARENT = "PENSTOCK_RANK_OF"
"""The process that started this one as another rank."""


@contextlib.contextmanager
def other_ranks(session: Session) -> "Iterator[ProcessSet | None]":
    """In the block, train with `trainer.processes` ranks: yields the set of them, or None if there is one. They exit with the block.

    Ranks that torchrun has not started are started here. Raises `ConfigError`, `BackendError`.
    """
    config = session.config
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched not in (1, config.trainer.processes):
        raise ConfigError(f"trainer.processes is {config.trainer.processes}, but WORLD_SIZE is {launched}: start as many, or change it")
    if config.trainer.processes == 1:
        yield None
        return
    from penstock.infra.backends.ranks.process_set import ProcessSet, store_on_free_port

    store, children, over = None, list["subprocess.Popen[bytes]"](), threading.Event()
    if launched == 1:
        size = config.trainer.processes
        store = store_on_free_port(size)
        children = [_start(session, rank, store.port) for rank in range(1, size)]
        os.environ |= variables(rank=0, size=size, port=store.port)
        session.reporter.notify(f"training with {size} processes: {os.getpid()} and {', '.join(str(child.pid) for child in children)}")
    for rank, child in enumerate(children, start=1):
        threading.Thread(target=_watch, args=(session, rank, child, over), daemon=True, name=f"rank-{rank}").start()
    processes = ProcessSet.join(on_gpu=_on_gpu(config), store=store)
    try:
        yield processes
        over.set()
        processes.broadcast(do="end")
        processes.replies()  # the store ends with this process: the others must have received it
        for child in children:
            child.wait(END_LIMIT_S)
    finally:
        over.set()
        for child in children:
            child.kill()
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a device, and ends with that
                child.wait(END_LIMIT_S)


def follow(log: Log, run: str, *, model: str | None, trust: Trust = NO_TRUST) -> None:
    """Be another rank of a run's trainer until rank 0 broadcasts the end. Raises `PenstockError`."""
    from penstock.infra.backends.ranks.process_set import ProcessSet

    parent = os.environ.get(PARENT)
    if parent is not None and not ends_with(int(parent)):  # rank 0 may be killed while this one computes, or has been
        raise BackendError(f"rank 0 of the trainer (process {parent}) has exited, so this rank stops")
    for number in (signal.SIGTERM, signal.SIGINT):
        ignore(number)  # rank 0 gets them as well, and broadcasts the end
    record = _registered(log, run, trust)
    config = from_json(record.config)
    if model is not None:
        config = with_values(config, "model", path=model)
    steps = int(json.loads(record.info)["steps"])
    Follower(
        processes=ProcessSet.join(on_gpu=_on_gpu(config)),
        objective=Objective.of(config, total_steps=config.trainer.initial_steps + steps),
        open=lambda: make_backend(config, steps=steps),
        read=lambda plan: read_planned(log, run, plan),
    ).follow()


def _registered(log: Log, run: str, trust: Trust) -> RunRecord:
    """Wait until the run is registered; return its record. Raises `ConfigError` if this process may not execute its code."""
    while (registered := registration(log, run, key_file=trust.run_key)).record is None:
        threading.Event().wait(1.0)
    return require_trusted(registered, trust=trust, notify=print)


def _on_gpu(config: Config) -> bool:
    from penstock.infra.backends.arithmetic import choose_device

    return choose_device(config.trainer.device).type == "cuda"


def _start(session: Session, rank: int, port: int) -> "subprocess.Popen[bytes]":
    """Start one rank as a child process on this machine. Raises `ConfigError` for the in-memory log."""
    connection = getattr(session.log, "connection", None)
    if connection is None:
        raise ConfigError("trainer.processes must be 1 with the in-memory log, which one process holds; use a broker for more")
    environment = {
        **os.environ,
        **variables(rank=rank, size=session.config.trainer.processes, port=port),
        PARENT: str(os.getpid()),
        VARIABLE: json.dumps(dict(connection.security)),
        "PYTHONPATH": os.pathsep.join([str(IMPORT_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # a stack trace where rank 0 has ended would hide the line with the cause
    }
    command = [sys.executable, "-P", "-m", "penstock.workers", "trainer", "--run", session.run, "--bootstrap", connection.bootstrap]
    command += ["--model", session.config.model.path, *session.trust.arguments()]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)


def variables(*, rank: int, size: int, port: int) -> dict[str, str]:
    """The environment variables of torchrun for one of `size` ranks on this machine."""
    from penstock.infra.backends.ranks.process_set import loopback

    return {
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or loopback(),  # independent of the host's name
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _watch(session: Session, rank: int, child: "subprocess.Popen[bytes]", over: threading.Event) -> None:
    """Kill this process if another rank exits too early, because it would wait for that rank in the next collective."""
    status = child.wait()
    if over.is_set():
        return
    session.reporter.notify(f"rank {rank} {how(status)}: stopping all ranks of the trainer")
    sys.stdout.flush()
    os._exit(status if status > 0 else FAILED)
