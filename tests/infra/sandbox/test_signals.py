"""Signals: what a parent ignored is not passed on, and no handler waits for what the interrupted code holds."""

import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable

import pytest

from penstock.infra.sandbox import signals
from penstock.pipeline.launch import shutdown
from penstock.pipeline.runtime import session

pytestmark = pytest.mark.costly  # starts processes

HANDLERS = "import signal; print([signal.getsignal(number) is not signal.SIG_IGN for number in (2, 1, 3, 15)])"
IGNORING = "import signal, subprocess, sys\nfor number in (2, 1, 3, 15):\n    signal.signal(number, signal.SIG_IGN)\n"


def output_of(program: str) -> str:
    """What a process prints whose parent ignores the signals of a terminal, as `nohup` and `&` in a script arrange it."""
    return subprocess.run([sys.executable, "-c", IGNORING + program], capture_output=True, text=True, timeout=120, check=True).stdout


def test_a_program_started_by_a_process_that_ignores_signals_gets_their_defaults():
    start = f"subprocess.run([sys.executable, '-c', {HANDLERS!r}])"
    keep = "from penstock.infra.sandbox.signals import is_ignored, keep_ignored_here; keep_ignored_here()\n"
    still = "print([is_ignored(number) for number in (2, 1, 3, 15)], flush=True)\n"
    assert output_of(start) == "[False, False, False, False]\n"
    assert output_of(keep + still + start).splitlines() == ["[True, True, True, True]"] * 2


HANDLED_IN_CHILD = """
import json, os
from penstock.infra.sandbox.spawn import REWARD
from penstock.infra.sandbox.spawn import end_child, spawn
process, ours = spawn("tests.infra.sandbox.test_signals:handled", REWARD)
process.stdin.write(b'{}\\n[0, {}]\\n')
print([json.loads(process.stdout.readline()) for _ in range(2)][1]["result"])
end_child(process, ours)
"""


def handled(_init: object) -> Callable[[object], list[bool]]:
    """A handler for a child process: which signals that process does not ignore."""
    return lambda _: [signal.getsignal(number) is not signal.SIG_IGN for number in (2, 1, 3, 15)]


def test_reward_children_and_programs_handle_signals_whoever_starts_them():
    in_program = (
        "import asyncio\nfrom penstock.infra.sandbox.program import Program\nfrom penstock.infra.sandbox.spawn import REWARD\n"
        "async def run():\n"
        f"    program = await Program.start([sys.executable, '-c', {HANDLERS!r}], stdin=b'', environment={{}}, rules=REWARD)\n"
        "    await program.wait()\n    print(program.output, end='')\n"
        "asyncio.run(run())\n"
    )
    assert output_of(HANDLED_IN_CHILD + in_program).splitlines() == ["[True, True, True, True]"] * 2


class Installed(dict[int, Callable[[int, None], None]]):
    """Handlers that were installed instead of the process's own."""

    def signal(self, number: int, handler: Callable[[int, None], None]) -> object:
        before = self.get(number, signal.SIG_DFL)
        self[number] = handler
        return before


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """What the code under test installs; no handler of this process is touched."""
    handlers = Installed()
    names = {name: getattr(signal, name) for name in ("SIGINT", "SIGHUP", "SIGQUIT", "SIGTERM", "SIG_IGN", "SIG_DFL", "Signals")}
    fake = types.SimpleNamespace(**names, signal=handlers.signal, getsignal=lambda number: handlers.get(number, signal.SIG_DFL))
    for module in (signals, shutdown, session):
        monkeypatch.setattr(module, "signal", fake)
    return handlers


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_interrupts_the_launchers_wait_is_handled(installed: Installed, number: signal.Signals):
    with shutdown.stop_requested() as stop:
        with stop._cond:  # what `stop.wait()` holds when it begins and when it ends
            installed[number](number, None)
        assert stop.wait(60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_interrupts_a_workers_wait_is_handled(installed: Installed, number: signal.Signals):
    stop = threading.Event()
    session.stop_on_signals(stop)
    with stop._cond:
        installed[number](number, None)
    assert stop.wait(60)


def test_a_signal_that_interrupts_the_start_of_a_thread_is_handled():
    stop = threading.Event()
    with threading._active_limbo_lock:
        signals.set_in_handler(stop)
    assert stop.wait(60)


def test_a_second_ctrl_c_interrupts_even_if_the_first_could_not_set_the_event_yet(installed: Installed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutdown, "SAME_KEY_S", -1.0)
    with shutdown.stop_requested() as stop, stop._cond:
        installed[signal.SIGINT](signal.SIGINT, None)
        with pytest.raises(KeyboardInterrupt):
            installed[signal.SIGINT](signal.SIGINT, None)
