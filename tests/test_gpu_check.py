"""`make gpu-check`: each line runs to its end on a CPU, and one that fails, dies or takes too long ends alone."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from penstock.gpu_check.__main__ import main
from penstock.gpu_check.figures import Figure
from penstock.gpu_check.lines import LINES, outcome_of

pytestmark = pytest.mark.costly


HEAVY = ("run", "colocated", "vllm")
"""Lines that launch a run of processes or vLLM's: minutes of a busy CPU."""


@pytest.mark.timeout(660)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in HEAVY else name for name in LINES])
def test_each_line_runs_on_a_cpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LINES, name, (LINES[name][0], 600))  # its limit is of an idle machine
    outcome = outcome_of(name, folder=str(tmp_path), device="cpu", context=multiprocessing.get_context("forkserver"))
    log = tmp_path / f"{name}.log"
    assert outcome.status in ("ok", "skip"), f"{outcome}\n{log.read_text() if log.exists() else ''}"


def test_all_figures_are_written_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--only", "machine", "--json", str(tmp_path / "figures.json")]) == 0
    report = json.loads((tmp_path / "figures.json").read_text())
    assert report["lines"][0]["figures"][0]["name"] == "CPU cores"
    assert "1 passed, 0 failed, 0 skipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("limits", "value", "holds"),
    [({}, 1.0, True), ({"at_least": 2.0}, 1.0, False), ({"at_most": 0.0}, 1.0, False), ({"at_most": 1.0}, float("nan"), False)],
)
def test_a_figure_holds_within_its_limits(limits: dict[str, Any], value: float, holds: bool) -> None:
    assert Figure(name="rate", value=value, **limits).holds == holds


def test_a_line_beyond_its_time_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LINES, "roofs", ("machine", 0))
    outcome = outcome_of("roofs", folder=str(tmp_path), device="cpu", context=multiprocessing.get_context("forkserver"))
    assert (outcome.status, outcome.reason) == ("fail", "ended after 0 s")
