"""Fault points: nothing without the variable, a death at the right passing with it, and a clear no to a wrong name."""

import os
import re
import subprocess
import sys

import pytest

from penstock.infra.faults import POINTS, VARIABLE, Fault, parse
from tests.support.paths import ROOT


def passings(fault: str | None) -> subprocess.CompletedProcess[str]:
    """A process that passes a point three times and another one once, and says how far it came."""
    code = """
from penstock.infra.faults import reach
for i in range(3):
    reach("ledger.step.before")
    print(i)
reach("chunk.sent")
print("end")
"""
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE} | ({} if fault is None else {VARIABLE: fault})
    return subprocess.run([sys.executable, "-u", "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_process_dies_at_the_passing_that_is_named_and_at_no_other() -> None:
    assert passings(None).stdout.split() == ["0", "1", "2", "end"]
    third = passings("ledger.step.before:3")
    assert (third.returncode, third.stdout.split()) == (-9, ["0", "1"])
    assert third.stderr == "fault point ledger.step.before: killing this process\n"
    assert passings("ledger.step.before:4").returncode == 0
    assert (passings("chunk.sent").returncode, passings("chunk.sent").stdout.split()) == (-9, ["0", "1", "2"])


def test_what_names_no_point_is_an_error_and_not_a_run_without_faults() -> None:
    assert parse("chunk.sent:2") == Fault(name="chunk.sent", passes=2)
    for wrong in ("ledger.step.befor", "", "chunk.sent:0", "chunk.sent:x", "chunk.sent:-1"):
        with pytest.raises(ValueError, match=VARIABLE):
            parse(wrong)
    assert "unknown fault point 'nothing'" in passings("nothing").stderr


def test_every_point_that_the_code_names_is_listed() -> None:
    files = [file for layer in ("infra", "pipeline", "workers") for file in (ROOT / layer).rglob("*.py")]
    named = {name for file in files for name in re.findall(r'faults\.reach\("([^"]+)"\)', file.read_text(encoding="utf-8"))}
    assert named == {name for name in POINTS if not name.startswith("ledger.")}
