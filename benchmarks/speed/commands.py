"""Wall time, CPU time and memory of the commands that show a finished run.

    python -m benchmarks speed commands
    python -m benchmarks speed commands examples/exact.toml --home STATE --rounds 9

Runs the configuration on a broker of its own, unless the state directory `--home` has its run, and then each command in turn. Prints
medians; status 1 if one of wall or CPU time is above `--limit`.
"""

import contextlib
import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support.command import PENSTOCK, ROOT, own_broker, parser_of, penstock_json, with_numbers
from penstock.infra.paths import run_directory

RUN = "shown"
COMMANDS = ["--help", "--version", "runs", f"status {RUN}", f"report {RUN}", f"explain {RUN} 9", f"sql {RUN}"]
SHELL = "completion"
"""Typed in a shell: `penstock st` and the tab key."""


def took(command: str) -> tuple[float, float, float]:
    """(wall seconds, CPU seconds, peak MB) of one command. Raises `SystemExit` if it fails."""
    typed = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": "penstock st", "COMP_CWORD": "1"} if command == SHELL else {}
    words = [] if command == SHELL else command.split()
    started = time.monotonic()
    process = subprocess.Popen([*PENSTOCK, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | typed)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"penstock {command} ended with status {process.returncode}")
    return time.monotonic() - started, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main(arguments: Sequence[str]) -> int:
    """Run, repeat the commands, print; 1 if one takes longer than the limit."""
    parser = parser_of(__name__, __doc__)
    parser.add_argument("config", nargs="?", default=str(ROOT / "examples" / "demo.toml"))
    parser.add_argument("--home", type=Path, help="state directory to use and keep")
    with_numbers(parser, rounds=7, limit=0.7)
    chosen = parser.parse_args(arguments)
    with own_broker("commands", chosen.home), contextlib.suppress(KeyboardInterrupt):
        if not run_directory(RUN).is_dir():
            penstock_json("run", chosen.config, "--run-id", RUN)
        times = {command: [took(command) for _ in range(chosen.rounds)] for command in [*COMMANDS, SHELL]}
        medians = {command: [statistics.median(column) for column in zip(*rows, strict=True)] for command, rows in times.items()}
        print(f"{'':16}{'wall s':>10}{'CPU s':>10}{'peak MB':>10}")
        for command, (wall, cpu, peak) in medians.items():
            print(f"{command:16}{wall:>10.2f}{cpu:>10.2f}{peak:>10.0f}")
        return int(max(max(each[:2]) for each in medians.values()) > chosen.limit)
    return 130
