"""`penstock status` and `penstock graph`. Read-only."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.pipeline.cli.options import Bootstrap, Json, Run, Security, at, emit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.infra.kafka.log import KafkaLog
    from penstock.pipeline.inspect.run_view import RunView
    from penstock.pipeline.inspect.stall import Stuck

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
    from penstock.pipeline.runtime.registration.run_registry import resolve
    from penstock.pipeline.runtime.topic_reader import RunReader

    if follow:
        _follow(run, bootstrap, security, json=json)
        return
    with at(bootstrap, security) as log:
        reader = RunReader(log, resolve(log, run))
        completions = Completions(reader.run)
        saved, since = newest(log, reader.run)
        # Read the newest groups again for their texts: the saved view may include all of them, without texts.
        since = {tp: max(0, offset - RECENT) if tp[0].endswith(".groups") else offset for tp, offset in since.items()}
        view = read_view(reader, topics=WATCHED, also=completions.add, view=saved, since=since)
        now_s = time.time()
        silent = silences(view, now_s=now_s)
        still_s = standstill_s(view, now_s=now_s)
        stuck = None if still_s is None else _examine(log, view, now_s=now_s, silent=silent)
    if json:
        emit({**standing(view, now_s=now_s), "stuck": None if stuck is None else {**asdict(stuck), "still_s": still_s}})
        return
    from penstock.infra.paths import run_directory
    from penstock.pipeline.inspect.live.frame import frame, missing
    from penstock.pipeline.inspect.live.terminal import Terminal
    from penstock.pipeline.inspect.run_status import has_ended
    from penstock.pipeline.launch.run_lock import launcher_of

    console = Terminal()
    console.print(frame(view, now_s=now_s, silent=silent, width=console.width, completions=completions.shown()))
    if not has_ended(view) and launcher_of(run_directory(view.run)) is None:
        for role in missing(view, now_s=now_s, silent=silent):
            print(f"missing: {role} (`penstock worker {role} --run {view.run}`)")
    if stuck is not None and still_s is not None:
        from penstock.pipeline.launch.stall_watchdog import describe

        print(describe(stuck, still_s=still_s))


def _examine(log: "KafkaLog", view: "RunView", *, now_s: float, silent: "Mapping[str, float]") -> "Stuck | None":
    from penstock.pipeline.inspect.stall import RunSnapshot
    from penstock.pipeline.launch.stall_watchdog import examine

    return examine(log, RunSnapshot(view=view, now_s=now_s, silent=silent))


def _follow(run: str, bootstrap: str, security: list[str] | None, *, json: bool) -> None:
    from penstock.infra.errors import ConfigError
    from penstock.pipeline.inspect.live.terminal import Terminal
    from penstock.pipeline.inspect.live.view import LiveView
    from penstock.pipeline.inspect.run_status import has_ended
    from penstock.pipeline.runtime.registration.run_registry import resolve

    if json:
        raise ConfigError("give either --follow or --json")
    with at(bootstrap, security, attends=False) as log:
        view = LiveView(log, resolve(log, run), console=Terminal(), plain=False)
        try:
            view.poll(0.0)
            while not has_ended(view.view):
                view.poll(FOLLOW_S)
        finally:
            view.close()


def graph(
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid flow chart.")] = False,
    json: Json = False,
) -> None:
    """Print the DAG: roles and the topics each reads and writes."""
    from penstock.pipeline.runtime import roles as table

    if json:
        emit(table.as_table())
    else:
        print(table.as_mermaid() if mermaid else table.as_text())
