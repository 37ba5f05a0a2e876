"""Lists the runs of a broker with status, reward and disk space, and stores the user's notes about runs."""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.infra.broker import embedded
from penstock.infra.log import Log
from penstock.infra.paths import run_directory, state_path, write_private
from penstock.pipeline.inspect.run_status import end_reason, last_reward
from penstock.pipeline.runtime.registration.run_registry import all_runs
from penstock.pipeline.runtime.topic_reader import scan
from penstock.topics import ledger, runs
from penstock.topics.runs import RunRecord
from penstock.topics.wire.errors import NewerSchema, Unusable

LAST_ENTRIES = 32
"""Number of last offsets of a ledger that are read for its newest entries; some are transaction markers."""
NOTE = "note.json"
NOTE_BYTES = 64 << 10


def list_runs(log: Log, *, refused: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Return a row per run, oldest first; values that this machine does not have are None. `refused` is called with errors of records."""
    records = all_runs(log, refused=refused)
    own_records = _own_records(log, records)
    names = {f"{record.run}.ledger": record.run for record in records}
    done, reasons = dict.fromkeys(names.values(), 0), dict[str, str | None]()
    ends = log.end_offsets([(topic, 0) for topic in names if log.partitions(topic)])
    for newest in scan(log, *names, since={tp: end - LAST_ENTRIES for tp, end in ends.items()}):
        with contextlib.suppress(Unusable, NewerSchema, ValueError, AttributeError):
            run, entry = names[newest.topic], ledger.read(newest, run=names[newest.topic])[1]
            done[run] = max(done[run], (entry.step or 0) + (entry.kind == "step"))
            if entry.kind == "run-closed":
                reasons[run] = end_reason(json.loads(entry.details or "{}").get("reason"))
    sizes, now = own_sizes(log), time.time_ns()
    rows: list[dict[str, Any]] = []
    models: dict[str | None, str | None] = {}
    for record in records:
        full = own_records.get(record.run, record)
        config, info, folder = json.loads(full.config or "{}"), json.loads(full.info or "{}"), state_path() / "runs" / record.run
        parent = runs.parent(info).get("run")
        rows.append(
            {
                "run": record.run,
                "status": record.status,
                "reason": reasons.get(record.run),
                "steps_done": done[record.run],
                "steps": json.loads(record.info).get("steps") or info.get("steps"),
                "created_s": record.created_ns / 1e9,
                "age": age((now - record.created_ns) / 1e9),
                "model": models.get(parent) or Path(config.get("model", {}).get("path", "")).name or None,
                "reward": reward_now(log, record.run) if record.status in ("created", "running") else reported_reward(folder),
                "parent": parent,
                "bytes": log_bytes(sizes, record.run) + folder_bytes(folder),
                **asdict(note_of(record.run)),
            }
        )
        models[record.run] = rows[-1]["model"]  # a fork starts from a copy in its own directory, so show the parent's model instead
    return rows


def own_sizes(log: Log) -> dict[str, int]:
    """Return topic -> bytes if the log is on this machine's embedded broker; {} for any other broker."""
    own = embedded.status().bootstrap
    return embedded.topic_bytes() if own and getattr(log, "bootstrap", None) == own else {}


def reward_now(log: Log, run: str) -> float | None:
    """Return the last reward of a run without a report, from the newest view that its tracker saved; None if unknown."""
    from penstock.pipeline.inspect.live.saved_view import newest

    return last_reward(newest(log, run)[0])


def reported_reward(folder: Path) -> float | None:
    """Return the last reward according to the report in a run's directory; None without a report."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        value = json.loads((folder / "report.json").read_text(encoding="utf-8"))["reward"]["last"]
        return None if value is None else float(value)
    return None


def log_bytes(sizes: dict[str, int], run: str) -> int:
    """Return the bytes of a run's topics from topic -> bytes."""
    return sum(size for topic, size in sizes.items() if topic.startswith(f"{run}."))


def folder_bytes(folder: Path, *, without: str | None = None) -> int:
    """Return the bytes of all files in a directory, 0 if it does not exist; the subdirectory `without` is not counted."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # an active run may delete files
            if path.is_file() and not path.is_symlink() and path.relative_to(folder).parts[0] != without:
                total += path.stat().st_blocks * 512
    return total


def _own_records(log: Log, records: list[RunRecord]) -> dict[str, RunRecord]:
    """Return run -> registration in the run's own topic, which has its configuration; runs of earlier releases have none."""
    own_records: dict[str, RunRecord] = {}
    for record in scan(log, *(f"{record.run}.run" for record in records)):
        run = record.topic.removesuffix(".run")
        with contextlib.suppress(Unusable, NewerSchema):
            own_records[run] = runs.read(record, run=run)[1]
    return own_records


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """The user's note about a run: text, name and tags; stored on this machine."""

    name: str | None = None
    text: str | None = None
    tags: tuple[str, ...] = ()


def note_of(run: str) -> Note:
    """Read the note about a run; an empty note if there is none or it cannot be read."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        stored = json.loads((run_directory(run) / NOTE).read_text(encoding="utf-8"))
        return Note(name=stored["name"], text=stored["text"], tags=tuple(map(str, stored["tags"])))
    return Note()


def write_note(run: str, note: Note) -> None:
    """Store a note in the run's directory on this machine. Raises `ValueError` if it is too long."""
    if len(text := json.dumps(asdict(note))) > NOTE_BYTES:
        raise ValueError(f"the note is longer than {NOTE_BYTES:,} bytes: shorten it")
    directory = run_directory(run)
    directory.mkdir(parents=True, exist_ok=True)
    write_private(directory / NOTE, text)


def age(seconds: float) -> str:
    """Format a duration in its largest fitting unit: `age(7300)` is "2 h"."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def size(count: float) -> str:
    """Format a number of bytes in its largest fitting unit: `size(2_500_000_000)` is "2.5 GB"."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count / 1e3:,.0f} kB"
