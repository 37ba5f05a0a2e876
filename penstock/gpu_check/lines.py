"""The lines of the check, and how one is run."""

import importlib
import os
import sys
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from penstock.gpu_check.figures import Machine, Skipped

LINES: dict[str, tuple[str, int]] = {
    "machine": ("machine", 30),
    "roofs": ("machine", 60),
    "forward": ("passes", 240),
    "attention": ("passes", 120),
    "head": ("passes", 90),
    "step": ("training", 180),
    "saved": ("training", 90),
    "turns": ("training", 90),
    "out": ("lane", 60),
    "in": ("lane", 60),
    "vllm": ("vllm_engine", 360),
    "run": ("whole_run", 300),
    "colocated": ("whole_run", 150),
}
"""Line -> its module, and the seconds after which it is ended."""
PRELOADED = ["torch", "transformers", "numpy"]


@dataclass(slots=True)
class Outcome:
    """What came of one line."""

    name: str
    status: str = "fail"
    reason: str = ""
    figures: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        texts = [self.reason] if self.reason else []
        texts += [figure["text"] if figure["holds"] else f"** {figure['text']} **" for figure in self.figures]
        return f"{self.status:5}{self.name:10}{self.seconds:6.1f} s  {'; '.join(texts)}"


def run_line(name: str, folder: str, device: str, pipe: Connection) -> None:
    """In the line's process: run it and send each figure as it comes, then `(status, reason)`."""
    log = Path(folder, f"{name}.log")
    with log.open("w", encoding="utf-8", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            line = getattr(importlib.import_module(f"penstock.gpu_check.{LINES[name][0]}"), f"{name}_" if name == "in" else name)
            for figure in line(Machine(device=torch.device(device), folder=Path(folder))):
                pipe.send({**figure.as_json(), "text": str(figure)})
            pipe.send(("ok", ""))
        except Skipped as skipped:
            pipe.send(("skip", str(skipped)))
        except Exception as error:
            traceback.print_exc()
            pipe.send(("fail", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # nothing of CUDA or of a process group is torn down


def outcome_of(name: str, *, folder: str, device: str, context: Any) -> Outcome:
    """Run one line in a new process; one that exceeds its time or crashes fails."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run_line, args=(name, folder, device, theirs), daemon=False)
    outcome, started, limit_s = Outcome(name), time.monotonic(), LINES[name][1]
    process.start()
    theirs.close()
    try:
        while ours.poll(max(0.0, started + limit_s - time.monotonic())):
            message = ours.recv()
            if isinstance(message, tuple):
                outcome.status, outcome.reason = message
                break
            outcome.figures.append(message)
        else:
            outcome.reason = f"ended after {limit_s} s"
    except EOFError:
        process.join(10)
        outcome.reason = f"its process ended with status {process.exitcode}"
    finally:
        process.kill()
        process.join()
    outcome.seconds = time.monotonic() - started
    if outcome.status == "ok" and not all(figure["holds"] for figure in outcome.figures):
        outcome.status = "fail"
    return outcome
