"""Sinks of a run's points in addition to MLflow: TensorBoard's event files and Weights & Biases.

All sinks get the same points under the same names. A sink that fails is reported once and closed: `metrics.jsonl` has all points.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from penstock.pipeline.config.run_config import Config
from penstock.pipeline.inspect.metrics.points import Line, flatten

STEP = "optimizer_step"
"""W&B's axis for all but a worker's own numbers, whose axis is `SECONDS`."""
SECONDS = "run_seconds"
STATUSES = ("status", "final")


class Sink(Protocol):
    """Takes a run's points."""

    def write(self, line: Line, *, new: bool) -> None:
        """Take a moment's values; `new` is False for what an earlier tracker of the run has written."""

    def close(self) -> None:
        """Write what is held."""


class TensorBoard:
    """One event file in a folder; a restarted tracker reads the run from its beginning and rewrites the file."""

    def __init__(self, directory: Path) -> None:
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
    """A W&B run of the run's own id, which a restarted tracker continues; its key comes from the environment alone."""

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
    """The sinks that the configuration names."""
    makers: dict[str, Callable[[], Sink]] = {}
    if config.tensorboard.enabled:
        makers["TensorBoard"] = lambda: TensorBoard(directory / "tensorboard")
    if config.wandb.enabled:
        chosen, table = config.wandb, config.model_dump(mode="json")
        makers["W&B"] = lambda: WeightsAndBiases(run, directory, project=chosen.project, mode=chosen.mode, config=table)
    return Sinks(makers, notify)


class Sinks:
    """Several sinks, each for itself."""

    def __init__(self, makers: Mapping[str, Callable[[], Sink]], notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._open: dict[str, Sink] = {}
        for name, make in makers.items():
            self._try(name, lambda name=name, make=make: self._open.update({name: make()}))  # type: ignore[misc]

    def write(self, line: Line, *, new: bool) -> None:
        """Give all of them a moment's values."""
        for name, sink in list(self._open.items()):
            self._try(name, lambda sink=sink: sink.write(line, new=new))  # type: ignore[misc]

    def close(self) -> None:
        """Close all of them."""
        for name, sink in list(self._open.items()):
            self._try(name, sink.close)
        self._open.clear()

    def _try(self, name: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # foreign libraries, with errors of no common type: a run never ends because of them
            self._open.pop(name, None)
            cause = f"{error.name} is not installed" if isinstance(error, ModuleNotFoundError) else " ".join(str(error).split())[:200]
            self._notify(f"{name} gets no more points ({cause or type(error).__name__}); metrics.jsonl has all of them")
