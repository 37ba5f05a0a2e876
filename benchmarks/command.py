"""The command line that the benchmarks start, as a user has it: in this interpreter, from this repository."""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.infra.paths import run_directory

PENSTOCK = [sys.executable, "-c", "import sys; from penstock.pipeline.cli import console; sys.exit(console())"]

NOTHING_BESIDE = ("trainer.checkpoint_every=0", "trainer.export=false", "mlflow.enabled=false", "eval.every=1000000", "eval.limit=1")
"""Settings of a run that does nothing but draw and train."""


@contextmanager
def launched(config: str, run: str, settings: Sequence[str], output: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """`penstock run` with its output in a file; stopped in an orderly way when the block is left early."""
    command = [*PENSTOCK, "run", config, "--plain", "--run-id", run, *settings]
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(120)


def report_of(config: str, run: str, settings: Sequence[str]) -> dict[str, Any]:
    """The report of a whole run with these settings (KEY=VALUE). Raises `SystemExit` with the run's own words when it fails."""
    words = [word for setting in settings for word in ("--set", setting)]
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "output"
        with launched(config, run, words, output) as process:
            process.wait()
        if process.returncode:
            raise SystemExit(output.read_text(errors="replace")[-2000:])
    report: dict[str, Any] = json.loads((run_directory(run) / "report.json").read_text())
    return report
