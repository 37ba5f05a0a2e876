"""An export that an earlier version wrote (`tests/data/archive_format_1`): four steps of a toy run, exported on 2026-11-22."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline.archive.files import find_archive
from penstock.pipeline.archive.import_run import import_run
from penstock.pipeline.cli import main
from penstock.pipeline.inspect.audit.kafka_reader import KafkaSource
from penstock.pipeline.inspect.audit.report import audit
from penstock.pipeline.inspect.report.summary import collect
from tests.support.bare_clients import c_client
from tests.support.paths import ROOT

DIR = ROOT / "tests" / "data" / "archive_format_1"
DIGEST = "3a4a807613e72f8fa5f6db8d372397588b793ca691af562ba34ba6394ac6dbee"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.costly  # scores in a child process
def test_every_reading_command_takes_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(DIR / "old")
    assert json.loads(printed(capsys, "report", folder, "--json"))["steps"] == 4
    assert "audit: clean, 8 groups, 4 steps, 5 versions" in printed(capsys, "audit", folder)
    assert "group 3 of run old: trained" in printed(capsys, "explain", folder, "3")
    assert "rollouts        2 partitions         32 offsets" in printed(capsys, "topics", "list", folder)
    assert len(printed(capsys, "topics", "tail", folder, "ledger", "-n", "2").splitlines()) == 2
    assert "prompt_ids" in printed(capsys, "topics", "show", folder, "groups", "0", "0")
    steps = json.loads(printed(capsys, "sql", folder, "select step, digest from steps", "--json"))
    assert [step["step"] for step in steps] == [0, 1, 2, 3] and steps[-1]["digest"] == DIGEST
    assert "8 of 8 groups scored again" in printed(capsys, "replay", "score", folder, "--reward", "exact_match")
    with penstock.open(folder) as run:
        assert (run.id, run.samples().num_rows, run.groups().num_rows, run.steps().num_rows) == ("old", 32, 8, 4)


@pytest.mark.costly
@pytest.mark.slow
def test_its_steps_are_trained_again_bit_for_bit_where_the_processor_multiplies_as_the_recording_one_did() -> None:
    command = [sys.executable, "-m", "penstock", "replay", "train", str(DIR), "--model", str(DIR / "model")]
    # Recorded on a CPU without AVX512: torch computes the same bits on a wider one when it is told to. The library that multiplies
    # matrices chooses by the processor itself, so that on some the last bits of the first step differ, and nothing else.
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    if "hardware or libraries differ from the run's" in done.stderr:
        pytest.skip(f"this machine cannot compute as the recording one did: {done.stderr}")
    same = f"old: all 4 steps are bit-identical, 4 weight digests compared; weights {DIGEST[:16]}" in done.stdout
    if same or "avx512f" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        assert same, done.stdout
        return
    assert "old: step 0 is the first that differs: the same groups give other numbers" in done.stdout, done.stdout + done.stderr
    differences = [float(number) for number in re.findall(r"by (\S+) at most", done.stdout)]
    assert differences and max(differences) < 1e-7, done.stdout  # weights are below 1, where float32 steps by up to 6e-8


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["topics", "show", str(DIR), "groups", "5", "0"], "old.groups has no partition 5: its partitions are 0 to 1"),
        (["topics", "show", str(DIR), "groups", "0", "9999"], "has no record at offset 9999"),
        (["topics", "tail", str(DIR), "groups", "--follow"], "--follow needs a broker; import the run first: penstock topics import"),
        (["replay", "score", str(DIR), "--write", "new"], "--write needs a broker; import the run first: penstock topics import"),
        (["report", str(DIR / "model")], "is not an export"),
    ],
)
def test_what_an_archive_cannot_give_is_one_line_and_wrong_usage(capsys: pytest.CaptureFixture[str], words: list[str], line: str) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert line in said and said.count("\n") == 1


def test_its_import_gives_the_same_report_and_a_clean_audit(log: KafkaLog, broker: str, run_id: str) -> None:
    import_run(log, find_archive(DIR), becomes=run_id)
    report = collect(log, run_id)
    assert (report["steps"], report["samples"], report["versions"]) == (4, 32, 4)
    judged = audit(KafkaSource(broker, run_id, settings=c_client(broker)))
    assert judged.clean, judged
