"""Commands that start runs: init, check, run, create, worker and fork. `run` starts nothing that `create` and `worker` cannot."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.pipeline.cli.options import Bootstrap, ConfigFile, Json, Overrides, Run, Security, TrustRun, at, connected, emit, notify


def init(
    *,
    model: Annotated[str, typer.Option("--model", metavar="DIR", help="A Hugging Face model's directory, or hf:ORG/NAME.")],
    data: Annotated[str, typer.Option("--data", metavar="SOURCE", help="A JSONL or Parquet file, hf:NAME, file.py:function, …")],
    reward: Annotated[list[str], typer.Option("--reward", metavar="FILE.py:FUNCTION", help="Or a built-in one: exact_match; repeatable.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to FILE instead of printing.")] = None,
    prompt_field: Annotated[str | None, typer.Option(help="Column with the prompt, if its name is not a usual one.")] = None,
    answer_field: Annotated[str | None, typer.Option(help="Column with the reference answer, if its name is not a usual one.")] = None,
    json: Json = False,
) -> None:
    """Print a commented configuration for this model, data, reward and machine."""
    from penstock.infra.errors import ConfigError
    from penstock.pipeline.launch.check.propose import propose

    if output is not None and output.exists():
        raise ConfigError(f"--output {output}: the file exists already; give another path, or remove it")
    text = propose(
        model,
        data,
        reward,
        base=(output.parent if output is not None else Path()).resolve(),
        prompt_field=prompt_field,
        answer_field=answer_field,
        notify=notify,
    )
    if output is not None:
        output.write_text(text, encoding="utf-8")
    if json:
        emit({"config": text, "path": None if output is None else str(output)})
    elif output is None:
        print(text, end="")
    notify(f"next: penstock check {output or 'FILE.toml'}")


def check(config: ConfigFile, *, overrides: Overrides = None, json: Json = False) -> None:
    """Validate data, model, reward, disk and GPUs; generate and score the samples of one step."""
    from penstock.infra.backends.hardware import this_cpu
    from penstock.pipeline.config.load import load
    from penstock.pipeline.launch.placement import visible_gpus

    _report(load(config, overrides or [], gpus=len(visible_gpus()), cpu=this_cpu()), samples=True, json=json)
    if not json:
        notify(f"all is well; start it: penstock run {config}")


def _report(config: object, *, samples: bool, json: bool) -> None:
    """Print the results of `preflight.check` one by one; with `json`, together at the end."""
    from penstock.pipeline.config.load import Config
    from penstock.pipeline.launch.check import preflight

    assert isinstance(config, Config)
    results = preflight.check(
        config, tell=lambda name, text: None if json else print(f"{name:<10}  {text}", flush=True), samples=samples, notify=notify
    )
    if json:
        emit({**results.lines, "samples": list(results.samples)})


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
    from penstock.infra.backends.hardware import this_cpu
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
        _report(loaded, samples=False, json=json)
        return 0
    from penstock.pipeline.launch.launcher import launch

    return launch(loaded, notify=notify, live=not plain and not json, json_out=json, run_id=run_id)


def create(config: ConfigFile, *, overrides: Overrides = None, run_id: RunId = None, json: Json = False) -> None:
    """Validate a configuration, register its run and create its topics; start no worker."""
    from penstock.infra.backends.hardware import this_cpu
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


def fork(
    run: Run,
    *,
    from_step: Annotated[
        int | None,
        typer.Option("--from-step", min=0, metavar="S", help="Start from the state after S steps; after the last step if absent."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change one key of the configuration; repeatable.")
    ] = None,
    run_id: RunId = None,
    start: Annotated[bool, typer.Option("--start", help="Start it at once, as `penstock run --resume` does.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="With --start: plain lines instead of the live view.")] = False,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory with the parent's config.json and tokenizer, if it is not its model.path.")
    ] = None,
    trust_code: TrustRun = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> int:
    """Register a new run that starts with another run's weights, optimizer and position in the data after some of its steps."""
    from penstock.infra.paths import make_files_private
    from penstock.pipeline.replay.recording import Recording, prepare, with_model
    from penstock.pipeline.runtime.registration.run_registry import resolve
    from penstock.pipeline.runtime.registration.trust import Trust, require_trusted

    make_files_private()
    with at(bootstrap, security, attends=start, start=True) as log:
        recording = Recording.open(log, resolve(log, run, executes=True))
        try:
            if model is not None:
                recording.config = with_model(recording.config, model.resolve())
            require_trusted(recording.registration, trust=Trust(code=trust_code), notify=notify)
            prepare(recording.config)
            from penstock.pipeline.replay.fork import fork as make  # imports torch, which reads the environment then

            created = make(recording, from_step, overrides or [], run_id=run_id, notify=notify)
        finally:
            recording.close()
        new, origin = created.record.run, created.origin
        state = f"{origin['run']} after {origin['step']} steps"
        notify(f"{new} starts from {state}, with the weights {origin['digest'][:16]}… in {created.directory}")
        if start:
            from penstock.pipeline.launch.launcher import resume

            return resume(new, log=log, notify=notify, live=not plain and not json, json_out=json)
    if json:
        result = {"run": new, "status": created.record.status, "forked_from": origin}
        emit({**result, "directory": str(created.directory), "bootstrap": log.bootstrap})
    else:
        print(new)
        notify(f"start it: penstock run --resume {new}")
    return 0
