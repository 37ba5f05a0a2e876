"""Mutated inputs: a case follows from its number, and each is accepted or refused in one line that names a key or a row."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import mutated_inputs
from benchmarks.mutated_inputs import TABLE, case, toml

ROOT = Path(__file__).resolve().parents[2]


def test_a_case_follows_from_seed_and_number(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        case(7, tmp_path / folder, seed=3)
    assert {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()} == {
        file.name: file.read_bytes() for file in (tmp_path / "b").iterdir()
    }
    assert "[schedule]" in toml(TABLE)


def test_what_is_said_has_to_name_a_key_or_a_row() -> None:
    outcome = mutated_inputs._outcome
    assert outcome(0, "") == "accepted"
    assert outcome(1, "penstock: rows.jsonl:3: no field 'prompt'") == outcome(2, "penstock: run.steps = 0: too small") == "refused"
    assert outcome(1, "penstock: embedded null byte") == outcome(1, "") == "vague"
    assert outcome(1, "penstock: unexpected TypeError: x; repeat with --debug for a traceback") == "traceback"


@pytest.mark.slow
def test_cases_end_in_time_and_in_one_line() -> None:
    command = [sys.executable, "-m", "benchmarks", "mutated_inputs", "--count", "40", "--seed", "5", "--processes", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (ended.returncode, "0 traceback, 0 hang, 0 vague" in ended.stdout) == (0, True), ended.stdout + ended.stderr
