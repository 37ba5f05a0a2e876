"""Command lines of Penstock and of the benchmarks, the processes that run them, and whole runs."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.infra.broker import embedded
from penstock.infra.broker.embedded import BrokerInfo
from penstock.infra.paths import run_directory

ROOT = Path(__file__).resolve().parents[2]
PENSTOCK = [sys.executable, "-c", "import sys; from penstock.pipeline.cli import console; sys.exit(console())"]
WORKER = [sys.executable, "-m", "penstock.workers"]

REPORT = "report.json"
TRAINING_ONLY = ("trainer.checkpoint_every=0", "trainer.export=false", "mlflow.enabled=false", "eval.source=")
"""Settings of a run that only generates and trains."""


def command_of(module: str) -> list[str]:
    """Command line of a benchmark by its module's name; it needs the repository's root as working directory."""
    return [sys.executable, "-m", *module.split(".")]


def parser_of(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Parser of a benchmark's options; its help is the module's docstring."""
    program = f"python -m {module.replace('.', ' ')}"
    return argparse.ArgumentParser(prog=program, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def run_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Parser with a configuration file and `--set KEY=VALUE`."""
    parser = parser_of(module, doc)
    parser.add_argument("config")
    with_settings(parser)
    return parser


def with_settings(parser: argparse.ArgumentParser) -> None:
    """Add `--set KEY=VALUE`."""
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")


def with_numbers(parser: argparse.ArgumentParser, **defaults: float) -> None:
    """Add an option for each name; its type is that of its default."""
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)


def set_words(settings: Iterable[str]) -> list[str]:
    """`--set KEY=VALUE` for each setting."""
    return [word for setting in settings for word in ("--set", setting)]


@contextmanager
def own_broker(name: str, home: Path | None = None) -> Iterator[tuple[Path, BrokerInfo]]:
    """A broker in a state directory of its own: `home`, which stays, or a temporary one."""
    with tempfile.TemporaryDirectory(prefix=f"penstock-{name}-") as temporary:
        directory = home or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        os.environ["PENSTOCK_HOME"] = str(directory)
        try:
            yield directory, embedded.start(home=directory)
        finally:
            embedded.stop(directory)


@contextmanager
def processes(commands: Mapping[str, Sequence[str]], folder: Path) -> Iterator[dict[str, "subprocess.Popen[bytes]"]]:
    """Processes by name, each with its output in `folder`/NAME.txt; terminated at the end of the block."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            with (folder / f"{name}.txt").open("wb") as output:
                started[name] = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        yield started
    finally:
        for process in started.values():
            process.terminate()
        for process in started.values():
            process.wait(120)


def failed(what: str, output: Path) -> SystemExit:
    """Ends the benchmark with the last lines of a process's output."""
    return SystemExit(f"{what}; the end of {output}:\n{output.read_text(errors='replace')[-2000:]}")


def penstock_json(*words: str) -> Any:
    """What a `penstock` command prints as JSON. Raises `SystemExit` with the end of its messages if it fails."""
    done = subprocess.run([*PENSTOCK, *words, "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout)


@contextmanager
def launched(config: str, run: str, settings: Sequence[str], output: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """`penstock run` with its output in a file; leaving the block early stops it and waits."""
    command = [*PENSTOCK, "run", config, "--plain", "--run-id", run, *set_words(settings)]
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()  # SIGINT is ignored in the background of a shell
                process.wait(120)


def report_of(config: str, run: str, settings: Sequence[str]) -> dict[str, Any]:
    """Report of a whole run with these settings (KEY=VALUE). Raises `SystemExit` with the end of its output if it fails."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "output"
        with launched(config, run, settings, output) as process:
            process.wait()
        return read_report(run, output, process.returncode)


def read_report(run: str, output: Path, status: int | None) -> dict[str, Any]:
    """Report of a run that has ended with this status. Raises `SystemExit` with the end of its output if it failed."""
    if status:
        raise failed(f"run {run} ended with status {status}", output)
    report: dict[str, Any] = json.loads((run_directory(run) / REPORT).read_text())
    return report


def kept_report(run: str) -> dict[str, Any] | None:
    """Report of an earlier run of this name; None if there is none."""
    return read_report(run, Path(), 0) if (run_directory(run) / REPORT).exists() else None
