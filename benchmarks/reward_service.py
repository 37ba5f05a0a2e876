"""A reward service over HTTP that takes its time, and a real scorer with many groups in flight: utilisation and throughput.

    python benchmarks/reward_service.py --seconds 2 --in-flight 64 --groups 512
    python benchmarks/reward_service.py --seconds 2 --in-flight 64 --groups 16 --blocking

The service is a process of its own (uvicorn on loopback) that answers each group after `--seconds`; the scorer reads prompts and samples
from the in-memory log and has one child process for the rewards. `--blocking` asks the same service by a function that blocks, one group at
a time, as a reward that is not async does. Utilisation is the share of the time in which the places for groups were taken, from the first
group to the last; ideal throughput is in-flight / seconds.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.rewards.child import reward_pool
from tests.support.scorers import config_of, filled, outcomes, scorer_of

BLOCKING = """
import json, urllib.request

def ask(completions, **columns):
    request = urllib.request.Request("{address}", json.dumps({{"completions": completions}}).encode())
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["rewards"]
"""


def serve(seconds: float) -> None:
    """Answer each group after so long; prints the address first."""
    import asyncio

    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    from penstock.infra.sandbox.loopback import Loopback

    async def score(request: Request) -> Response:
        count = len((await request.json())["completions"])
        await asyncio.sleep(seconds)
        return JSONResponse({"rewards": [1.0] + [0.0] * (count - 1)})

    async def run() -> None:
        server = Loopback(Starlette(routes=[Route("/score", score, methods=["POST"])]))
        print(f"http://127.0.0.1:{server.port}/score", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.close()

    asyncio.run(run())


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Serve, score, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument("--blocking", action="store_true")
    parser.add_argument("--serve", action="store_true")
    chosen = parser.parse_args()
    if chosen.serve:
        serve(chosen.seconds)
        return
    command = [sys.executable, __file__, "--serve", "--seconds", str(chosen.seconds)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server,
        tempfile.TemporaryDirectory() as folder,
    ):
        assert server.stdin is not None and server.stdout is not None
        reward = address = server.stdout.readline().strip()
        if chosen.blocking:
            file = Path(folder) / "blocking.py"
            file.write_text(BLOCKING.format(address=address))
            reward = f"{file}:ask"
        score(reward, chosen, psutil.Process(server.pid))
        server.stdin.close()


def score(reward: str, chosen: argparse.Namespace, server: psutil.Process) -> None:
    """Have all groups scored and print what it took."""
    log, run = MemoryLog(), "service"
    filled(log, run, count=chosen.groups)
    config = config_of(reward)
    section = config.reward.model_copy(update={"concurrency": chosen.in_flight, "timeout_s": 60.0 + 2 * chosen.seconds})
    with reward_pool(section) as pool:
        scorer = scorer_of(log, run, 0, pool, config)
        while pool.busy_s == 0.0:  # until the child is ready
            scorer.turn()
        child = next(one for one in psutil.Process().children() if "penstock.pipeline.rewards.child:child" in one.cmdline())
        began, busy, cpu = time.monotonic(), pool.busy_s, [cpu_s(one) for one in (psutil.Process(), child, server)]
        threads = 0
        while pool.pending:
            scorer.turn()
            threads = max(threads, child.num_threads())
        wall, busy = time.monotonic() - began, pool.busy_s - busy
        spent = [cpu_s(one) - before for one, before in zip((psutil.Process(), child, server), cpu, strict=True)]
        scorer.turn()
        scorer.close()
        scorer.member.close(5.0)
    assert sum(outcomes(log, run).values()) == chosen.groups, outcomes(log, run)
    at_once = 1 if chosen.blocking else chosen.in_flight
    print(f"{chosen.groups} groups of {chosen.seconds:g} s, {at_once} in flight: {wall:.1f} s, utilisation {busy / wall:.0%}")
    print(f"{chosen.groups / wall:.2f} groups/s, {chosen.groups / wall / (at_once / chosen.seconds):.0%} of ideal")
    print(f"CPU ms a group: scorer {1000 * spent[0] / chosen.groups:.2f}, child {1000 * spent[1] / chosen.groups:.2f}, service", end=" ")
    print(f"{1000 * spent[2] / chosen.groups:.2f}; threads of the child {threads}, of this process {threading.active_count()}")


if __name__ == "__main__":
    main()
