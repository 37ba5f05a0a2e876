"""The command line `penstock`: commands, error messages and exit status (0 success, 1 failure, 2 wrong usage, 130 interrupted)."""

import contextlib
import gc
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from penstock.infra.errors import ConfigError, PenstockError
from penstock.infra.sandbox.secrets import hide_secrets
from penstock.infra.sandbox.signals import keep_ignored_here
from penstock.pipeline.cli.inspect import audit, graph, logs, report, sql, status, stop, ui
from penstock.pipeline.cli.inspect import explain as explain_group
from penstock.pipeline.cli.machine import app as broker_app
from penstock.pipeline.cli.machine import doctor
from penstock.pipeline.cli.machine import models as model_app
from penstock.pipeline.cli.replay import app as replay_app
from penstock.pipeline.cli.replay import bisect, regrade
from penstock.pipeline.cli.runs import app as runs_app
from penstock.pipeline.cli.runs import card, verify
from penstock.pipeline.cli.slurm import sbatch
from penstock.pipeline.cli.topics import app as topics_app
from penstock.pipeline.cli.train import check, create, fork, init, plan, run, worker
from penstock.pipeline.launch.shutdown import silence
from penstock.pipeline.runtime.reporting.log_lines import VisibleStream, visible_errors

SYNONYMS = {
    "resume": "run --resume RUN",
    "train": "run CONFIG",
    "start": "run CONFIG",
    "list": "runs",
    "ls": "runs",
    "rm": "runs rm RUN",
    "delete": "runs rm RUN",
    "kill": "stop RUN",
    "compare": "ui --compare RUN --compare RUN",
}

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
COMPLETE = "_PENSTOCK_COMPLETE"
"""Environment variable by which a shell requests completions of a command line."""
GC_OBJECTS = 20_000
"""New objects between two garbage collections. At Python's default of 700, collections during imports take 0.1 s."""


class Grouped(typer.core.TyperGroup):
    """Command group whose help lists the commands under headings, in the order in which they were added."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands of each heading; Typer calls this for the help."""
        lists: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.commands[name]
            lists.setdefault(command.rich_help_panel, []).append((name, command.short_help))
        for heading, rows in lists.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


app = typer.Typer(
    name="penstock",
    cls=Grouped,
    help="RL post-training of language models as independent workers over Apache Kafka.",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
TRAIN, INSPECT, REPLAY, MACHINE = "Train", "Inspect a run", "Replay", "This machine"
app.command(rich_help_panel=TRAIN, short_help="Write a configuration for a model, data and reward.")(init)
app.command(rich_help_panel=TRAIN, short_help="Validate a configuration; generate the samples of a step.")(check)
app.command(rich_help_panel=TRAIN, short_help="Run everything on this machine: broker, workers, live view, report.")(run)
app.command(rich_help_panel=TRAIN, short_help="Register a run and create its topics; start nothing.")(create)
_ARGPARSE = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
app.command(rich_help_panel=TRAIN, short_help="Run one worker of a run, on any machine.", context_settings=_ARGPARSE)(worker)
app.command(rich_help_panel=TRAIN, short_help="Print the script of a Slurm job that runs a configuration.")(sbatch)
app.command(rich_help_panel=TRAIN, short_help="Stop a run of this machine; it can be resumed.")(stop)
app.command(rich_help_panel=TRAIN, short_help="Simulate splits of machines between rollout and training.")(plan)
app.add_typer(runs_app, name="runs", rich_help_panel=INSPECT, short_help="List the runs; `runs rm` removes some.")
app.command(rich_help_panel=INSPECT, short_help="Progress of a run and activity of each worker.")(status)
app.command(rich_help_panel=INSPECT, short_help="Show runs in a browser: live, compared, in SQL.")(ui)
app.command(rich_help_panel=INSPECT, short_help="Print the logs of a run's workers; -f follows.")(logs)
app.command(rich_help_panel=INSPECT, short_help="Report on a run as text or HTML: reward, groups, staleness, time.")(report)
app.command(rich_help_panel=INSPECT, short_help="Verify from the log that nothing was lost or trained twice.")(audit)
app.command(rich_help_panel=INSPECT, short_help="Write a model card and a provenance statement.")(card)
app.command(rich_help_panel=INSPECT, short_help="Verify a model: its files, its run's log, recomputed steps.")(verify)
app.command("explain", rich_help_panel=INSPECT, short_help="Trace one group: samples, rewards, status.")(explain_group)
app.command(rich_help_panel=INSPECT, short_help="Query a run in SQL.")(sql)
app.add_typer(topics_app, name="topics", rich_help_panel=INSPECT, short_help="List, show, export, import and delete records.")
app.command(rich_help_panel=INSPECT, short_help="List the roles and the topics each reads and writes.")(graph)
app.command(rich_help_panel=REPLAY, short_help="Start a new run from another run's weights.")(fork)
app.command(rich_help_panel=REPLAY, short_help="Find the step and the groups that spoiled a run.")(bisect)
app.command(rich_help_panel=REPLAY, short_help="Score a run with another reward, and train on it again.")(regrade)
app.add_typer(replay_app, name="replay", rich_help_panel=REPLAY, short_help="Repeat a stage, unchanged or with a change.")
app.add_typer(broker_app, name="broker", rich_help_panel=MACHINE, short_help="Start, run, stop and check this machine's Kafka broker.")
app.add_typer(model_app, name="model", rich_help_panel=MACHINE, short_help="Make a small model.")
app.command(rich_help_panel=MACHINE, short_help="Check packages, Java, broker, disk, memory, GPUs.")(doctor)


def _version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        print(f"penstock {version('penstock-rl')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; anywhere on the line.")] = False,
) -> None:
    """Options of every command."""


