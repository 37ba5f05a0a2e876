"""Options shared by commands, and connections to the broker that the options name. Results go to stdout, messages to stderr."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
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
    str,
    typer.Option(
        metavar="HOST:PORT", envvar="PENSTOCK_BOOTSTRAP", help="Address of a Kafka broker; `embedded` is the broker of this machine."
    ),
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
    bool,
    typer.Option("--trust-code", help="Execute the run's custom advantage function, which anyone with access to the log may have set."),
]
TrustRun = Annotated[
    bool, typer.Option("--trust-code", help="Execute code that the run's configuration names, although no key here has signed the run.")
]
RunId = Annotated[
    str | None,
    typer.Option("--run-id", help="Id of the new run: at most 64 of a-z, 0-9 and '-', not starting with '-'; default: generated."),
]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file; see docs/reference/configuration.md.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override one key of the configuration; repeatable.")]
OUTAGE_TIMEOUT_S = 60.0
"""How long a command waits for an unreachable broker. Workers wait `kafka.give_up_s`."""


def loaded(config: Path | str, overrides: list[str] | None = None) -> "Config":
    """Load the configuration in a file, with the defaults for this machine's GPUs and CPU. Raises `ConfigError`."""
    from penstock.infra.backends.hardware import this_cpu, visible_gpus
    from penstock.pipeline.config.load import load

    return load(config, overrides or [], gpus=len(visible_gpus()), cpu=this_cpu())


def notify(text: str) -> None:
    """Print a message that is not part of the result."""
    print(text, file=sys.stderr, flush=True)


def emit(value: object) -> None:
    """Print a result as JSON; dataclasses are converted to objects."""
    text = json.dumps(value, indent=2, default=lambda item: asdict(item) if is_dataclass(item) else str(item))  # type: ignore[arg-type]
    print_json(text)


@contextmanager
def connected(
    bootstrap: str, security: Mapping[str, str], *, attends: bool = False, start: bool = True, wait_s: float = 0.0
) -> Iterator["KafkaLog"]:
    """Connect to a broker for the duration of a `with` block; wait up to `wait_s` for one that does not respond yet.

    `start` allows starting this machine's embedded broker. `attends` is for a command that starts workers: it outlasts any outage of the
    broker, which the run's view reports; other commands wait at most `OUTAGE_TIMEOUT_S`.
    """
    from penstock.pipeline.launch.broker_keeper import connect

    with closing(connect(bootstrap, security, notify=notify, start=start, wait_s=wait_s)) as log:
        if not attends:
            log.wait_out(OUTAGE_TIMEOUT_S, notify=notify)
        yield log


def at(bootstrap: str, security: list[str] | None, *, attends: bool = False, start: bool = False) -> AbstractContextManager["KafkaLog"]:
    """Connect to the broker that the options `--bootstrap` and `--security` name; see `connected`. `attends` implies `start`."""
    from penstock.pipeline.config.security import security_settings

    return connected(bootstrap, security_settings(security), attends=attends, start=start or attends)


@contextmanager
def on_broker(run: str, bootstrap: str, security: list[str] | None, *, executes: bool = False) -> Iterator[tuple["KafkaLog", str]]:
    """Connect to the broker and yield (log, run id) for a run id, a unique prefix or `latest`. Raises `ConfigError` for an unknown run.

    `executes` is for commands that execute the run's code: `latest` is then the latest run of this user.
    """
    from penstock.pipeline.runtime.registration.run_registry import resolve

    with at(bootstrap, security) as log:
        yield log, resolve(log, run, executes=executes)


@contextmanager
def reading(run: str, bootstrap: str, security: list[str] | None, *, executes: bool = False) -> Iterator[tuple["Log", str]]:
    """Yield (log, run id) for an exported directory or, like `on_broker`, for a run on the broker."""
    if "/" in run or Path(run).is_dir():
        from penstock.pipeline.archive.archived_log import open_archive

        if (archived := open_archive(run)) is not None:
            yield cast("Log", archived), archived.run
            return
    with on_broker(run, bootstrap, security, executes=executes) as opened:
        yield opened


def refuse_folder(log: "Log", what: str) -> None:
    """Raise `ConfigError` if the log is an exported directory, because the option `what` needs a broker."""
    from penstock.infra.errors import ConfigError
    from penstock.pipeline.archive.archived_log import ArchivedLog

    if isinstance(log, ArchivedLog):
        raise ConfigError(f"{what} needs a broker; import the run first: penstock topics import {log.archive.path}")


def group_numbers(text: str | None) -> list[int]:
    """Parse the argument of `--without GROUP,GROUP`. Raises `ConfigError`."""
    from penstock.infra.errors import ConfigError

    words = text.split(",") if text is not None else []
    if not all(word.strip().isdecimal() for word in words):
        raise ConfigError(f"--without {text}: expected group numbers separated by commas, such as 17,23")
    return [int(word) for word in words]
