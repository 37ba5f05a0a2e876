"""`python -m benchmarks`: its names, their help, and refusals."""

import importlib
from pathlib import Path

import pytest

from benchmarks.__main__ import main, names, summary

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"at_unchanged_weights", "learning_curves", "speed bare_loop", "speed contention", "speed vllm"}
"""They import torch before they parse their options."""
COMMANDS = [" ".join(filter(None, [name, choice])) for name, (_, choices) in names().items() for choice in choices or [""]]


def test_there_are_at_most_25_names_and_each_has_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 < len(names()) <= 25
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == sorted(names())
    assert all(len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize("command", [pytest.param(name, marks=[pytest.mark.costly] * (name in HEAVY)) for name in COMMANDS])
def test_help_is_the_docstring(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main([*command.split(), "--help"])
    except SystemExit as ended:
        status = ended.code
    assert status == 0
    module = importlib.import_module(f"benchmarks.{command.replace(' ', '.')}")
    assert (module.__doc__ or "").splitlines()[0] in capsys.readouterr().out


def test_a_folder_lists_its_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hostile"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["hostile", "children"], ["hostile", "run"]]


@pytest.mark.parametrize(
    ("words", "message"), [(["x"], "unknown name x; "), (["hostile", "x"], "unknown name hostile x; expected hostile")]
)
def test_an_unknown_name_is_one_line_and_status_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"benchmarks: {message}") and captured.err.count("\n") == 1


def test_no_folder_of_benchmarks_is_wider_than_28_names() -> None:
    folders = [path for path in (ROOT / "benchmarks").rglob("*") if path.is_dir() and path.name != "__pycache__"]
    for folder in [ROOT / "benchmarks", *folders]:
        assert sum(path.name != "__pycache__" for path in folder.iterdir()) <= 28
    assert all(len(summary(path)) <= 140 for path, _ in names().values())
