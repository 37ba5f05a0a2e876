"""`penstock status`, `runs` and `graph`: show the state of runs. The rule: nothing here writes to a topic."""

import time
from typing import Annotated

import typer

from penstock.pipeline.cli.options import Bootstrap, Json, Run, Security, at, emit


def runs(*, bootstrap: Bootstrap = "embedded", security: Security = None, json: Json = False) -> None:
    """List the runs of a broker: id, status, steps, age."""
    from penstock.pipeline.observe.records.browse import list_runs

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
    from dataclasses import asdict

    from penstock.pipeline.launch.stall_watchdog import describe, examine
    from penstock.pipeline.observe.run_view import load
    from penstock.pipeline.observe.stall import Scene
    from penstock.pipeline.observe.status import WATCHED, silences, standing, standstill_s
    from penstock.pipeline.runtime.run_registry import resolve

    with at(bootstrap, security) as log:
        view = load(log, resolve(log, run), topics=WATCHED)
        now_s = time.time()
        silent = silences(view, now_s=now_s)
        still_s = standstill_s(view, now_s=now_s)
        stuck = None if still_s is None else examine(log, Scene(view=view, now_s=now_s, silent=silent))
    if json:
        emit({**standing(view, now_s=now_s), "stuck": None if stuck is None else {**asdict(stuck), "still_s": still_s}})
        return
    from rich.console import Console

    from penstock.pipeline.observe.live.frame import frame

    Console().print(frame(view, now_s=now_s, silent=silent))
    if stuck is not None and still_s is not None:
        print(describe(stuck, still_s=still_s))


def graph(
    mermaid: Annotated[bool, typer.Option("--mermaid", help="As a Mermaid flow chart.")] = False,
    json: Json = False,
) -> None:
    """Print the DAG: roles and the topics each reads and writes."""
    from penstock.pipeline.runtime import roles as table

    if json:
        emit(table.as_table())
    else:
        print(table.as_mermaid() if mermaid else table.as_text())
