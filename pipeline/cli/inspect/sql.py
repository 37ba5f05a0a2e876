"""`penstock sql`: queries a run in SQL. A query changes nothing and opens no file but the export it reads."""

import shutil
import sys
import textwrap
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from penstock.pipeline.cli.options import Bootstrap, Json, RunOrFolder, Security, emit, notify, reading
from penstock.pipeline.runtime.reporting.log_lines import exact_output

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.infra.kafka.log import KafkaLog

SHOWN = 60
"""Longest value shown in a printed table, in characters."""


def sql(
    run: RunOrFolder,
    query: Annotated[
        str | None, typer.Argument(metavar="QUERY", help="One SELECT; `-` reads it from stdin; without one the views are listed.")
    ] = None,
    *,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Query a run in SQL: samples, groups, steps, lag, rewards, timeline."""
    from penstock.infra.errors import ConfigError
    from penstock.pipeline.archive.archived_log import ArchivedLog
    from penstock.pipeline.archive.sql import ArchivedTables, LiveTables, ask, gone_from, views
    from penstock.pipeline.inspect.report.text import some_of

    if csv and json:
        raise ConfigError("give either --csv or --json")
    if query is None:
        _list(views(), json=json)
        return
    text = sys.stdin.read() if query == "-" else query
    try:
        with reading(run, bootstrap, security) as (log, run_id):
            tables = ArchivedTables(log) if isinstance(log, ArchivedLog) else LiveTables(cast("KafkaLog", log), run_id)
            result = ask(tables, text)
            if gone := some_of(gone_from(tables, text)):
                notify("\n".join(["some records were deleted; the result covers the others:", *gone]))
    except ValueError as error:  # a query that fails
        raise ConfigError(str(error)) from error
    except KeyboardInterrupt:
        notify("interrupted, there is no result")
        raise
    if csv:
        _print_csv(result)
    elif json:
        emit([{name: plain(value) for name, value in row.items()} for row in result.to_pylist()])
    else:
        _print_table(result)


def _list(tables: dict[str, list[tuple[str, str]]], *, json: bool) -> None:
    if json:
        emit({view: dict(columns) for view, columns in tables.items()})
        return
    width = shutil.get_terminal_size().columns
    for view, columns in tables.items():
        kinds = (f"{name} {kind if len(kind) <= SHOWN else kind.split('(')[0] + '(…)'}" for name, kind in columns)
        print("\n".join(textwrap.wrap(f"{view}: {', '.join(kinds)}", width, subsequent_indent="  ", break_on_hyphens=False)))


def _print_csv(table: "pa.Table") -> None:
    import csv

    writer = csv.writer(sys.stdout if sys.stdout.isatty() else exact_output(), lineterminator="\n")
    writer.writerow(table.column_names)
    writer.writerows([plain(value) for value in row.values()] for row in table.to_pylist())


def _print_table(result: "pa.Table") -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from penstock.pipeline.inspect.live.terminal import Terminal

    table = Table(box=box.SIMPLE)
    for name, kind in zip(result.column_names, result.schema.types, strict=True):
        table.add_column(Text(name), justify="right" if str(kind).startswith(("int", "uint", "double", "float", "decimal")) else "left")
    columns = [_cells(result[name].to_pylist()) for name in result.column_names]
    for cells in zip(*columns, strict=True):
        table.add_row(*map(Text, cells))
    # In a pipe a table is as wide as its content: a terminal's width does not apply.
    Terminal(width=None if sys.stdout.isatty() else 10_000).print(table)


def _cells(values: list[Any]) -> list[str]:
    """Cells of a column; long values without their common prefix and suffix, such as those of a chat template."""
    from penstock.pipeline.inspect.live.completions import without_template

    texts = ["" if value is None else str(plain(value)).replace("\n", "⏎") for value in values]
    long = sorted({text for text in texts if len(text) > SHOWN})
    shorter = {text: without_template(text, long) for text in long}
    return [_cut(text, shorter.get(text, text)) for text in texts]


def _cut(text: str, part: str) -> str:
    """Part of a text, with an ellipsis on each side that was cut."""
    start = text.index(part)
    cut = ("…" if start else "") + part + ("…" if start + len(part) < len(text) else "")
    return cut if len(cut) <= SHOWN else cut[: SHOWN - 1] + "…"


def plain(value: Any) -> Any:
    """A value as JSON: bytes in hexadecimal, times as ISO 8601, no NaN; DuckDB returns sums of integers as decimals."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):  # noqa: PLR0124
        return None
    return value.isoformat() if hasattr(value, "isoformat") else value
