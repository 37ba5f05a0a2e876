"""Commands that inspect a run (status, logs, report, audit, explain, sql, graph, ui), and `penstock stop`. They write to no topic."""

import os
import shutil
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from penstock.pipeline.cli.options import Bootstrap, Json, Run, RunOrFolder, Security, TrustCode, at, emit, notify, on_broker, reading
from penstock.pipeline.runtime.reporting.log_lines import exact_output, print_page, terminal_width

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.infra.kafka.log import KafkaLog
    from penstock.pipeline.inspect.audit.facts import Anchor
    from penstock.pipeline.inspect.audit.source import Source

FOLLOW_S = 0.25


def status(
    run: Run,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Refresh the view until the run ends or Ctrl-C.")] = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Show a run's progress and the activity of each worker."""
    from dataclasses import asdict

    from penstock.pipeline.inspect.live.completions import RECENT, Completions
    from penstock.pipeline.inspect.live.saved_view import newest
    from penstock.pipeline.inspect.run_view import read_view
    from penstock.pipeline.inspect.status import WATCHED, silences, standing, standstill_s
    from penstock.pipeline.runtime.topic_reader import RunReader

    if follow:
        _follow(run, bootstrap, security, json=json)
        return
    with on_broker(run, bootstrap, security) as (log, run_id):
        reader = RunReader(log, run_id)
        completions = Completions(reader.run)
        saved, since = newest(log, reader.run)
        # Read the newest groups again, because a saved view has them without texts.
        since = {tp: max(0, offset - RECENT) if tp[0].endswith(".groups") else offset for tp, offset in since.items()}
        view = read_view(reader, topics=WATCHED, also=completions.add, view=saved, since=since)
        now_s = time.time()
        silent = silences(view, now_s=now_s)
        still_s = standstill_s(view, now_s=now_s)
        stuck = None
        if still_s is not None:
            from penstock.pipeline.inspect.stall import RunSnapshot
            from penstock.pipeline.launch.stall_watchdog import describe, examine

            stuck = examine(log, RunSnapshot(view=view, now_s=now_s, silent=silent))
    if json:
        emit({**standing(view, now_s=now_s), "stuck": None if stuck is None else {**asdict(stuck), "still_s": still_s}})
        return
    from penstock.infra.paths import run_directory
    from penstock.pipeline.inspect.live.frame import frame, missing
    from penstock.pipeline.inspect.live.view import Terminal
    from penstock.pipeline.inspect.run_status import has_ended
    from penstock.pipeline.launch.run_lock import launcher_of

    console = Terminal()
    console.print(frame(view, now_s=now_s, silent=silent, width=console.width, completions=completions.shown()))
    if not has_ended(view) and launcher_of(run_directory(view.run)) is None:
        for role in missing(view, now_s=now_s, silent=silent):
            print(f"no {role} worker is running; start one: penstock worker {role} --run {view.run}")
    if stuck is not None and still_s is not None:
        print(describe(stuck, still_s=still_s))


def _follow(run: str, bootstrap: str, security: list[str] | None, *, json: bool) -> None:
    """Show the live view of a run until the run ends or Ctrl-C."""
    from penstock.infra.errors import ConfigError
    from penstock.pipeline.inspect.live.view import LiveView, Terminal
    from penstock.pipeline.inspect.run_status import has_ended

    if json:
        raise ConfigError("--follow and --json cannot be combined; give one of them")
    with on_broker(run, bootstrap, security) as (log, run_id), closing(LiveView(log, run_id, console=Terminal(), plain=False)) as view:
        view.poll(0.0)
        while not has_ended(view.view):
            view.poll(FOLLOW_S)


def graph(mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid flow chart.")] = False, json: Json = False) -> None:
    """Print the roles of a run and the topics that each reads and writes."""
    from penstock.pipeline.runtime import roles as table

    if json:
        emit(table.as_table())
    else:
        print(table.as_mermaid() if mermaid else table.as_text())


def report(
    run: RunOrFolder,
    *,
    full: Annotated[bool, typer.Option("--full", help="Print all figures.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="PATH", help="Write an HTML page with timeline, curves and samples.")] = None,
    tokens: Annotated[int | None, typer.Option(min=0, help="With --html: number of completion tokens shown one by one.")] = None,
    trust_code: TrustCode = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Report on a run: reward, evaluation, groups, staleness, time, what to try next; --full prints all figures, --html writes a page."""
    from penstock.pipeline.inspect.report.summary import stored_report
    from penstock.pipeline.runtime.reporting.log_lines import Progress

    if html is not None or tokens is not None:
        _page(run, html, tokens, trust_code=trust_code, bootstrap=bootstrap, security=security, json=json)
        return
    with reading(run, bootstrap, security) as (log, run_id):
        figures = stored_report(log, run_id, alive=Progress(notify))
    if json:
        emit(figures)
        return
    from penstock.infra.paths import run_directory
    from penstock.pipeline.inspect.live.view import print_report

    folder = run_directory(str(figures["run"]))
    directory = folder if folder.is_dir() else None
    print_report(figures, directory=directory, full=full)


def _page(
    run: str, html: Path | None, tokens: int | None, *, trust_code: bool, bootstrap: str, security: list[str] | None, json: bool
) -> None:
    """Write the HTML page of `penstock report --html`, with `tokens` shown one by one. Raises `ConfigError` for a wrong path."""
    from penstock.infra.errors import ConfigError
    from penstock.infra.paths import write_complete
    from penstock.pipeline.inspect.web.build import Limits, build
    from penstock.pipeline.runtime.reporting.log_lines import Progress

    if html is None:
        raise ConfigError("--tokens needs --html PATH")
    if html.is_dir() or not html.absolute().parent.is_dir():
        problem = "this is a directory" if html.is_dir() else "its directory does not exist"
        raise ConfigError(f"--html {html}: {problem}; give the path of a file")
    if html.exists() and not html.is_file():  # writing would replace a device or a pipe by a file
        raise ConfigError(f"--html {html}: not a regular file; give the path of a file")
    limits = Limits() if tokens is None else Limits().with_tokens(tokens)
    with reading(run, bootstrap, security) as (log, run_id):
        page = build(log, run_id, limits=limits, trust_code=trust_code, alive=Progress(notify))
    try:
        write_complete(html.resolve(), page.html)
    except OSError as error:
        raise ConfigError(f"--html {html}: {error.strerror}") from error
    if json:
        emit({"path": str(html), **page.facts})
        return
    print(
        f"{html}: {page.facts['bytes'] / 1e6:.1f} MB; {page.facts['samples'][0]:,} samples, {page.facts['tokens'][0]:,} tokens one by one"
    )
    for note in page.facts["left_out"]:
        notify(note)


LOG_LINES = 20
POLL_S = 0.3
STOP_LIMIT_S = 240.0


def logs(
    run: Run,
    role: Annotated[str | None, typer.Argument(metavar="[ROLE]", help="A role or one worker: rollout, rollout-0, …")] = None,
    *,
    count: Annotated[int, typer.Option("-n", min=0, help="Number of last lines per worker.")] = LOG_LINES,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until Ctrl-C.")] = False,
) -> None:
    """Print the logs of a run's workers on this machine, sorted by time."""
    from penstock.pipeline.launch.run_lock import folder_of, log_files, timed_lines

    directory = folder_of(run)
    files = log_files(directory, role)
    width = max(len(file.stem) for file in files)
    texts = {file: file.read_bytes() for file in files}
    read = {file: len(text) for file, text in texts.items()}
    for file, line in timed_lines(texts, count=count):
        _print_log(file, [line], width)
    while follow:
        time.sleep(POLL_S)
        for file in log_files(directory, role):
            with file.open("rb") as opened:
                opened.seek(read.get(file, 0))
                new = opened.read()
            lines = new[: new.rfind(b"\n") + 1]
            read[file] = read.get(file, 0) + len(lines)
            _print_log(file, lines.decode("utf-8", "replace").splitlines(), width)


def _print_log(file: Path, lines: list[str], width: int) -> None:
    for line in lines:
        print(f"{file.stem:<{width}}  {line}", flush=True)


def stop(run: Run) -> int:
    """Stop a run that was started on this machine, as Ctrl-C does; it can be resumed."""
    from penstock.pipeline.launch.run_lock import folder_of, request_stop

    directory = folder_of(run)
    stopping = f"stopping {directory.name}; its workers finish their current work"
    if not request_stop(directory, wait_s=STOP_LIMIT_S, requested=lambda: notify(stopping)):
        notify(f"{directory.name} did not stop within {STOP_LIMIT_S:.0f} s; see `penstock logs {directory.name}`")
        return 1
    print(f"stopped; resume it: penstock run --resume {directory.name}")
    return 0


def audit(run: RunOrFolder, *, bootstrap: Bootstrap = "embedded", security: Security = None, json: Json = False) -> None:
    """Verify from the log alone that nothing was lost, trained twice or trained stale; exit status 1 on any violation."""
    from penstock.pipeline.inspect.audit import report

    anchors, source = audit_source(run, bootstrap, security)
    findings = report.audit(source, anchors)
    emit(report.as_table(findings)) if json else print_page(report.as_text(findings))
    if not findings.clean:
        raise typer.Exit(1)


def audit_source(run: str, bootstrap: str, security: list[str] | None) -> tuple[list["Anchor"], "Source"]:
    """Return the log to audit, and before it the evidence of committed steps on this machine, which an active run keeps adding to."""
    from penstock.infra.kafka.settings import librdkafka
    from penstock.infra.paths import run_directory
    from penstock.pipeline.archive.archived_log import ArchivedSource, open_archive
    from penstock.pipeline.inspect.audit.facts import of_folder
    from penstock.pipeline.inspect.audit.kafka_reader import KafkaSource

    if (archived := open_archive(run)) is not None:
        return [], ArchivedSource(archived)
    with on_broker(run, bootstrap, security) as (log, run_id):
        connection = log.connection
    return of_folder(run_directory(run_id)), KafkaSource(connection.bootstrap, run_id, settings=librdkafka(connection), notify=notify)


def explain(
    run: RunOrFolder,
    group: Annotated[int, typer.Argument(min=0, metavar="GROUP", help="Number of a prompt group.")],
    *,
    trust_code: TrustCode = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Trace one prompt group: workers, samples, rewards, final status and its cause, gradient weight, and the time of each stage."""
    from penstock.pipeline.archive.index.segments import partition_of
    from penstock.pipeline.inspect.explain import as_json, text

    with reading(run, bootstrap, security) as (log, run_id):
        history = as_json.explain(log, run_id, group, notify=notify, trust_code=trust_code, partition=partition_of(run_id, group))
    emit(history) if json else print_page(text.as_page(history, width=terminal_width()))


VALUE_WIDTH = 60


def sql(
    run: RunOrFolder,
    query: Annotated[
        str | None,
        typer.Argument(metavar="QUERY", help="One SELECT statement; `-` reads it from stdin. Without it, tables and columns are listed."),
    ] = None,
    *,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Query a run in SQL: samples, groups, steps, lag, rewards, timeline."""
    from penstock.infra.errors import ConfigError, PenstockError, RunNotFound
    from penstock.pipeline.archive.archived_log import ArchivedLog
    from penstock.pipeline.archive.index.run_index import open_index
    from penstock.pipeline.archive.sql import ArchivedTables, LiveTables, ask, deleted_records, plain, views, write_csv
    from penstock.pipeline.inspect.report.text import some_of

    if csv and json:
        raise ConfigError("--csv and --json cannot be combined; give one of them")
    if query is None:
        own = {}  # without a broker or a run, the columns that every run has
        try:
            with reading(run, bootstrap, security) as (log, run_id):
                own = {"steps": open_index(log, run_id)[0].steps().schema}
        except (PenstockError, ConfigError) as error:
            if isinstance(error, RunNotFound):
                raise
        _list(views(**own), json=json)
        return
    text = sys.stdin.read() if query == "-" else query
    try:
        with reading(run, bootstrap, security) as (log, run_id):
            tables = ArchivedTables(log) if isinstance(log, ArchivedLog) else LiveTables(cast("KafkaLog", log), run_id)
            result = ask(tables, text)
            if gone := some_of(deleted_records(tables, text)):
                notify("\n".join(["some records were deleted, and the result does not include them:", *gone]))
    except ValueError as error:  # the query failed
        raise ConfigError(str(error)) from error
    except KeyboardInterrupt:
        notify("interrupted before there was a result")
        raise
    if csv:
        write_csv(result, sys.stdout if sys.stdout.isatty() else exact_output())
    elif json:
        emit([{name: plain(value) for name, value in row.items()} for row in result.to_pylist()])
    else:
        _print_table(result)


def _list(tables: dict[str, list[tuple[str, str]]], *, json: bool) -> None:
    """Print the tables that can be queried, each as (name, type) of its columns."""
    if json:
        emit({view: dict(columns) for view, columns in tables.items()})
        return
    width = shutil.get_terminal_size().columns
    for view, columns in tables.items():
        kinds = (f"{name} {kind if len(kind) <= VALUE_WIDTH else kind.split('(')[0] + '(…)'}" for name, kind in columns)
        print("\n".join(textwrap.wrap(f"{view}: {', '.join(kinds)}", width, subsequent_indent="  ", break_on_hyphens=False)))


def _print_table(result: "pa.Table") -> None:
    """Print the result of a query as a table; numbers are aligned to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from penstock.pipeline.inspect.live.view import Terminal

    table = Table(box=box.SIMPLE)
    for name, kind in zip(result.column_names, result.schema.types, strict=True):
        table.add_column(Text(name), justify="right" if str(kind).startswith(("int", "uint", "double", "float", "decimal")) else "left")
    columns = [_cells(result[name].to_pylist()) for name in result.column_names]
    for cells in zip(*columns, strict=True):
        table.add_row(*map(Text, cells))
    Terminal(width=terminal_width()).print(table)


def _cells(values: list[Any]) -> list[str]:
    """Format the cells of a column. Long values are shown without the prefix and suffix they share, such as a chat template."""
    from penstock.pipeline.archive.sql import plain
    from penstock.pipeline.inspect.live.completions import without_template

    # Numbers are printed with six significant digits; --csv and --json print all digits.
    plain_values = ["" if value is None else plain(value) for value in values]
    texts = [f"{value:.6g}" if isinstance(value, float) else str(value).replace("\n", "⏎") for value in plain_values]
    long = sorted({text for text in texts if len(text) > VALUE_WIDTH})
    shorter = {text: without_template(text, long) for text in long}
    return [_cut(text, shorter.get(text, text)) for text in texts]


def _cut(text: str, part: str) -> str:
    """Return `part` of `text`, with an ellipsis on each side that was cut, and at most `VALUE_WIDTH` characters."""
    start = text.index(part)
    cut = ("…" if start else "") + part + ("…" if start + len(part) < len(text) else "")
    return cut if len(cut) <= VALUE_WIDTH else cut[: VALUE_WIDTH - 1] + "…"


PORT = 8265


def ui(
    *,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")] = PORT,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0 in a container whose port is published on loopback.")
    ] = "127.0.0.1",
    write: Annotated[bool, typer.Option("--write", help="Allow changing names, notes and tags of runs on the pages.")] = False,
    compare: Annotated[
        list[str] | None, typer.Option(metavar="RUN", help="Print the address of a comparison with this run; repeatable.")
    ] = None,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
) -> None:
    """Serve pages about runs for a browser, until Ctrl-C: live view, comparison, groups, SQL, logs."""
    from urllib.parse import urlencode, urlsplit

    from penstock.infra.errors import PenstockError
    from penstock.infra.paths import make_files_private, state_directory
    from penstock.pipeline.cli.ui.server import Server, stable_token
    from penstock.pipeline.launch.run_lock import UI_ADDRESS, ui_address

    make_files_private()
    with at(bootstrap, security) as log:
        try:
            server = Server(log, host=host, port=port, token=stable_token(state_directory() / "ui.token"), writable=write)
        except OSError as error:
            running = ui_address() or ""
            cause = f"`penstock ui` runs at {running}" if urlsplit(running).port == port else os.strerror(error.errno or 0)
            raise PenstockError(f"cannot listen on {host}:{port}: {cause}; choose another --port, or 0 for a free one") from error
        address_file = state_directory() / UI_ADDRESS
        if first := ui_address() is None:
            address_file.write_text(server.address, encoding="utf-8")
        print(server.address + (f"compare?{urlencode({'run': compare}, doseq=True)}" if compare else ""), flush=True)
        notify("open this address in a browser on this machine; Ctrl-C stops the server")
        try:
            server.serve_forever()
        finally:
            if first:
                address_file.unlink(missing_ok=True)
            server.server_close()
