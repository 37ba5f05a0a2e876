"""The same run under several modes, side by side: time per round, waiting, overlap, and whether the weights end equal.

    python benchmarks/modes.py examples/exact.toml --modes synchronous pipelined --repeats 2 --set run.steps=40

Runs alternate (a b a b ...), so that a machine whose speed drifts treats the modes alike; figures are medians over the repeats.
The limit of pipelining is printed beside it: of a round's rollout and training time only the shorter one can be hidden.
"""

import argparse
import json
import statistics
import subprocess
from typing import Any

from command import PENSTOCK


def run(config: str, *, mode: str, settings: list[str]) -> dict[str, Any]:
    """One run's report. Raises `SystemExit` with the run's own words when it fails."""
    command = [*PENSTOCK, "run", config, "--json"]
    command += [word for setting in [*settings, f"schedule.mode={mode}"] for word in ("--set", setting)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise SystemExit(found.stderr[-2000:])
    report: dict[str, Any] = json.loads(found.stdout)
    return report


def main() -> None:
    """Run, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--modes", nargs="+", default=["synchronous", "pipelined"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    chosen = parser.parse_args()
    reports: dict[str, list[dict[str, Any]]] = {mode: [] for mode in chosen.modes}
    for _ in range(chosen.repeats):
        for mode in chosen.modes:
            reports[mode].append(run(chosen.config, mode=mode, settings=chosen.settings))
    print(f"{'mode':<14}{'round s':>9}{'train s':>9}{'waiting':>9}{'overlap':>9}{'reward':>16}  digest")
    for mode, found in reports.items():
        rounds = statistics.median(statistics.median(report["time"]["rollout_to_train_end_s"]) for report in found)
        train = statistics.median(report["time"]["train_s"] for report in found)
        waiting = statistics.median(report["time"]["trainer_waiting_ratio"] for report in found)
        overlap = statistics.median(report["overlap"]["share"] or 0.0 for report in found)
        reward = f"{found[-1]['reward']['first']:.3f} -> {found[-1]['reward']['last']:.3f}"
        digests = sorted({report["weights"]["digest"][:16] for report in found})
        print(f"{mode:<14}{rounds:>9.3f}{train:>9.1f}{waiting:>9.0%}{overlap:>9.0%}{reward:>16}  {' '.join(digests)}")
    if "synchronous" in reports:
        whole = [time for report in reports["synchronous"] for time in report["time"]["rollout_to_train_end_s"]]
        waiting = statistics.median(report["time"]["trainer_waiting_ratio"] for report in reports["synchronous"])
        share = min(waiting, 1.0 - waiting)
        whole_s = statistics.median(whole)
        print(f"limit: of a synchronous round of {whole_s:.3f} s at most {share:.0%} can be hidden (the shorter of rollout and training)")


if __name__ == "__main__":
    main()
