"""`penstock run`, `create` and `worker`: start runs and workers. The rule: `run` starts nothing that `create` and `worker` could not."""

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
    security_settings,
)

RunId = Annotated[
    str | None, typer.Option("--run-id", help="Id of the new run: a-z, 0-9 and '-', at most 64, no '-' first. Made up if absent.")
]


def run(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="A TOML file; see docs/configuration.md.")] = None,
    *,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Go on with a run that was stopped, instead of CONFIG.")
    ] = None,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all that `penstock check` does, and draw nothing.")] = False,
    run_id: RunId = None,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live view, as without a terminal.")] = False,
    trust_code: TrustRun = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> int:
    """Run everything on this machine: broker, topics, workers, live view, report."""
    from penstock.infra.backends.processor import this_cpu
    from penstock.infra.paths import make_files_private
    from penstock.pipeline.config.load import ConfigError, load
    from penstock.pipeline.launch.create import usable
    from penstock.pipeline.launch.placement import visible_gpus

    make_files_private()
    if trust_code and resume is None:
        raise ConfigError("--trust-code is for --resume RUN: the code that your CONFIG names is yours")
    if resume is not None:
        if config is not None or dry_run or run_id is not None:
            raise ConfigError("--resume goes on with a run as it was created: give it no CONFIG, --run-id or --dry-run")
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
        # Only looking downloads nothing: a data set that is not here is reported as such.
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
        report(loaded, samples=False, json=json)
        return 0
    from penstock.pipeline.launch.launcher import launch

    return launch(loaded, notify=notify, live=not plain and not json, json_out=json, run_id=run_id)


def create(config: ConfigFile, *, overrides: Overrides = None, run_id: RunId = None, json: Json = False) -> None:
    """Check a configuration, register its run and make its topics; start no worker."""
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


def worker(
    role: Annotated[str, typer.Argument(metavar="ROLE", help="feeder, environment, rollout, scorer, trainer, evaluator or tracker.")],
    *,
    run: Annotated[str, typer.Option("--run", help="The run's id; a worker that is early waits for it.")],
    bootstrap: Bootstrap = "embedded",
    slot: Annotated[int | None, typer.Option(min=0, help="This worker's number among those of its role; names it.")] = None,
    pool: Annotated[str | None, typer.Option(help="Which of rollout.pools a rollout worker joins; that of its slot if absent.")] = None,
    model: Annotated[Path | None, typer.Option(help="The model's directory on this machine, if not where the configuration says.")] = None,
    run_key: Annotated[
        Path | None, typer.Option("--run-key", metavar="FILE", help="The run's key, copied from runs/RUN/run.key; mode 0400, 0440 or 0600.")
    ] = None,
    trust_code: TrustRun = False,
    security: Security = None,
    health: Annotated[
        str | None, typer.Option(metavar="[HOST:]PORT", help="Answer /livez, /readyz and /metrics there; loopback if there is no host.")
    ] = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="Print each line of the log as a JSON object.")] = False,
) -> int:
    """Run one worker of a run, anywhere that reaches the broker, until the run is over."""
    from penstock.infra.errors import ConfigError
    from penstock.pipeline.config.plugins import nearest
    from penstock.pipeline.config.security import credentials
    from penstock.pipeline.runtime.main import work
    from penstock.pipeline.runtime.registration.trust import Trust
    from penstock.pipeline.runtime.roles import ROLES
    from penstock.topics.catalogue import check_run_id

    if role not in ROLES:
        raise ConfigError(f"there is no role {role!r}: {', '.join(ROLES)}{nearest(role, list(ROLES))}")
    try:
        check_run_id(run)  # a worker waits for a run that is not registered yet, but a malformed id can never be
    except ValueError as error:
        raise ConfigError(f"--run: {error}") from error
    settings = credentials(security_settings(security))
    embedded_broker = bootstrap == "embedded"
    if embedded_broker:
        from penstock.infra.broker import embedded

        bootstrap = embedded.start(progress=notify).bootstrap
    return work(
        role,
        run=run,
        bootstrap=bootstrap,
        slot=slot,
        pool=pool,
        model=None if model is None else str(model),
        trust=Trust(run_key=run_key, code=trust_code),
        security={} if embedded_broker else settings,
        debug="--debug" in sys.argv,
        health=health,
        log_json=log_json,
    )
