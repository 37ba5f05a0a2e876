"""Lines of a worker's log: time, level, run, worker and text of one event, as text or as a JSON object."""

import json
import os
import time
from datetime import UTC, datetime

from penstock.topics.wire.visible import visible

LOG_JSON = "PENSTOCK_LOG_JSON"
"""Environment variable that makes lines JSON; `--log-json` sets it."""


def log_line(text: str, *, run: str, worker: str, level: str = "info", time_s: float | None = None, as_json: bool = False) -> str:
    """One line of a worker's log; times are local in text and UTC in JSON.

    Example:
        log_line("done", run="r", worker="feeder", time_s=0.0, as_json=True)
        # -> '{"time": "1970-01-01T00:00:00.000Z", "level": "info", "run": "r", "worker": "feeder", "text": "done"}'
    """
    now = time.time() if time_s is None else time_s
    if as_json:
        stamp = datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return json.dumps({"time": stamp, "level": level, "run": run, "worker": worker, "text": text})
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))} {level.upper()} {run} {worker}: {visible(text, one_line=True)}"


def print_line(run: str, worker: str, text: str, *, level: str = "info") -> None:
    """Print one line of a worker's log."""
    print(log_line(text, run=run, worker=worker, level=level, as_json=bool(os.environ.get(LOG_JSON))), flush=True)
