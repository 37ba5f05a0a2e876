"""A run, then the same training again from its log alone: are all bits the same, and how long does it take?

    python benchmarks/replay.py examples/exact.toml --set schedule.mode=one_step_off --set rollout.workers=2
    python benchmarks/replay.py examples/demo.toml --set schedule.mode=one_step_off

The recorded trainer's busy time is what it computed, hashed and published; waiting for groups is not in it. Of the replay, start-up
(imports, the model, the ledger) stands apart. With `--run RUN` a run that is there is replayed.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from command import PENSTOCK, launched


def record(config: str, settings: list[str]) -> str:
    """Do a run; returns its id."""
    run = f"replay-{time.strftime('%H%M%S')}"
    words = [word for setting in settings for word in ("--set", setting)]
    with tempfile.TemporaryDirectory() as place, launched(config, run, words, Path(place) / "out") as process:
        if process.wait():
            raise SystemExit((Path(place) / "out").read_text()[-2000:])
    return run


def replay(run: str) -> dict[str, Any]:
    """Replay it in a process of its own; `process_s` is that process's whole time."""
    began = time.monotonic()
    found = subprocess.run([*PENSTOCK, "replay", "train", run, "--json"], capture_output=True, text=True, check=False)
    if not found.stdout:
        raise SystemExit(found.stderr[-2000:])
    told: dict[str, Any] = json.loads(found.stdout)
    return told | {"process_s": time.monotonic() - began}


def main() -> None:
    """Run, replay, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", nargs="?")
    parser.add_argument("--run", help="replay this run instead of doing one")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    chosen = parser.parse_args()
    if (chosen.config is None) == (chosen.run is None):
        parser.error("give a CONFIG or --run RUN")
    run = chosen.run or record(chosen.config, chosen.settings)
    found = [replay(run) for _ in range(chosen.repeats)]
    times = {
        name: statistics.median(one["times"][name] for one in found) for name in ("replay_s", "start_s", "recorded_busy_s", "compute_s")
    }
    whole_s = statistics.median(one["process_s"] for one in found)
    same = {(one["steps"], one["matching_steps"], one["digests_compared"]) for one in found}
    print(f"run {run}: " + "; ".join(f"{n} steps, {m} the same bit for bit, {d} weights digests compared" for n, m, d in sorted(same)))
    print(f"recorded trainer busy  {times['recorded_busy_s']:8.2f} s")
    print(f"replayed steps         {times['replay_s']:8.2f} s, {times['compute_s']:.2f} s of them computing (median of {len(found)})")
    print(f"ratio                  {times['replay_s'] / times['recorded_busy_s']:8.2f}   limit 1.1")
    print(f"start-up               {whole_s - times['replay_s']:8.2f} s, {times['start_s']:.2f} s of them the model and the log")
    if any(one["first_difference"] for one in found) or times["replay_s"] > 1.1 * times["recorded_busy_s"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
