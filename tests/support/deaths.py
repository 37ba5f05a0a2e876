"""A worker's death inside the test process, at a fault point or over a payload: cheap enough to try every case by default.

The thread that is to die never goes on. As after SIGKILL nothing is tidied up: no `finally` runs, nothing more is written. A member of a
consumer group cannot die so: on the in-memory log nobody takes its partitions from it.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import psutil

from penstock.infra import faults
from penstock.topics.wire.codec import Codec


@contextmanager
def dying_at(fault: str) -> Iterator[threading.Event]:
    """Let the first thread that passes the point die there; the event is set when it has.

    Example:
        with dying_at("ledger.step.after:3") as dead: ...
    """
    chosen, dead = faults.parse(fault), threading.Event()

    def reach(name: str) -> None:
        assert name in faults.POINTS, f"{name} is not among the fault points"
        if name != chosen.name or dead.is_set():
            return
        chosen.passes -= 1
        if not chosen.passes:
            dead.set()
            _never_go_on()

    with patch.object(faults, "reach", reach):
        yield dead


@contextmanager
def dying_of(payloads: Mapping[str, tuple[str, bytes]], *, times: int) -> Iterator[list[str]]:
    """Let workers die whenever they decode a payload, each so many times at most; gives the names of those that died, in order.

    `payloads` has for each worker the schema of the payload and bytes that are in no other one.
    """
    deaths: list[str] = []
    decode = Codec.decode

    def deadly(codec: Codec, value: Any) -> Any:
        worker = threading.current_thread().name
        schema, mark = payloads.get(worker, ("", b""))
        if codec.name == schema and mark in bytes(value) and deaths.count(worker) < times:
            deaths.append(worker)
            _never_go_on()
        return decode(codec, value)

    with patch.object(Codec, "decode", deadly):
        yield deaths


def kill_rank_at(rank: int, fault: str) -> None:
    """In a trainer's first process: kill one of its other ranks at a fault point, and stay there."""
    chosen = faults.parse(fault)

    def reach(name: str) -> None:
        chosen.passes -= name == chosen.name
        if name == chosen.name and not chosen.passes:
            sorted(psutil.Process().children(), key=psutil.Process.create_time)[rank - 1].kill()
            _never_go_on()

    faults.reach = reach


def _never_go_on() -> None:
    threading.Event().wait()
