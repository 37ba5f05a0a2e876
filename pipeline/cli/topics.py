"""`penstock topics`: look at what flows, live or afterwards. The rule: a record nobody can decode is shown, never hidden."""

from typing import Annotated

import typer

from pipeline.cli.common import Bootstrap, Json, Run, Security, at, emit

app = typer.Typer(help="Look at what flows: list, tail, show.")

Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="prompts, rollouts, groups, weights, ledger, metrics or dead-letters.")]


@app.command("list")
def list_topics(run: Run, *, bootstrap: Bootstrap = "embedded", security: Security = None, json: Json = False) -> None:
    """A run's topics with their partitions and records."""
    from dataclasses import asdict

    from pipeline.inspect import list_topics as rows_of
    from pipeline.runs import resolve

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
    from pipeline import inspect, readable
    from pipeline.runs import resolve

    line = readable.as_json_line if json else readable.as_line
    with at(bootstrap, security) as log:
        found = resolve(log, run)
        for record in inspect.tail(log, found, topic, count=count, follow=follow):
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
    from pipeline import inspect, readable
    from pipeline.runs import resolve

    with at(bootstrap, security) as log:
        found = resolve(log, run)
        record = inspect.record_at(log, found, topic, partition=partition, offset=offset)
    view = inspect.view(record, run=found)
    if json:
        emit(view)
    else:
        print(readable.as_page(view))
