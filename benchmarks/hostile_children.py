"""Hostile reward functions in a pool of child processes: what outlives them, what they read, and whether the pool serves the next call.

    python benchmarks/hostile_children.py --isolate landlock      # none, landlock or bwrap
    python benchmarks/hostile_children.py --cost                  # milliseconds of a call, of a start, and calls per second

Each function gets a pool of two children of its own: the hostile call, then a call that must be answered by each child. "outlives" counts
processes with the pool's mark in their environment or command after its end; "read" what the function has read or signalled of the pool's
owner, of the sibling, of a keeper or of a process that has nothing to do with the pool.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from penstock.infra.sandbox.pool import ChildPool, Done
from penstock.infra.sandbox.rules import ChildRules
from penstock.infra.sandbox.secrets import hide_secrets

SECRET, MARK = "HUNTER2-of-the-owner", "hostile-child-mark"
LIMITS = {"memory_gb": 0.3, "max_processes": 60, "file_gb": 0.01}
COMMON = """
import ctypes, os, resource, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)", "hostile-child-mark"]

def fork(*steps):
    if os.fork() == 0:
        for step in steps: step()
        os._exit(0)

def rest(): time.sleep(600)
def deaf():
    for number in (1, 2, 3, 15): signal.signal(number, signal.SIG_IGN)
def popen(**options): subprocess.Popen(SLEEP, stdin=-3, stdout=-3, stderr=-3, **options)
def others(payload): return [*payload["pids"], *[pid for pid in [os.getppid()] if pid > 1]]  # 1: the first process of its own namespace

def attempt(action, name):
    try: return [name] if action() in (None, True) else []
    except OSError: return []

def signals(payload, *numbers):
    return [hit for pid in others(payload) for number in numbers for hit in attempt(lambda: os.kill(pid, number), f"signal {number}")]

def secret_in(path):
    with open(path, "rb", buffering=0) as file:
        return b"HUNTER2" in file.read(1 << 20)

def reads(payload, name): return [hit for pid in others(payload) for hit in attempt(lambda: secret_in(f"/proc/{pid}/{name}"), name)]
def opens(payload, name):
    return [hit for pid in others(payload) for hit in attempt(lambda: os.close(os.open(f'/proc/{pid}/{name}', 0)), name)]
def links(payload, name): return [hit for pid in others(payload) for hit in attempt(lambda: bool(os.readlink(f"/proc/{pid}/{name}")), name)]
def ptrace(payload, how): return [hit for pid in others(payload) for hit in attempt(lambda: libc.ptrace(how, pid, 0, 0) == 0, "ptrace")]
def vm_read(payload):
    buffer = ctypes.create_string_buffer(64)
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 64)
    remote = (ctypes.c_size_t * 2)(0x400000, 64)
    return [hit for pid in others(payload) for hit in attempt(lambda: libc.process_vm_readv(pid, vector, 1, remote, 1, 0) > 0, "memory")]
def pidfd(payload):
    return [hit for pid in others(payload) for hit in attempt(lambda: libc.syscall(438, os.pidfd_open(pid), 1, 0) >= 0, "descriptor")]
def prlimit(payload):
    return [hit for pid in others(payload) for hit in attempt(lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (64, 64)), "prlimit") ]
def write_all(data):
    for descriptor in range(1, 40):
        try: os.write(descriptor, data)
        except OSError: pass
def grow():
    kept = []
    while True: kept.append(bytearray(16 << 20))
def big_file(payload):
    with open(payload["folder"] + "/big", "wb") as file:
        while True: file.write(bytes(1 << 20))
def bomb():
    end = time.time() + 20
    while time.time() < end:
        try: os.fork()
        except OSError: pass
def threads():
    for _ in range(500): threading.Thread(target=rest, daemon=True).start()
