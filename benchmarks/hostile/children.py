"""Hostile reward functions in a pool of child processes: leftover processes, what they reach, and the pool's next call.

    python -m benchmarks hostile children --isolate landlock      # none, landlock or bwrap
    python -m benchmarks hostile children --cost                  # milliseconds of a call, of a start, and calls per second

Each function has two pools of one child: the hostile call, then a call to each child. "left" counts processes with the pool's mark in
their environment or command after its end; "reached" lists what the function has read or signalled of the pool's owner, of the sibling, of
a keeper or of a bystander.
"""

import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.support.attacks import FUNCTIONS, NOT_COVERED, write_module
from benchmarks.support.command import parser_of
from penstock.infra.sandbox.secrets import hide_secrets
from penstock.infra.sandbox.spawn import ChildRules
from penstock.infra.sandbox.timed_pool import ChildPool, Done

SECRET, MARK = "HUNTER2-of-the-owner", "hostile-child-mark"
LIMITS = {"memory_gb": 0.3, "max_processes": 60, "file_gb": 0.01}


def result_of(pool: "ChildPool[Any]", **payload: Any) -> Any:
    """Result of a call, or the reason of its failure."""
    pool.submit(0, payload)
    while not (ended := pool.poll(1.0)):
        pass
    return ended[0].result if isinstance(ended[0], Done) else ended[0].reason


def left_over(folder: Path) -> int:
    """Processes that carry the mark or the pool's folder."""
    count = 0
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                texts = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
                zombie = b") Z" in (process / "stat").read_bytes()
            except OSError:
                continue
            count += not zombie and (MARK.encode() in texts or str(folder).encode() in texts)
    return count


def attack(name: str, folder: Path, isolate: Any) -> tuple[str, int, list[str], str]:
    """(result of the hostile call, leftover processes, what was reached, "yes" if the pool served the next call)."""
    bystander = subprocess.Popen(["sleep", "600"], env={"MY_SECRET": SECRET})
    rules = ChildRules(section="reward", isolate=isolate, **LIMITS)  # type: ignore[arg-type]
    with (
        closing(ChildPool[Any]("hostile_functions:serve", size=1, timeout_s=3.0, retries=0, rules=rules)) as pool,
        closing(ChildPool[Any]("hostile_functions:serve", size=1, timeout_s=30.0, retries=0, rules=rules)) as other,
    ):
        sibling = result_of(other, do="pid")
        pids = [bystander.pid, *([sibling] if isolate != "bwrap" else [])]
        safe = isolate != "none"
        pids.append(os.getpid())
        result = result_of(pool, do=name, folder=str(folder), pids=pids, safe=safe)
        serves = isinstance(result_of(pool, do="pid"), int) and result_of(other, do="pid") == sibling and bystander.poll() is None
    bystander.kill()
    bystander.wait()
    reached = sorted(set(result)) if isinstance(result, list) else []
    return ("returned" if isinstance(result, list) else str(result)), left_over(folder), reached, "yes" if serves else "no"


def main(arguments: Sequence[str]) -> None:
    """Print the table, or the costs."""
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--isolate", choices=["none", "landlock", "bwrap"], default="landlock")
    parser.add_argument("--only", help="functions whose names contain this")
    parser.add_argument("--cost", action="store_true")
    chosen = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="hostile-children-"))
    os.environ |= {"PYTHONPATH": str(folder), "MY_SECRET": SECRET, "HF_TOKEN": SECRET}
    write_module(folder)
    hide_secrets()
    if chosen.cost:
        costs()
    else:
        bad = 0
        for name in (name for name in FUNCTIONS if (chosen.only or "") in name):
            began = time.monotonic()
            result, left, reached, serves = attack(name, folder, chosen.isolate)
            bad += bool(left or (reached and name not in NOT_COVERED[chosen.isolate]) or serves == "no")
            print(
                f"{name:30} left {left}  reached {', '.join(reached) or '-':24} serves {serves:4}"
                f"{time.monotonic() - began:5.1f} s  {ascii(result)[1:91]}",
                flush=True,
            )
        print(f"{chosen.isolate}: {len(FUNCTIONS)} functions, {bad} that left or reached something, or stopped the pool")
    shutil.rmtree(folder, ignore_errors=True)


def costs(rounds: int = 5, calls: int = 200) -> None:
    """Start, call and end of a child, and calls per second of one and two, for each isolation in turns; medians of the rounds."""
    table: dict[str, list[list[float]]] = {"none": [], "landlock": [], "bwrap": []}
    for _ in range(rounds):
        for isolate, rows in table.items():
            if isolate != "bwrap" or shutil.which("bwrap") is not None:
                rows.append([*cost(isolate, 1, calls), cost(isolate, 2, calls)[1]])
    for isolate, rows in table.items():
        if rows:
            start, call, end, call_of_two = map(statistics.median, zip(*rows, strict=True))
            print(
                f"{isolate:9} start {start:6.0f} ms   call {call:.3f} ms   end {end:5.1f} ms   "
                f"calls per second: {1e3 / call:,.0f} of one child, {1e3 / call_of_two:,.0f} of two"
            )


def cost(isolate: Any, size: int, calls: int) -> tuple[float, float, float]:
    """Milliseconds of the start of this many children, of a call if they all work, and of their end."""
    began = time.perf_counter()
    pool = ChildPool[Any]("hostile_functions:serve", size=size, timeout_s=30.0, rules=ChildRules(section="reward", isolate=isolate))
    result_of(pool, do="pid")
    started = time.perf_counter()
    for number in range(calls):
        pool.submit(number, {"do": "pid"})
    while pool.pending:
        pool.poll(1.0)
    called = time.perf_counter()
    pool.close()
    return 1e3 * (started - began), 1e3 * (called - started) / calls, 1e3 * (time.perf_counter() - called)