def console() -> int:
    """Entry point of the script `penstock`: run the command in `sys.argv` and return the exit status."""
    keep_ignored_here()
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # the kernel withholds it from a container's first process
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    hide_secrets()
    gc.set_threshold(GC_OBJECTS)
    status = main()
    if "duckdb" not in sys.modules:  # DuckDB reports its uncollected objects on stderr at exit
        gc.freeze()  # makes the interpreter exit faster: it does not visit the libraries' objects
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, report an error in one line, and return the exit status."""
    closed = open_closed()
    with visible_errors():
        words = list(sys.argv[1:] if arguments is None else arguments)
        debug = "--debug" in words
        try:
            if closed:
                refuse_unseen(words)
            with checked_output():
                return _invoke([word for word in words if word != "--debug"])
        except KeyboardInterrupt:
            return INTERRUPTED
        except BrokenPipeError:
            # The reader has closed the pipe: the interpreter must not flush to it on exit.
            silence(sys.stdout)
            return OK
        except Exception as error:  # every error is reported in one line
            if debug:
                traceback.print_exc()
            message, exit_status = explain(error)
            if message:
                print(f"penstock: {message}", file=sys.stderr)
            return exit_status


def _invoke(words: list[str]) -> int:
    """Let Typer run the command in `words` and return its exit status; a request for completions exits here."""
    command = typer.main.get_command(app)
    if COMPLETE in os.environ:
        command.main(words, prog_name="penstock")  # exits
    try:
        with command.make_context("penstock", words or ["--help"]) as context:
            return int(command.invoke(context) or OK)
    except typer.Exit as ended:
        return ended.exit_code


def explain(error: Exception) -> tuple[str, int]:
    """Return the one-line message and the exit status for an error."""
    if isinstance(error, typer.Abort):
        return "aborted", FAILED
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "penstock"
        message = _line(error.format_message())
        return f"{_with_synonym(message)} (see `{command} --help`)" if message else "", error.exit_code
    if isinstance(error, ConfigError):
        return _line(error), USAGE
    if isinstance(error, PenstockError | ValueError | OutputError):
        return _line(error), FAILED
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}", FAILED
    if isinstance(error, ModuleNotFoundError):
        return f"package {error.name} is not installed; `penstock doctor` shows how to install it", FAILED
    return f"unexpected {type(error).__name__}: {_line(error)}; repeat with --debug for a traceback", FAILED


def _with_synonym(message: str) -> str:
    """Replace the suggestion of a similarly spelled command by the one in `SYNONYMS`, if the unknown command is listed there."""
    match = re.match(r"No such command '(.+?)'\.", message)
    return f"{match[0]} That is `penstock {SYNONYMS[match[1]]}`." if match and match[1] in SYNONYMS else message


def _line(error: object) -> str:
    return " ".join(str(error).split())


ONLY_PRINT = frozenset(
    {"runs", "status", "logs", "report", "explain", "sql", "graph", "plan", "topics list", "topics tail", "topics show", "topics acls"}
)
"""Commands that are useless without standard output."""
WRITES = ("--html", "--plot", "-h", "--help")
"""Options with which a command in `ONLY_PRINT` writes a file or shows its usage."""


def open_closed() -> bool:
    """Open the null device for each closed standard stream, so that no other file gets its descriptor; return True if stdout was closed."""
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:
        setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w", encoding="utf-8"))
    return "stdout" in closed


def refuse_unseen(words: Sequence[str]) -> None:
    """Raise `PenstockError` if the command in `words` only prints. Call this if standard output is closed."""
    names = [word for word in words if not word.startswith("-")]
    command = next((text for text in (" ".join(names[:2]), " ".join(names[:1])) if text in ONLY_PRINT), None)
    if command and names[:2] != ["runs", "rm"] and not any(word.startswith(WRITES) for word in words):
        raise PenstockError(f"`penstock {command}` prints its result, but standard output is closed: redirect it to a file or a pipe")


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """Make failed writes to standard output raise `OutputError`; a closed pipe still raises `BrokenPipeError`."""
    with contextlib.redirect_stdout(_Checked(sys.stdout)):  # type: ignore[type-var]
        yield
        sys.stdout.flush()


class OutputError(OSError):
    """Writing to standard output failed."""


class _Checked(VisibleStream):
    """Standard output whose failures raise `OutputError`, to distinguish them from failures of other files."""

    def write(self, text: str) -> int:
        with self._checked():
            return super().write(text)

    def flush(self) -> None:
        with self._checked():
            self._stream.flush()

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            silence(self._stream)
            raise OutputError(f"cannot write to standard output: {error.strerror}") from error
