"""`metrics.jsonl`: every point of a run, one JSON object per line; the uploader to MLflow reads from here. And other sinks of the points.

One process writes each line once. It continues after the last complete line of an existing file. MLflow gets no point that is not in the
file. A sink that fails is reported once and closed: the file has all points.
"""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from penstock.infra.errors import Fenced
from penstock.infra.mlflow.tracking import Point
from penstock.infra.mlflow.uploader import Delivery
from penstock.infra.paths import locked
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.inspect.metrics import Line, flatten

LOCK_WAIT_S = 5.0
"""Time for another tracker of this run to finish ending."""
_RESERVED = frozenset({"kind", "step", "time", "from", "number"})


class MetricsFile:
    """An append-only file that contains each line of each source once."""

    def __init__(self, path: Path) -> None:
        """Open or create the file, and drop an incomplete last line. Raises `Fenced` if another process writes it, `OSError`."""
        self.path = path
        self.written: dict[str, int] = {}
        """Source -> number of its newest line."""
        self.points = 0
        """Number of points in all complete lines."""
        self.end = 0
        """Number of bytes that are complete, so that readers may use them."""
        self._unwritten: list[bytes] = []
        self._file = path.open("ab", buffering=0)
        try:
            self._lock()
            self._mend()
        except BaseException:
            self._file.close()
            raise

    def write(self, line: Line) -> bool:
        """Queue a line for the next `flush`; False if the file already contains it, by its source and number."""
        if line.number <= self.written.get(line.source, -1):
            return False
        self.written[line.source] = line.number
        # Whole numbers are labels and floats are values, so that a line can be read back.
        values = {name: float(value) if math.isfinite(value) else None for name, value in line.values.items()}
        labels = {name: value for name, value in line.labels.items() if value is not None}
        fields = {"kind": line.kind, "step": line.step, "time": line.timestamp_ms / 1000, "from": line.source, "number": line.number}
        self._unwritten.append((json.dumps({**fields, **labels, **values, **fields}) + "\n").encode())
        self.points += len(values)
        return True

    def flush(self) -> None:
        """Append the queued lines to the file. Raises `OSError`."""
        if self._unwritten:
            data = b"".join(self._unwritten)
            self._unwritten.clear()
            end = self.end + len(data)
            while data:
                data = data[self._file.write(data) :]
            self.end = end

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def read(self, offset: int, *, max_points: int) -> tuple[list[Delivery], int]:
        """Return the lines from byte `offset` on for MLflow, at most `max_points` points but at least one line, and the end offset."""
        deliveries: list[Delivery] = []
        count = 0
        with self.path.open("rb") as file:
            file.seek(offset)
            while offset < self.end:
                raw = file.readline()
                delivery = _delivery(json.loads(raw))
                count += len(delivery.points)
                if deliveries and count > max_points:
                    break
                deliveries.append(delivery)
                offset += len(raw)
        return deliveries, offset

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._file.close()

    def _lock(self) -> None:
        """Take the single-writer lock. Retry for `LOCK_WAIT_S`, as a killed predecessor may still hold it; then raise `Fenced`."""
        deadline = time.monotonic() + LOCK_WAIT_S
        while not locked(self._file):
            if time.monotonic() > deadline:
                raise Fenced(f"another tracker of this run is already writing to {self.path}")
            time.sleep(0.1)

    def _mend(self) -> None:
        """Count the complete lines, and truncate the file at the first incomplete one."""
        with self.path.open("rb+") as file:
            for raw in file:
                line = _line(raw)
                if line is None:
                    break
                self.end += len(raw)
                self.points += len(_values(line))
                self.written[line["from"]] = max(line["number"], self.written.get(line["from"], -1))
            file.truncate(self.end)


def _line(raw: bytes) -> dict[str, Any] | None:
    """Parse a line; None if it is incomplete or not of this file's form."""
    if not raw.endswith(b"\n"):
        return None
    try:
        line: dict[str, Any] = json.loads(raw)
        _delivery(line)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return line if isinstance(line["number"], int) and isinstance(line["from"], str) else None


def _values(line: dict[str, Any]) -> dict[str, float]:
    """The metrics of a line; those that were not finite are NaN."""
    values = {name: value for name, value in line.items() if name not in _RESERVED and (value is None or isinstance(value, float))}
    return {name: math.nan if value is None else value for name, value in values.items()}


