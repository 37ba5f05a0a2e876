"""Options of all commands, and connections to the broker they name. Results go to stdout, messages to stderr."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from penstock.pipeline.runtime.reporting.log_lines import print_json

if TYPE_CHECKING:
    from penstock.infra.kafka.log import KafkaLog
    from penstock.infra.log import Log
    from penstock.pipeline.config.load import Config

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run id, a unique prefix of one, or `latest`.")]
RunOrFolder = Annotated[
    str, typer.Argument(metavar="RUN|DIR", help="A run id, a unique prefix of one, `latest`, or a folder that `topics export` wrote.")
]
Bootstrap = Annotated[
    str, typer.Option(metavar="HOST:PORT", envvar="PENSTOCK_BOOTSTRAP", help="A Kafka broker; `embedded` is this machine's own.")
]
Security = Annotated[
    list[str] | None,
    typer.Option(
        "--security",
        metavar="KEY=VALUE",
        help="Kafka client setting such as sasl_mechanism=PLAIN; repeatable. Passwords in PENSTOCK_SECURITY only, a JSON object.",
    ),
]
TrustCode = Annotated[
    bool, typer.Option("--trust-code", help="Load the run's own advantage function, code that the log names and anybody may have written.")
]
TrustRun = Annotated[
    bool, typer.Option("--trust-code", help="Run the code that the run names although no key on this machine has signed it.")
]
RunId = Annotated[
    str | None, typer.Option("--run-id", help="Id of the new run: a-z, 0-9 and '-', at most 64, no '-' first. Made up if absent.")
]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file; see docs/reference/configuration.md.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override one key of the configuration; repeatable.")]
OUTAGE_TIMEOUT_S = 60.0
"""How long a command waits for an unreachable broker; workers wait `kafka.give_up_s`."""


def loaded(config: Path | str, overrides: list[str] | None = None) -> "Config":
    """The configuration in a file, with this machine's defaults."""
    from penstock.infra.backends.hardware import this_cpu, visible_gpus
    from penstock.pipeline.config.load import load

    return load(config, overrides or [], gpus=len(visible_gpus()), cpu=this_cpu())


def notify(text: str) -> None:
    """Print a message that is not part of the result."""
    print(text, file=sys.stderr, flush=True)


def emit(value: object) -> None:
    """Print a result as JSON; a dataclass becomes an object of its fields."""
    text = json.dumps(value, indent=2, default=lambda item: asdict(item) if is_dataclass(item) else str(item))  # type: ignore[arg-type]
    print_json(text)


@contextmanager
def connected(
    bootstrap: str, security: Mapping[str, str], *, attends: bool = False, start: bool = True, wait_s: float = 0.0
) -> Iterator["KafkaLog"]:
    """A log at this broker, waited for `wait_s`; `attends`: the run's view reports outages, not the log.

    Without `start`, an embedded broker is not started.
    """
    from penstock.pipeline.launch.broker_keeper import connect

    log = connect(bootstrap, security, notify=notify, start=start, wait_s=wait_s)
    if not attends:
        log.wait_out(OUTAGE_TIMEOUT_S, notify=notify)
    try:
        yield log
    finally:
        log.close()


def at(bootstrap: str, security: list[str] | None, *, attends: bool = False, start: bool = False) -> AbstractContextManager["KafkaLog"]:
    """A log at the broker of the command line, closed at the end; only with `attends` or `start` is this machine's own started."""
    from penstock.pipeline.config.security import security_settings

    return connected(bootstrap, security_settings(security), attends=attends, start=start or attends)


@contextmanager
def on_broker(run: str, bootstrap: str, security: list[str] | None, *, executes: bool = False) -> Iterator[tuple["KafkaLog", str]]:
    """The log at the broker, and the run's id; if the command `executes` the run's code, `latest` is this user's."""
    from penstock.pipeline.runtime.registration.run_registry import resolve

    with at(bootstrap, security) as log:
        yield log, resolve(log, run, executes=executes)


@contextmanager
def reading(run: str, bootstrap: str, security: list[str] | None, *, executes: bool = False) -> Iterator[tuple["Log", str]]:
    """The log of an archived folder, or else as `on_broker`; and the run's id."""
    if "/" in run or Path(run).is_dir():
        from penstock.pipeline.archive.archived_log import open_archive

        if (archived := open_archive(run)) is not None:
            yield cast("Log", archived), archived.run
            return
    with on_broker(run, bootstrap, security, executes=executes) as opened:
        yield opened


def refuse_folder(log: "Log", what: str) -> None:
    """Raise `ConfigError` if the log is an archive: `what` needs a broker."""
    from penstock.infra.errors import ConfigError
    from penstock.pipeline.archive.archived_log import ArchivedLog

    if isinstance(log, ArchivedLog):
        raise ConfigError(f"{what} needs a broker; import the run first: penstock topics import {log.archive.path}")


def group_numbers(text: str | None) -> list[int]:
    """The groups of `--without GROUP,GROUP`. Raises `ConfigError`."""
    from penstock.infra.errors import ConfigError

    words = text.split(",") if text is not None else []
    if not all(word.strip().isdecimal() for word in words):
        raise ConfigError(f"--without {text}: expected numbers of groups, separated by commas")
    return [int(word) for word in words]
