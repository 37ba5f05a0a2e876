"""`penstock broker`: this machine's own Apache Kafka. The rule: stopping it keeps its data."""

from typing import Annotated, Any

import typer

from penstock.pipeline.cli.options import Json, emit, notify

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

    _show(embedded.start(port=port, progress=notify), json=json)


@app.command()
def stop(
    *, yes: Annotated[bool, typer.Option("--yes", help="Also while runs are at work; they wait for it.")] = False, json: Json = False
) -> None:
    """Stop it; its data stays. Refused while runs of this machine are at work, unless --yes is given."""
    from penstock.infra.broker import embedded
    from penstock.infra.errors import PenstockError
    from penstock.pipeline.launch.run_lock import attended_runs

    if not yes and (busy := attended_runs()):
        raise PenstockError(f"at work: {', '.join(busy)}; `penstock stop RUN` stops one, and --yes stops the broker all the same")
    ran = embedded.stop()
    if json:
        _show(embedded.status(), json=True)
    else:
        print("stopped; its data stays" if ran else "it was not running")


@app.command()
def status(*, json: Json = False) -> None:
    """Show whether it runs, and where."""
    from penstock.infra.broker import embedded

    _show(embedded.status(), json=json)


def _show(info: Any, *, json: bool) -> None:
    if json:
        emit(info)
    elif info.running:
        print(f"running at {info.bootstrap}, pid {info.pid}")
    elif info.ended is not None:
        print(f"not running: {info.ended}")
    else:
        print("not running; start it with `penstock broker start`")
