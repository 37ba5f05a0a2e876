"""`penstock broker`: this machine's own Apache Kafka. The rule: stopping it keeps its data."""

from typing import Annotated, Any

import typer

from penstock.pipeline.cli.options import Json, emit, say

app = typer.Typer(help="This machine's own Apache Kafka broker: start, stop, status.")


@app.command()
def start(
    *,
    port: Annotated[
        int | None, typer.Option(help="Loopback port for clients, remembered for the next start; a free one if absent.")
    ] = None,
    json: Json = False,
) -> None:
    """Start it, or find it running."""
    from penstock.infra.broker import embedded

    _show(embedded.start(port=port, progress=say), json=json)


@app.command()
def stop(*, json: Json = False) -> None:
    """Stop it; its data stays."""
    from penstock.infra.broker import embedded

    ran = embedded.stop()
    if json:
        _show(embedded.status(), json=True)
    else:
        print("stopped; its data stays" if ran else "it was not running")


@app.command()
def status(*, json: Json = False) -> None:
    """Whether it runs, and where."""
    from penstock.infra.broker import embedded

    _show(embedded.status(), json=json)


def _show(found: Any, *, json: bool) -> None:
    from dataclasses import asdict

    if json:
        emit(asdict(found))
    elif found.running:
        print(f"running at {found.bootstrap}, pid {found.pid}")
    elif found.ended is not None:
        print(f"not running: {found.ended}")
    else:
        print("not running; start it with `penstock broker start`")
