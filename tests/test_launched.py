"""`penstock.launch` from a program: tables instead of a file, and a reward that is a function."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.launched import configured, spec_of
from penstock.pipeline.config.load import ConfigError
from penstock.pipeline.config.plugins import load
from tests.support.paths import ROOT

TABLES = {"run": {"steps": 3}, "model": {"path": "model"}, "data": {"source": "rows.jsonl"}}


def lengths(completions: list[str], **_: object) -> list[float]:
    """A reward."""
    return [float(len(text)) for text in completions]


def test_tables_are_a_configuration_with_paths_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = configured(TABLES, ["run.steps=5"], lengths)
    assert config.run.steps == 5
    assert config.model.path == str(tmp_path / "model")
    assert config.data.source == str(tmp_path / "rows.jsonl")
    assert config.reward.functions == [f"{Path(__file__).resolve()}:lengths"]
    assert TABLES["run"] == {"steps": 3}
    with pytest.raises(ConfigError, match="unknown key"):
        configured({**TABLES, "run": {"stepps": 3}}, [], None)


def test_a_function_of_the_main_program_is_written_down_with_its_source(tmp_path: Path) -> None:
    program = tmp_path / "notebook.py"
    program.write_text(
        "from penstock.launched import spec_of\ndef one(completions, **_):\n    return [1.0] * len(completions)\nprint(spec_of(one))\n"
    )
    command = [sys.executable, str(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=True, env=environment(tmp_path))
    spec = done.stdout.strip()
    assert spec.startswith(f"{tmp_path}/home/functions/")
    assert load(spec)(["a", "b"]) == [1.0, 1.0]


def environment(tmp_path: Path) -> dict[str, str]:
    """That of this process, with a state directory of its own."""
    return {**os.environ, "PENSTOCK_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}


def test_a_function_that_no_file_can_hold_is_refused_in_one_line() -> None:
    def inner(completions: list[str]) -> list[float]:
        return [0.0 for _ in completions]

    for function in (inner, lambda completions: completions, len):
        with pytest.raises(ConfigError, match="reward: "):
            spec_of(function)
