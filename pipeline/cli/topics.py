"""`penstock topics`: look at what flows, live or afterwards, take it away and bring it back.

The rule: a record nobody can decode is shown and kept, never hidden.
"""

from pathlib import Path
from typing import Annotated

import typer

from penstock.pipeline.cli.options import Bootstrap, Json, Run, Security, at, emit, say, security_settings

app = typer.Typer(help="Look at what flows: list, tail, show; export, import, delete.")

Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="prompts, rollouts, groups, weights, ledger, metrics or dead-letters.")]


@app.command("list")
def list_topics(run: Run, *, bootstrap: Bootstrap = "embedded", security: Security = None, json: Json = False) -> None:
    """A run's topics with their partitions and records."""
    from dataclasses import asdict

    from penstock.pipeline.observe.records.browse import list_topics as rows_of
    from penstock.pipeline.runtime.run_registry import resolve

    with at(bootstrap, security) as log:
        rows = rows_of(log, resolve(log, run))
    if json:
        emit([asdict(row) for row in rows])
        return
    width = max((len(row.topic) for row in rows), default=0)
    for row in rows:
        print(f"{row.topic:<{width}}  {row.partitions:>3} partition{'s' if row.partitions > 1 else ' '}  {row.offsets:>9,} offsets")


@app.command()
def tail(
    run: Run,
    topic: Topic,
    *,
    count: Annotated[int, typer.Option("-n", min=0, help="Newest records to begin with.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new ones until Ctrl-C.")] = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """The newest records of a topic, one line each; with --json one object a line."""
    from penstock.pipeline.observe.records import browse, format
    from penstock.pipeline.runtime.run_registry import resolve

    line = format.as_json_line if json else format.as_line
    with at(bootstrap, security) as log:
        found = resolve(log, run)
        for record in browse.tail(log, found, topic, count=count, follow=follow):
            print(line(record, run=found), flush=follow)


@app.command()
def show(
    run: Run,
    topic: Topic,
    partition: Annotated[int, typer.Argument(min=0)],
    offset: Annotated[int, typer.Argument(min=0)],
    *,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """One record: its headers and its decoded payload."""
    from penstock.pipeline.observe.records import browse, format
    from penstock.pipeline.runtime.run_registry import resolve

    with at(bootstrap, security) as log:
        found = resolve(log, run)
        record = browse.record_at(log, found, topic, partition=partition, offset=offset)
    view = browse.view(record, run=found)
    if json:
        emit(view)
    else:
        print(format.as_page(view))


@app.command("export")
def export_topics(
    run: Run,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Gets a folder RUN, or goes on with it.")],
    *,
    topics: Annotated[
        list[str] | None, typer.Option("--topics", metavar="TOPIC", help="Only this one; repeatable, or with commas.")
    ] = None,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Write a run's topics as Parquet, byte for byte restorable; again, and it adds what is new."""
    from dataclasses import asdict

    from penstock.pipeline.archive.export import export
    from penstock.pipeline.runtime.run_registry import resolve

    chosen = [name.strip() for given in topics or () for name in given.split(",") if name.strip()]
    with at(bootstrap, security) as log:
        done = export(log, resolve(log, run), directory, topics=chosen, say=say)
    if json:
        emit(asdict(done))
        return
    for line in done.gone:
        print(line)
    rows = ", ".join(f"{count:,} {name}" for name, count in done.rows.items()) or "nothing new"
    print(f"{done.directory}: {rows} in {done.files} new files, {done.bytes / 1e6:,.1f} MB, {done.seconds:.1f} s")


@app.command("import")
def import_topics(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What `topics export` wrote: its directory, or a run's folder in it.")],
    *,
    run_id: Annotated[str | None, typer.Option("--run-id", metavar="NEW", help="Under another id than its own.")] = None,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Bring an exported run to a broker, every record at the offset it had."""
    from dataclasses import asdict

    from penstock.pipeline.archive.import_run import find_archive, import_run

    archive = find_archive(directory)
    with at(bootstrap, security) as log:
        done = import_run(log, archive, bootstrap=log.bootstrap, becomes=run_id, security=security_settings(security), say=say)
    if json:
        emit(asdict(done))
    else:
        rows = ", ".join(f"{count:,} {name}" for name, count in done.records.items() if count)
        print(f"run {done.run}: {rows} in {done.seconds:.1f} s; `penstock report {done.run}` looks at it")


@app.command("delete")
def delete_topics(
    run: Run,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without, it is only said what would be deleted.")] = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Delete a run's topics and its record, for ever."""
    from dataclasses import asdict

    from penstock.pipeline.archive.delete import delete, doomed
    from penstock.pipeline.runtime.run_registry import resolve

    with at(bootstrap, security) as log:
        # A deletion or an import that was interrupted leaves topics without a record: those are named by the whole id.
        found = doomed(log, run if run != "latest" and log.topics(f"{run}.") else resolve(log, run))
        if yes:
            delete(log, found, bootstrap=log.bootstrap, security=security_settings(security))
    if json:
        emit({**asdict(found), "deleted": yes})
        return
    for name, count in found.offsets.items():
        print(f"{name}: {count:,} offsets{'' if yes else ' would be deleted'}")
    print(f"run {found.run} is deleted" if yes else f"nothing was deleted; `penstock topics delete {found.run} --yes` does it")
