"""The command-line application, and the one function that turns an error into a line and an exit status.

The rule: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted; one line that says what to do, a traceback only with --debug.
"""

import gc
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from penstock.infra.sandbox.secrets import hide_secrets
from penstock.infra.sandbox.signals import keep_ignored_here
from penstock.pipeline.cli.audit import audit
from penstock.pipeline.cli.fork import fork
from penstock.pipeline.cli.init import check, init
from penstock.pipeline.cli.look.explain import explain as explain_group
from penstock.pipeline.cli.look.logs import logs, stop
from penstock.pipeline.cli.look.report import report
from penstock.pipeline.cli.look.runs import app as runs_app
from penstock.pipeline.cli.look.sql import sql
from penstock.pipeline.cli.look.status import graph, status
from penstock.pipeline.cli.look.ui import ui
from penstock.pipeline.cli.machine.broker import app as broker_app
from penstock.pipeline.cli.machine.doctor import doctor
from penstock.pipeline.cli.machine.model import app as model_app
from penstock.pipeline.cli.plan import plan
from penstock.pipeline.cli.replay import app as replay_app
from penstock.pipeline.cli.run import create, run, worker
from penstock.pipeline.cli.streams import OutputError, checked_output, open_closed, refuse_unseen
from penstock.pipeline.cli.topics import app as topics_app
from penstock.pipeline.launch.shutdown import silence
from penstock.pipeline.runtime.reporting.visible_output import visible_errors

MEANT = {
    "resume": "run --resume RUN",
    "train": "run CONFIG",
    "start": "run CONFIG",
    "list": "runs",
    "ls": "runs",
    "rm": "runs rm RUN",
    "delete": "runs rm RUN",
    "kill": "stop RUN",
    "compare": "ui",
}
"""What others call a command -> what it is here."""

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
GC_OBJECTS = 20_000
"""New objects between two collections: what the imports of a command make stays, and looking through it again and again takes 0.1 s."""


class Grouped(typer.core.TyperGroup):
    """Lists the commands under headings, in the order in which they were added."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one list of names and short texts for each heading."""
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
TRAIN, LOOK, REPLAY, MACHINE = "Train", "Look at a run", "Replay", "This machine"
app.command(rich_help_panel=TRAIN, short_help="Write a configuration for a model, data and reward.")(init)
app.command(rich_help_panel=TRAIN, short_help="Try all that can fail later; draw the samples of a step.")(check)
app.command(rich_help_panel=TRAIN, short_help="Run everything here: broker, workers, live view, report.")(run)
app.command(rich_help_panel=TRAIN, short_help="Register a run and make its topics; start nothing.")(create)
_ARGPARSE = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
app.command(rich_help_panel=TRAIN, short_help="Run one worker of a run, on any machine.", context_settings=_ARGPARSE)(worker)
app.command(rich_help_panel=TRAIN, short_help="Stop a run of this machine; it can be resumed.")(stop)
app.command(rich_help_panel=TRAIN, short_help="Split machines between rollout and training, simulated.")(plan)
app.add_typer(runs_app, name="runs", rich_help_panel=LOOK, short_help="List the runs; `runs rm` removes some.")
app.command(rich_help_panel=LOOK, short_help="Where a run stands, and what each worker does.")(status)
app.command(rich_help_panel=LOOK, short_help="Runs in a browser: live, compared, in SQL.")(ui)
app.command(rich_help_panel=LOOK, short_help="What a run's workers have written; -f follows.")(logs)
app.command(rich_help_panel=LOOK, short_help="What a run did: reward, fates, times, lag; as a page.")(report)
app.command(rich_help_panel=LOOK, short_help="Prove from the log that nothing was lost or trained twice.")(audit)
app.command("explain", rich_help_panel=LOOK, short_help="The life of one group: samples, rewards, fate.")(explain_group)
app.command(rich_help_panel=LOOK, short_help="Ask a run in SQL.")(sql)
app.add_typer(topics_app, name="topics", rich_help_panel=LOOK, short_help="The records: list, show, export, import, delete.")
app.command(rich_help_panel=LOOK, short_help="The roles, and the topics each reads and writes.")(graph)
app.command(rich_help_panel=REPLAY, short_help="A new run from another one's weights.")(fork)
app.add_typer(replay_app, name="replay", rich_help_panel=REPLAY, short_help="Do a stage again, the same or with a change.")
app.add_typer(broker_app, name="broker", rich_help_panel=MACHINE, short_help="This machine's Kafka broker: start, stop, status.")
app.add_typer(model_app, name="model", rich_help_panel=MACHINE, short_help="Make a model to begin with.")
app.command(rich_help_panel=MACHINE, short_help="Check packages, Java, broker, disk, memory, GPUs.")(doctor)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"penstock {version('penstock-rl')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; anywhere on the line.")] = False,
) -> None:
    """Options that go with every command."""


def console() -> int:
    """The console script: run the command of this process's arguments and return the exit status."""
    keep_ignored_here()
    hide_secrets()
    gc.set_threshold(GC_OBJECTS)
    status = main()
    if "duckdb" not in sys.modules:  # which lists on stderr whatever of its own is not collected at the end
        gc.freeze()  # otherwise the interpreter's end goes through every object of the libraries
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    closed = open_closed()
    with visible_errors():
        return _run(arguments, closed=closed)


def _run(arguments: Sequence[str] | None, *, closed: bool) -> int:
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
        # The reader of the pipe has closed it; the interpreter must not flush to it on exit.
        silence(sys.stdout)
        return OK
    except Exception as error:  # the process's edge: every error becomes one line
        if debug:
            traceback.print_exc()
        message, exit_status = explain(error)
        if message:
            print(f"penstock: {message}", file=sys.stderr)
        return exit_status


def _invoke(words: list[str]) -> int:
    command = typer.main.get_command(app)
    try:
        with command.make_context("penstock", words or ["--help"]) as context:
            return int(command.invoke(context) or OK)
    except typer.Exit as ended:
        return ended.exit_code


def explain(error: Exception) -> tuple[str, int]:
    """The line for a person and the exit status of an error.

    Example:
        explain(ValueError("no run 'x' on this broker; see `penstock runs`"))  # -> ("no run 'x' on this broker; see `penstock runs`", 1)
    """
    from penstock.infra.errors import PenstockError

    if isinstance(error, typer.Abort):
        return "aborted", FAILED
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "penstock"
        said = _line(error.format_message())
        return f"{_meant(said)} (see `{where} --help`)" if said else "", error.exit_code
    from penstock.infra.errors import ConfigError

    if isinstance(error, ConfigError):
        return _line(error), USAGE
    if isinstance(error, PenstockError | ValueError | OutputError):
        return _line(error), FAILED
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}", FAILED
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed on this machine; `penstock doctor` says which extra has it", FAILED
    return f"unexpected {type(error).__name__}: {_line(error)}; --debug shows where it happened", FAILED


def _meant(said: str) -> str:
    """The message, for a command that others have under another name with its name here instead of one that is spelled alike."""
    found = re.match(r"No such command '(.+?)'\.", said)
    return f"{found[0]} That is `penstock {MEANT[found[1]]}`." if found and found[1] in MEANT else said


def _line(error: object) -> str:
    return " ".join(str(error).split())
