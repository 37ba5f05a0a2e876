"""`penstock run`, `create` and `worker`: start runs and workers. `run` starts nothing that `create` and `worker` cannot."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.pipeline.cli.init import report
from penstock.pipeline.cli.options import (
    Bootstrap,
    ConfigFile,
    Json,
    Overrides,
    Security,
    TrustRun,
    at,
    connected,
    emit,
    notify,
)

RunId = Annotated[
    str | None, typer.Option("--run-id", help="Id of the new run: a-z, 0-9 and '-', at most 64, no '-' first. Made up if absent.")
]


def run(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="A TOML file; see docs/reference/configuration.md.")] = None,
    *,
    resume: Annotated[str | None, typer.Option("--resume", metavar="RUN", help="Resume a stopped run instead of starting CONFIG.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="A.B=C", help="Override one key of the configuration; repeatable. With --resume, a key that may change."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Validate as `penstock check` does, without generating samples.")] = False,
    run_id: RunId = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print plain lines instead of the live view.")] = False,
    trust_code: TrustRun = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> int:
    """Run everything on this machine: broker, topics, workers, live view, report."""
    from penstock.infra.backends.processor import this_cpu
    from penstock.infra.paths import make_files_private
    from penstock.pipeline.config.load import ConfigError, load
    from penstock.pipeline.config.security import security_settings
    from penstock.pipeline.launch.create import usable
    from penstock.pipeline.launch.placement import visible_gpus

    make_files_private()
    if trust_code and resume is None:
        raise ConfigError("--trust-code needs --resume RUN: the code that your CONFIG names is trusted")
    if resume is not None:
        if config is not None or dry_run or run_id is not None:
            raise ConfigError("--resume takes no CONFIG, --run-id or --dry-run: a run is resumed as it was created")
        from penstock.pipeline.launch import launcher
        from penstock.pipeline.runtime.registration.run_registry import resolve

        with at(bootstrap, security, attends=True) as log:
            shown = not plain and not json
            run = resolve(log, resume, executes=True)
            return launcher.resume(run, log=log, notify=notify, live=shown, json_out=json, overrides=overrides or (), trust_code=trust_code)
    if config is None:
        raise ConfigError("penstock run needs a CONFIG, for example: penstock run examples/demo.toml")
    if bootstrap != "embedded" or security:
        settings = [
            f'kafka.bootstrap="{bootstrap}"',
            *(f'kafka.security.{key}="{value}"' for key, value in security_settings(security).items()),
        ]
        overrides = [*settings, *(overrides or [])]
    loaded = load(config, overrides or [], gpus=len(visible_gpus()), cpu=this_cpu())
    if run_id is not None:
        usable(run_id)
    if dry_run:
        # A dry run downloads nothing: a missing data set is reported.
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
        report(loaded, samples=False, json=json)
        return 0
    from penstock.pipeline.launch.launcher import launch

    return launch(loaded, notify=notify, live=not plain and not json, json_out=json, run_id=run_id)


def create(config: ConfigFile, *, overrides: Overrides = None, run_id: RunId = None, json: Json = False) -> None:
    """Validate a configuration, register its run and create its topics; start no worker."""
    from penstock.infra.backends.processor import this_cpu
    from penstock.pipeline.config.load import load
    from penstock.pipeline.launch.check import preflight
    from penstock.pipeline.launch.create import create as register
    from penstock.pipeline.launch.placement import visible_gpus

    loaded = load(config, overrides or [], gpus=len(visible_gpus()), cpu=this_cpu())
    with connected(loaded.kafka.bootstrap, loaded.kafka.security) as log:
        checked = preflight.check(loaded, tell=lambda _name, _text: None, samples=False, notify=notify)
        record = register(loaded, log=log, run_id=run_id, checked=checked.info, notify=notify)
    if json:
        emit({"run": record.run, "status": record.status, "bootstrap": log.bootstrap})
    else:
        print(record.run)
        notify(f"start its workers: penstock worker ROLE --run {record.run} --bootstrap {log.bootstrap}")


def worker(context: typer.Context) -> int:
    """Run one worker of a run, anywhere that reaches the broker, until the run is over."""
    from penstock.pipeline.runtime.main import parsed, start

    debug = ["--debug"] if "--debug" in sys.argv else []  # the application takes it off the line
    try:
        return start(parsed([*context.args, *debug], prog="penstock worker"))
    except SystemExit as ended:  # argparse has printed its help
        return int(ended.code or 0)
