"""`penstock runs`, `status`, `report` and `graph`: what only looks. The rule: nothing here writes to a topic."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.common import Bootstrap, Json, Run, Security, at, emit


def runs(*, bootstrap: Bootstrap = "embedded", security: Security = None, json: Json = False) -> None:
    """List the runs of a broker: id, status, steps, age."""
    from pipeline.inspect import list_runs

    with at(bootstrap, security) as log:
        rows = list_runs(log)
    if json:
        emit(rows)
        return
    if not rows:
        print("no run is registered on this broker; start one with `penstock run CONFIG`")
        return
    width = max(len(str(row["run"])) for row in rows)
    for row in rows:
        print(f"{row['run']:<{width}}  {row['status']:<9} step {row['steps_done']} of {row['steps']}, {row['age']} ago")


def status(run: Run, *, bootstrap: Bootstrap = "embedded", security: Security = None, json: Json = False) -> None:
    """Where a run stands now, and what each worker does."""
    import time
    from dataclasses import asdict

    from pipeline.report import load
    from pipeline.runs import resolve
    from pipeline.standing import WATCHED, silences, standing, standstill_s
    from pipeline.stuck import Scene
    from pipeline.watchdog import describe, examine

    with at(bootstrap, security) as log:
        view = load(log, resolve(log, run), topics=WATCHED)
        now_s = time.time()
        silent = silences(view, now_s=now_s)
        still_s = standstill_s(view, now_s=now_s)
        found = None if still_s is None else examine(log, Scene(view=view, now_s=now_s, silent=silent))
    if json:
        emit({**standing(view, now_s=now_s), "stuck": None if found is None else {**asdict(found), "still_s": still_s}})
        return
    from rich.console import Console

    from pipeline.live_frame import frame

    Console().print(frame(view, now_s=now_s, silent=silent))
    if found is not None and still_s is not None:
        print(describe(found, still_s=still_s))


def report(run: Run, *, bootstrap: Bootstrap = "embedded", security: Security = None, json: Json = False) -> None:
    """What a run did: reward, groups by fate, times, lag, weights."""
    from pipeline.report import as_text, collect, render
    from pipeline.runs import resolve

    with at(bootstrap, security) as log:
        found = collect(log, resolve(log, run))
    if json:
        emit(found)
        return
    from infra.broker.state import run_directory

    directory: Path | None = run_directory(str(found["run"]))
    if directory is not None and not directory.is_dir():
        directory = None
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(render(found, directory=directory))
    else:
        print(as_text(found, directory=directory), end="")


def graph(
    mermaid: Annotated[bool, typer.Option("--mermaid", help="As a Mermaid flow chart.")] = False,
    json: Json = False,
) -> None:
    """Print the DAG: roles and the topics each reads and writes."""
    from pipeline import graph as table

    if json:
        emit(table.as_table())
    else:
        print(table.as_mermaid() if mermaid else table.as_text())