def _delivery(line: dict[str, Any]) -> Delivery:
    """Convert a parsed line to the points that are sent to MLflow. Raises `KeyError`, `TypeError` for another form."""
    when, step = round(line["time"] * 1000), line["step"]
    points = tuple(Point(key=name, value=value, timestamp_ms=when, step=step) for name, value in _values(line).items())
    return Delivery(source=line["from"], number=line["number"], points=points)


STEP = "optimizer_step"
"""W&B's axis for all but a worker's own numbers, whose axis is `SECONDS`."""
SECONDS = "run_seconds"
STATUSES = ("status", "final")


class Sink(Protocol):
    """Receives the metrics of a run, in addition to `metrics.jsonl`."""

    def write(self, line: Line, *, new: bool) -> None:
        """Receive the metrics of one time; `new` is False if an earlier tracker has already written them."""

    def close(self) -> None:
        """Write all buffered metrics."""


class TensorBoard:
    """Writes one TensorBoard event file; a restarted tracker rewrites it from the start of the run."""

    def __init__(self, directory: Path) -> None:
        """Start a new event file in the folder, and delete those of an earlier tracker."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        directory.mkdir(parents=True, exist_ok=True)
        for earlier in directory.glob("events.out.tfevents.*"):
            earlier.unlink()
        self._writer = EventFileWriter(str(directory))

    def write(self, line: Line, *, new: bool) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        del new
        values = [Summary.Value(tag=name, simple_value=value) for name, value in line.values.items()]
        self._writer.add_event(Event(wall_time=line.timestamp_ms / 1000.0, step=line.step, summary=Summary(value=values)))

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Writes a W&B run with the run's id, which a restarted tracker continues; the API key comes from the environment."""

    def __init__(self, run: str, directory: Path, *, project: str, mode: Literal["online", "offline"], config: Mapping[str, Any]) -> None:
        import wandb

        directory.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("WANDB_SILENT", "true")
        self._run = wandb.init(
            project=project, id=run, name=run, dir=str(directory), mode=mode, resume="allow", config=flatten(config), reinit="create_new",
            settings=wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True, disable_git=True, save_code=False),
        )  # fmt: skip
        self._run.define_metric("*", step_metric=STEP)
        self._run.define_metric("system/*", step_metric=SECONDS)

    def write(self, line: Line, *, new: bool) -> None:
        if new:
            self._run.log({SECONDS if line.kind in STATUSES else STEP: line.step, **line.values})

    def close(self) -> None:
        self._run.finish()


def sinks(config: Config, run: str, directory: Path, *, notify: Callable[[str], None]) -> "Sinks":
    """Open TensorBoard and W&B, if configured; one that cannot be opened is skipped with one line to `notify`."""
    makers: dict[str, Callable[[], Sink]] = {}
    if config.tensorboard.enabled:
        makers["TensorBoard"] = lambda: TensorBoard(directory / "tensorboard")
    if config.wandb.enabled:
        settings, table = config.wandb, config.model_dump(mode="json")
        makers["W&B"] = lambda: WeightsAndBiases(run, directory, project=settings.project, mode=settings.mode, config=table)
    return Sinks(makers, notify)


class Sinks:
    """Passes metrics to several sinks; the failure of one does not affect the others."""

    def __init__(self, makers: Mapping[str, Callable[[], Sink]], notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._open: dict[str, Sink] = {}
        for name, make in makers.items():
            self._try(name, lambda name=name, make=make: self._open.update({name: make()}))  # type: ignore[misc]

    def write(self, line: Line, *, new: bool) -> None:
        for name, sink in list(self._open.items()):
            self._try(name, lambda sink=sink: sink.write(line, new=new))  # type: ignore[misc]

    def close(self) -> None:
        for name, sink in list(self._open.items()):
            self._try(name, sink.close)
        self._open.clear()

    def _try(self, name: str, action: Callable[[], object]) -> None:
        """Run an action of a sink; one that fails receives nothing more, and `notify` gets one line."""
        try:
            action()
        except Exception as error:  # foreign libraries, with errors of no common type: a run never ends because of them
            self._open.pop(name, None)
            cause = f"{error.name} is not installed" if isinstance(error, ModuleNotFoundError) else " ".join(str(error).split())[:200]
            self._notify(f"{name} receives no more metrics ({cause or type(error).__name__}); metrics.jsonl contains all of them")