"""
FUNCTIONS = {
    "fork bomb": "bomb()",
    "fork bomb, new sessions": "os.setsid() if os.getpid() != os.getsid(0) else None; fork(os.setsid, bomb); rest()",
    "60 sleepers": "[popen() for _ in range(70)]; rest()",
    "500 threads": "threads()",
    "setsid": "popen(start_new_session=True)",
    "double fork": "fork(os.setsid, lambda: fork(lambda: os.execv(SLEEP[0], SLEEP)))",
    "double fork, deaf": "fork(os.setsid, deaf, lambda: fork(os.setsid, rest))",
    "daemon, environment cleared": "popen(start_new_session=True, env={})",
    "own process group": "popen(process_group=0)",
    "chain of sessions": "fork(os.setsid, lambda: fork(os.setsid, lambda: fork(os.setsid, rest), rest), rest)",
    "own subreaper": "libc.prctl(36, 1, 0, 0, 0); fork(os.setsid, lambda: fork(rest))",
    "stopped daemon": "fork(os.setsid, lambda: os.kill(os.getpid(), 19))",
    "daemon, then exit": "popen(start_new_session=True); os._exit(0)",
    "daemon, then SIGKILL": "popen(start_new_session=True); os.kill(os.getpid(), 9)",
    "ignores SIGTERM, hangs": "deaf(); rest()",
    "blocks all signals, hangs": "signal.pthread_sigmask(0, signal.valid_signals()); rest()",
    "stops itself": "os.kill(os.getpid(), 19)",
    "no parent death signal": "libc.prctl(1, 0, 0, 0, 0); popen(start_new_session=True)",
    "memory": "grow()",
    "memory in a daemon": "fork(os.setsid, grow); rest()",
    "memory of many": "[fork(lambda: (bytearray(20 << 20), rest())) for _ in range(20)]; rest()",
    "disk": "big_file(payload)",
    "core dump": "resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.kill(os.getpid(), 11)",
    "raises its limits": "return attempt(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 50, 1 << 50)), 'limit')",
    "environ of others": "return reads(payload, 'environ')",
    "memory of others": "return opens(payload, 'mem') + opens(payload, 'maps')",
    "descriptors of others": "return links(payload, 'fd/0') + links(payload, 'fd/1')",
    "folder and program of others": "return links(payload, 'cwd') + links(payload, 'exe') + links(payload, 'root')",
    "process_vm_readv": "return vm_read(payload)",
    "pidfd_getfd": "return pidfd(payload)",
    "ptrace": "return ptrace(payload, 16) + ptrace(payload, 0x4206)",
    "own environment": "return [name for name, value in os.environ.items() if 'HUNTER2' in value]",
    "kill -9 others": "return signals(payload, 9)",
    "kill -9 -1": "os.kill(-1, 9) if payload['safe'] else None",
    "SIGSTOP to others": "return signals(payload, 19)",
    "SIGTERM, SIGINT to others": "return signals(payload, 15, 2)",
    "closes all descriptors": "os.closerange(0, 100); rest()",
    "garbage on all descriptors": "write_all(b'garbage\\n'); rest()",
    "forged answers": 'write_all(b\'{"call": 7, "result": 1}\\n{"broken": "x"}\\n\'); rest()',
    "endless line": "data = b'x' * 65536\n        while True: write_all(data)",
    "deep JSON": "write_all(b'[' * 100000 + b'\\n'); rest()",
    "symbolic links": "os.symlink('/proc/self/fd/0', payload['folder'] + '/link'); os.symlink('/', payload['folder'] + '/root')",
    "listening socket": "server = socket.create_server(('127.0.0.1', 0)); fork(os.setsid, lambda: server.accept()); return []",
}


def write_module(folder: Path) -> None:
    """The handler of all functions, as the module that the children load."""
    cases = "".join(f"\n    if payload['do'] == {name!r}:\n        {code}" for name, code in FUNCTIONS.items())
    serve = "\n\ndef serve(init):\n    return lambda payload: run(payload) or []\n"
    (folder / "hostile_functions.py").write_text(
        f"{COMMON}\ndef run(payload):\n    if payload['do'] == 'pid': return os.getpid(){cases}\n{serve}"
    )


def answer(pool: "ChildPool[Any]", **payload: Any) -> Any:
    """The result of a call, or the reason of its failure."""
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
    """What the hostile call ended with, processes that outlive the pool, what was reached, and whether the pool went on."""
    bystander = subprocess.Popen(["sleep", "600"], env={"MY_SECRET": SECRET})
    rules = ChildRules(section="reward", isolate=isolate, **LIMITS)  # type: ignore[arg-type]
    with (
        ChildPool[Any]("hostile_functions:serve", size=1, timeout_s=3.0, retries=0, rules=rules) as pool,
        ChildPool[Any]("hostile_functions:serve", size=1, timeout_s=30.0, retries=0, rules=rules) as other,
    ):
        sibling = answer(other, do="pid")
        pids = [bystander.pid, *([sibling] if isolate != "bwrap" else [])]
        safe = isolate != "none"
        if isolate != "none" or not name.startswith(("kill", "SIG")):
            pids.append(os.getpid())
        result = answer(pool, do=name, folder=str(folder), pids=pids, safe=safe)
        goes_on = isinstance(answer(pool, do="pid"), int) and answer(other, do="pid") == sibling and bystander.poll() is None
    bystander.kill()
    bystander.wait()
    reached = sorted(set(result)) if isinstance(result, list) else []
    return ("returned" if isinstance(result, list) else str(result)), left_over(folder), reached, "yes" if goes_on else "no"


def main() -> None:
    """Print the table, or the costs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isolate", choices=["none", "landlock", "bwrap"], default="landlock")
    parser.add_argument("--only", help="functions whose names contain this")
    parser.add_argument("--cost", action="store_true")
    chosen = parser.parse_args()
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
            result, left, reached, goes_on = attack(name, folder, chosen.isolate)
            bad += bool(left or reached or goes_on == "no")
            print(
                f"{name:30} left {left}  reached {', '.join(reached) or '-':24} goes on {goes_on:4}"
                f"{time.monotonic() - began:5.1f} s  {result[:90]}",
                flush=True,
            )
        print(f"{chosen.isolate}: {len(FUNCTIONS)} functions, {bad} with something left, reached or ended")
    shutil.rmtree(folder, ignore_errors=True)


def costs(rounds: int = 7, calls: int = 300) -> None:
    """Start, call and end of a child for each isolation, in turns; medians of the rounds."""
    table: dict[str, list[tuple[float, float, float]]] = {"none": [], "landlock": [], "bwrap": []}
    for _ in range(rounds):
        for isolate, rows in table.items():
            if isolate == "bwrap" and shutil.which("bwrap") is None:
                continue
            began = time.perf_counter()
            pool = ChildPool[Any]("hostile_functions:serve", size=1, timeout_s=30.0, rules=ChildRules(section="reward", isolate=isolate))  # type: ignore[arg-type]
            answer(pool, do="pid")
            started = time.perf_counter()
            for _ in range(calls):
                answer(pool, do="pid")
            called = time.perf_counter()
            pool.close()
            rows.append((1e3 * (started - began), 1e3 * (called - started) / calls, 1e3 * (time.perf_counter() - called)))
    for isolate, rows in table.items():
        if rows:
            start, call, end = map(statistics.median, zip(*rows, strict=True))
            print(f"{isolate:9} start {start:6.0f} ms   call {call:.3f} ms ({1e3 / call:,.0f}/s)   end {end:5.1f} ms")


if __name__ == "__main__":
    main()
