"""`penstock broker`: starts, stops and checks this machine's Apache Kafka broker."""

from typing import Annotated, Any

import typer

from penstock.pipeline.cli.options import Json, emit, notify

app = typer.Typer(help="Start, stop and check this machine's Apache Kafka broker.")


@app.command()
def start(
    *,
    port: Annotated[
        int | None, typer.Option(help="Loopback port for clients, remembered for the next start; a free one if absent.")
    ] = None,
    json: Json = False,
) -> None:
    """Start the broker if it is not running."""
    from penstock.infra.broker import embedded

    _show(embedded.start(port=port, progress=notify), json=json)


@app.command()
def stop(
    *, yes: Annotated[bool, typer.Option("--yes", help="Stop it although runs are active; they wait for it.")] = False, json: Json = False
) -> None:
    """Stop the broker and keep its data. Refused while runs of this machine are active, unless --yes is given."""
    from penstock.infra.broker import embedded
    from penstock.infra.errors import PenstockError
    from penstock.pipeline.launch.run_lock import attended_runs

    if not yes and (busy := attended_runs()):
        raise PenstockError(f"the broker was not stopped: {', '.join(busy)} at work; stop them with `penstock stop RUN`, or add --yes")
    ran = embedded.stop()
    if json:
        _show(embedded.status(), json=True)
    else:
        print("stopped; its data is kept" if ran else "it was not running")


@app.command()
def status(*, json: Json = False) -> None:
    """Show if the broker is running, and its address."""
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
