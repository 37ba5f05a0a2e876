"""The command line that the benchmarks start, as a user has it: in this interpreter, from this repository."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PENSTOCK = [sys.executable, "-c", "import sys; from penstock.pipeline.cli import main; sys.exit(main(sys.argv[1:]))"]


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
