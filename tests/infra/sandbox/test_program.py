"""Programs of agents: what they have started ends with them, and the key of one is out of another's reach."""

import asyncio
import sys
from pathlib import Path

import pytest

from penstock.infra.sandbox.isolation import bwrap_fault
from penstock.infra.sandbox.program import Program
from penstock.infra.sandbox.rules import ChildRules
from tests.support.children import end_in_time

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc and prctl are Linux's")
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
    return await Program.start(command, given=b"", environment={"OPENAI_API_KEY": key}, rules=rules)


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
