"""`penstock run` as a process of a test."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.pipeline.config.load import to_json
from penstock.pipeline.config.run_config import Config
from tests.support.children import child


def toml_of(config: Config, directory: Path) -> Path:
    """The configuration as a file that `penstock run` reads."""
    file = directory / "run.toml"
    lines = []
    for section, values in json.loads(to_json(config)).items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items() if value not in (None, {})]
    file.write_text("\n".join(lines) + "\n")
    return file


@contextmanager
def launched(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """`penstock run ...` as a process of its own; it is ended with the block."""
    command = [sys.executable, "-c", "import sys; from penstock.pipeline.cli import main; sys.exit(main(sys.argv[1:]))", "run", *arguments]
    with child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(60)


def pids(home: Path, run: str) -> dict[str, int]:
    """The launcher's worker processes."""
    return json.loads((home / "runs" / run / "workers.json").read_text())["workers"]
