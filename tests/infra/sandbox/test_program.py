"""Programs of agents: what they have started ends with them, and the key of one is out of another's reach."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from penstock.infra.sandbox import program as program_module
from penstock.infra.sandbox import spawn
from penstock.infra.sandbox.program import Program, how_it_ended
from penstock.infra.sandbox.spawn import ChildRules, bwrap_fault
from tests.support.children import end_in_time, runs

pytestmark = [pytest.mark.costly, pytest.mark.skipif(sys.platform != "linux", reason="/proc and prctl are Linux's")]
DAEMONS = {
    "setsid": "fork(os.setsid, rest)",
    "double fork": "fork(os.setsid, lambda: fork(rest))",
    "descriptors closed": "fork(os.setsid, lambda: os.closerange(0, 256), lambda: fork(rest))",
    "signals ignored": "fork(os.setsid, lambda: [signal.signal(number, signal.SIG_IGN) for number in (1, 2, 15)], rest)",
    "own group": "fork(lambda: os.setpgid(0, 0), rest)",
}
START = """
import os, signal, sys, time
def rest():
    with open(sys.argv[1], "a") as file: file.write(f"{os.getpid()} ")
    time.sleep(600)
def fork(*steps):
    if os.fork() == 0:
        for step in steps: step()
        os._exit(0)
"""
WAIT = "\nwhile not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read().endswith(' '): time.sleep(0.001)\n"
READ_ALL = """
import glob
for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
    try:
        if b"sk-" + b"other" in open(path, "rb").read(): print("found", path)
    except OSError: pass
"""


async def run(code: str, *arguments: str, isolate: str = "none", key: str = "sk-own") -> Program:
    rules = ChildRules(section="environment", isolate=isolate)  # type: ignore[arg-type]
    command = [sys.executable, "-I", "-S", "-c", code, *arguments]
    return await Program.start(command, stdin=b"", environment={"OPENAI_API_KEY": key}, rules=rules)


@pytest.mark.parametrize("daemon", DAEMONS)
def test_a_daemon_of_a_program_ends_with_it(tmp_path: Path, daemon: str) -> None:
    async def main() -> int:
        program = await run(START + DAEMONS[daemon] + WAIT, str(tmp_path / "pids"))
        return await asyncio.wait_for(program.wait(), 60)

    assert asyncio.run(main()) == 0
    assert end_in_time(*map(int, (tmp_path / "pids").read_text().split()), within_s=0.0)


def test_under_bwrap_a_program_finds_no_key_of_another_program_or_of_the_shell_that_started_it() -> None:
    if fault := bwrap_fault(ChildRules(section="environment")):
        pytest.skip(fault)

    async def main() -> str:
        others = [await run("import time; time.sleep(600)", isolate=isolate, key="sk-other") for isolate in ("bwrap", "none")]
        curious = await run(READ_ALL, isolate="bwrap")
        try:
            assert await asyncio.wait_for(curious.wait(), 60) == 0
        finally:
            for other in others:
                await other.kill()
        return curious.output

    assert asyncio.run(main()) == ""


LASTING = "import time; time.sleep(600)"
LEAVES = "import os, sys, time\nif os.fork() == 0: time.sleep(600)\nprint('done', flush=True)"


def instead_of_a_keeper(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """A keeper that cannot end what is left, or itself, is a program that does as it likes."""
    monkeypatch.setattr(program_module, "keeper_of", lambda *_: [sys.executable, "-I", "-S", "-c", code])


def test_the_wait_for_a_killed_program_ends_though_its_keeper_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    instead_of_a_keeper(monkeypatch, LASTING)
    for limit in ("KILLED_S", "ORDERLY_S", "CONTINUED_S"):
        monkeypatch.setattr(program_module, limit, 0.1)

    async def main() -> str:
        program = await run("")
        await asyncio.wait_for(program.kill(), 60)
        process = program._process
        assert process.returncode is None
        process.kill()
        return how_it_ended(await process.wait(), "")

    assert asyncio.run(main()) == "signal SIGKILL"


def test_a_program_has_ended_with_its_keeper_though_something_left_holds_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    instead_of_a_keeper(monkeypatch, LEAVES)
    for limit in ("ORDERLY_S", "CONTINUED_S"):
        monkeypatch.setattr(program_module, limit, 0.1)

    async def main() -> int:
        program = await run("")
        ended = await asyncio.wait_for(program.wait(), 60)
        os.killpg(program._process.pid, signal.SIGKILL)
        await program._ending
        return ended

    assert asyncio.run(main()) == 0


STOPS_ITS_KEEPER = """
import os, signal, sys
keeper = os.getppid()
def serve(note):
    with open(note, "w") as file: file.write(f"{os.getpid()} ")
    while True: os.kill(keeper, signal.SIGSTOP)
if len(sys.argv) == 3: serve(sys.argv[1])
"""


@pytest.mark.parametrize("how", ["program", "child"])
def test_a_child_that_stops_its_keeper_again_and_again_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str) -> None:
    note = tmp_path / "note"
    for module, limit in ((program_module, "KILLED_S"), (program_module, "ORDERLY_S"), (spawn, "KILLED_S"), (spawn, "CONTINUED_S")):
        monkeypatch.setattr(module, limit, 0.2)

    def started() -> bool:
        return note.exists() and note.read_text().endswith(" ")

    async def program() -> None:
        stopping = await run(STOPS_ITS_KEEPER, str(note), "program")
        while not started():
            await asyncio.sleep(0.01)
        while runs(int(note.read_text())):  # on a busy machine the keeper may just run when it is looked at
            await stopping.kill()

    def child() -> None:
        (tmp_path / "stops_its_keeper.py").write_text(STOPS_ITS_KEEPER)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        process, lifeline = spawn.spawn("stops_its_keeper:serve", ChildRules(section="environment", isolate="none"))
        with process:
            assert process.stdin is not None
            process.stdin.write(f'"{note}"\n'.encode())
            while not started():
                time.sleep(0.01)
            while runs(int(note.read_text())):
                spawn.end_child(process, lifeline)

    asyncio.run(program()) if how == "program" else child()
    assert not runs(int(note.read_text()))
