"""`python -m penstock.gpu_check`: run the lines, print one for each, and write all figures as JSON.

Each line runs in a process of its own, forked from one that has imported torch but has not used the GPU: what fails there ends that line.
Exit status 0 if every line that ran has all figures within their limits, else 1; 2 for a wrong argument.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from penstock.gpu_check import carried
from penstock.gpu_check.lines import LINES, PRELOADED, Outcome, outcome_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen lines; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m penstock.gpu_check", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(LINES), default=list(LINES), metavar="LINE", help=f"of {', '.join(LINES)}")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--seconds", type=float, default=600.0, help="lines that would start later are skipped")
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), metavar="FILE", help="where all figures are written")
    chosen = parser.parse_args(arguments)
    carried.use()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # otherwise the question initialises CUDA, which no forked process can use
    device = ("cuda" if torch.cuda.is_available() else "cpu") if chosen.device == "auto" else chosen.device
    if device == "cpu":
        print("no GPU: small sizes, and without the limits of a GPU", flush=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    started, outcomes = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-check-") as folder:
        for name in chosen.only:
            if time.monotonic() - started > chosen.seconds:
                outcomes.append(Outcome(name, status="skip", reason=f"not started within {chosen.seconds:g} s"))
            else:
                outcomes.append(outcome_of(name, folder=folder, device=device, context=context))
            print(outcomes[-1], flush=True)
            log = Path(folder, f"{name}.log")
            if outcomes[-1].status == "fail" and log.exists():
                print("".join(f"      | {text}\n" for text in log.read_text(errors="replace").splitlines()[-15:]), end="", flush=True)
    counts = {status: sum(outcome.status == status for outcome in outcomes) for status in ("ok", "fail", "skip")}
    print(f"{counts['ok']} passed, {counts['fail']} failed, {counts['skip']} skipped in {time.monotonic() - started:.0f} s")
    report = {"device": device, "lines": [asdict(outcome) for outcome in outcomes]}
    chosen.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if counts["fail"] else 0


if __name__ == "__main__":
    sys.exit(main())
