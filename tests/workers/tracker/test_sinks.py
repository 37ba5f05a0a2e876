"""A run's points in TensorBoard and in Weights & Biases: those of `metrics.jsonl`, under the same names."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.paths import run_directory
from penstock.pipeline.inspect.metrics import Line
from penstock.workers.tracker import worker as tracker
from penstock.workers.tracker.metrics_file import Sinks, sinks
from tests.support import page_records
from tests.support.a_run import RecordBuilder
from tests.support.number_run import RUN, config_of, log_with, session_of

pytestmark = pytest.mark.costly


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "CLOSED_S", 0.1)
    shutil.rmtree(run_directory(RUN), ignore_errors=True)


def told_and_tracked(**sections: Any) -> tuple[Path, list[dict[str, Any]]]:
    """A finished run of three steps, tracked; its folder and the lines of its `metrics.jsonl`."""
    log, builder = log_with(), RecordBuilder(RUN, steps=3)
    page_records.write(log, [builder.made(), *whole_run(builder)])
    session = session_of(log, config_of(None, **sections), role="tracker")
    tracker.main(session)
    directory = run_directory(RUN)
    return directory, [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def whole_run(builder: RecordBuilder) -> list[Any]:
    records = [builder.entry("run-opened")]
    for step in range(3):
        records.append(builder.entry("step", step=step, version=step, metrics={"loss": 0.5 * step, "reward_std": 0.25}))
    return [*records, builder.entry("run-closed", details=json.dumps({"status": "finished"}))]


def points_of(lines: list[dict[str, Any]]) -> Counter[tuple[str, int, float]]:
    rows = [line for line in lines if line["kind"] == "step"]
    return Counter((name, row["step"], round(value, 5)) for row in rows for name, value in row.items() if name.startswith("train/"))


def test_tensorboard_reads_back_every_point_also_after_a_restart() -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):  # a second tracker of the run writes the file anew
        directory, lines = told_and_tracked(tensorboard={"enabled": True})
        events = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0})
        events.Reload()
        found = Counter((tag, event.step, round(event.value, 5)) for tag in events.Tags()["scalars"] for event in events.Scalars(tag))
        wanted = points_of(lines)
        assert wanted and {point: found[point] for point in wanted} == wanted


def test_weights_and_biases_gets_every_point_without_a_network() -> None:
    wandb = pytest.importorskip("wandb")
    directory, lines = told_and_tracked(wandb={"enabled": True, "mode": "offline"})
    wandb.teardown()  # as at a tracker's end: the library's process may still be writing after a run's end
    (file,) = (directory / "wandb").glob("offline-run-*/run-numbers.wandb")
    rows = history(file.read_bytes())
    wanted = points_of(lines)
    found = points_of([{**row, "kind": "step", "step": row["optimizer_step"]} for row in rows if "optimizer_step" in row])
    assert wanted and found == wanted


def history(data: bytes) -> list[dict[str, Any]]:
    """The logged rows of a W&B file: records in the frames of LevelDB's log, 7 bytes of header in each block of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows, at, held = [], 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        held, at = held + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # a whole frame, or the last of several
            record = Record.FromString(held)
            held = b""
            if record.HasField("history"):
                rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
    return rows


def test_a_sink_that_fails_is_left_alone_and_says_so_once() -> None:
    said: list[str] = []

    class Broken:
        def write(self, line: Line, *, new: bool) -> None:
            raise ConnectionError("the server\nis gone")

        def close(self) -> None:
            raise AssertionError("never reached")

    held = Sinks({"a sink": Broken}, said.append)
    line = Line(source="ledger", number=0, kind="step", timestamp_ms=0, step=0, values={})
    held.write(line, new=True)
    held.write(line, new=True)
    held.close()
    assert said == ["a sink receives no more metrics (the server is gone); metrics.jsonl contains all of them"]


def test_without_configuration_there_is_no_sink(tmp_path: Path) -> None:
    said: list[str] = []
    sinks(config_of(), RUN, tmp_path, notify=said.append).close()
    assert said == [] and list(tmp_path.iterdir()) == []
