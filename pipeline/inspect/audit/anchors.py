"""Evidence of committed steps outside the ledger: measurements, checkpoints and `metrics.jsonl`.

A ledger that has lost its last entries looks complete; records and files written after those entries show that they existed.
"""

import contextlib
import re
from pathlib import Path
from typing import Any, NamedTuple

from penstock.pipeline.inspect.audit.rules import as_object

LAST_BYTES = 1 << 18
"""Bytes read from the end of `metrics.jsonl`; the newest step is in one of its last lines."""
_CHECKPOINT = re.compile(r"step-\d{8,}")


class Anchor(NamedTuple):
    """Evidence that a number of steps was committed."""

    name: str
    steps: int
    """Steps committed when it was written."""


def of_folder(directory: Path) -> list[Anchor]:
    """The anchors in a run's folder; none if the folder does not exist.

    Read them before the log: a running run adds anchors that the end of its ledger read earlier does not cover.
    """
    return [*_checkpoints(directory / "checkpoints"), *_points(directory / "metrics.jsonl")]


def of_trainer(where: object, values: dict[str, float]) -> Anchor | None:
    """The anchor in a trainer's measurement; None before its first step."""
    return Anchor(f"the trainer's measurement at {where}", int(values["step"])) if "step" in values else None


def _checkpoints(directory: Path) -> list[Anchor]:
    anchors = []
    for path in sorted(directory.glob("step-*")):
        with contextlib.suppress(OSError, KeyError, ValueError, TypeError):
            if _CHECKPOINT.fullmatch(path.name):
                anchors.append(Anchor(f"checkpoint {path.name}", int(as_object((path / "state.json").read_text())["steps"])))
    return anchors


def _points(path: Path) -> list[Anchor]:
    lines: list[dict[str, Any]] = []
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LAST_BYTES))
        lines = [as_object(line) for line in file.read().decode(errors="replace").splitlines()]
    steps = [line["step"] + 1 for line in lines if line.get("kind") == "step" and isinstance(line.get("step"), int)]
    return [Anchor(path.name, max(steps))] if steps else []
