"""`metrics.jsonl`: every point of a run, one JSON object a line, beside whatever tracker is used.

The rule: a line is written once. Where a file is found, its own lines say how far it goes; a torn last one is cut off first.
"""

import json
import math
from pathlib import Path
from typing import IO

from pipeline.points import Line


class PointsFile:
    """An append-only file that knows, by source, which line comes next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written: dict[str, int] = {}
        """Source -> number of its newest line."""
        if path.exists():
            self._mend()
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def write(self, line: Line) -> bool:
        """Append a line; False when the file holds it already."""
        if line.number <= self.written.get(line.source, -1):
            return False
        self.written[line.source] = line.number
        values = {name: value if math.isfinite(value) else None for name, value in line.values.items()}
        known = {"kind": line.kind, "step": line.step, "time": line.timestamp_ms / 1000, "from": line.source, "number": line.number}
        self._file.write(json.dumps({**known, **line.labels, **values, **known}) + "\n")
        return True

    def flush(self) -> None:
        """Hand what was written to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Flush and end."""
        self._file.close()

    def _mend(self) -> None:
        """Read how far the file goes, and cut off everything from the first line on that is not whole."""
        with self.path.open("rb+") as file:
            good = 0
            for raw in file:
                place = _place(raw)
                if place is None:
                    break
                good += len(raw)
                self.written[place[0]] = max(place[1], self.written.get(place[0], -1))
            file.truncate(good)


def _place(raw: bytes) -> tuple[str, int] | None:
    if not raw.endswith(b"\n"):
        return None
    try:
        found = json.loads(raw)
        return str(found["from"]), int(found["number"])
    except (ValueError, KeyError, TypeError):
        return None
