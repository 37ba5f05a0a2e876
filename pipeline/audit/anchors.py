"""What has seen how far a run's ledger had come: its measurements, and on the trainer's machine checkpoints and `metrics.jsonl`.

The rule: a ledger that has lost its end is whole in itself; only what was written because of the lost entries shows that they were there.
"""

import contextlib
import re
from pathlib import Path
from typing import Any, NamedTuple

from penstock.pipeline.audit.rules import as_object

LAST_BYTES = 1 << 18
"""Of `metrics.jsonl` only the end is read: the newest step is one of its last lines."""
_CHECKPOINT = re.compile(r"step-\d{8,}")


class Anchor(NamedTuple):
    """A place that knows of committed steps."""

    name: str
    steps: int
    """Steps done when it was written."""


def of_folder(directory: Path) -> list[Anchor]:
    """The anchors in a run's folder; none where there is no such folder.

    They have to be read before the log: what a run at work adds later is no evidence against an earlier end of its ledger.
    """
    return [*_checkpoints(directory / "checkpoints"), *_points(directory / "metrics.jsonl")]


def of_trainer(where: object, values: dict[str, float]) -> Anchor | None:
    """The anchor that a trainer's measurement is; None before its first step."""
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
