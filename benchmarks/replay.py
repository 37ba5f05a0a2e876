"""Retrains a run from its log: is every bit equal, and how long does it take?

    python -m benchmarks replay examples/exact.toml --set schedule.mode=one_step_off --set rollout.workers=2
    python -m benchmarks replay --run RUN

The recorded trainer's busy time is what it computed, hashed and published; waiting for groups is left out. The start-up of the replay
(imports, the model, the ledger) is printed separately.
"""

import json
import statistics
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.support.command import PENSTOCK, parser_of, report_of, with_numbers, with_settings

RATIO_LIMIT = 1.1


def replay(run: str) -> dict[str, Any]:
    """Replay the run in a process of its own; `process_s` is the wall time of that process."""
    started = time.monotonic()
    done = subprocess.run([*PENSTOCK, "replay", "train", run, "--json"], capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(done.stderr[-2000:])
    return {**json.loads(done.stdout), "process_s": time.monotonic() - started}


def main(arguments: Sequence[str]) -> int:
    """Run, replay, print; 1 if a bit differs or the replay is slower than the limit."""
    parser = parser_of(__name__, __doc__)
    parser.add_argument("config", nargs="?")
    parser.add_argument("--run", help="replay this recorded run")
    with_numbers(parser, repeats=3)
    with_settings(parser)
    chosen = parser.parse_args(arguments)
    if (chosen.config is None) == (chosen.run is None):
        parser.error("expected CONFIG or --run RUN")
    run = chosen.run or f"replay-{time.strftime('%H%M%S')}"
    if chosen.config:
        report_of(chosen.config, run, chosen.settings)
    replays = [replay(run) for _ in range(chosen.repeats)]
    times = {
        name: statistics.median(each["times"][name] for each in replays) for name in ("replay_s", "start_s", "recorded_busy_s", "compute_s")
    }
    start_s = statistics.median(each["process_s"] for each in replays) - times["replay_s"]
    ratio = times["replay_s"] / times["recorded_busy_s"]
    outcomes = {(each["steps"], each["matching_steps"], each["digests_compared"]) for each in replays}
    print(f"run {run}: " + "; ".join(f"{n} steps, {m} bit-identical, {d} weight digests compared" for n, m, d in sorted(outcomes)))
    print(f"recorded trainer busy  {times['recorded_busy_s']:8.2f} s")
    print(f"replayed steps         {times['replay_s']:8.2f} s, {times['compute_s']:.2f} s of them computing (median of {len(replays)})")
    print(f"ratio                  {ratio:8.2f}   limit {RATIO_LIMIT}")
    print(f"start-up               {start_s:8.2f} s, {times['start_s']:.2f} s of them the model and the log")
    return int(any(each["first_difference"] for each in replays) or ratio > RATIO_LIMIT)
