"""Commands that plan and start runs: init, check, run, create, worker, fork, plan."""

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from penstock.pipeline.cli.options import (
    Bootstrap,
    ConfigFile,
    Json,
    Overrides,
    Run,
    RunId,
    Security,
    TrustRun,
    at,
    connected,
    emit,
    group_numbers,
    loaded,
    notify,
    reading,
)

if TYPE_CHECKING:
    from penstock.pipeline.config.load import Config
    from penstock.pipeline.launch.planning.search import Cluster


def init(
    *,
    model: Annotated[str, typer.Option("--model", metavar="DIR", help="Directory of a Hugging Face model, or hf:ORG/NAME.")],
    data: Annotated[str, typer.Option("--data", metavar="SOURCE", help="A JSONL or Parquet file, hf:NAME, file.py:function, …")],
    reward: Annotated[
        list[str], typer.Option("--reward", metavar="REWARD", help="FILE.py:FUNCTION, or built-in: exact_match; repeatable.")
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to FILE instead of printing.")] = None,
    prompt_field: Annotated[str | None, typer.Option(help="Column of the prompt, if it is not detected.")] = None,
    answer_field: Annotated[str | None, typer.Option(help="Column of the reference answer, if it is not detected.")] = None,
    json: Json = False,
) -> None:
    """Print a commented configuration for this model, data, reward and machine."""
    from penstock.infra.errors import ConfigError
    from penstock.pipeline.launch.check.propose import propose

    if output is not None and output.exists():
        raise ConfigError(f"--output {output}: the file already exists; give another path, or remove the file")
    text = propose(
        model, data, reward, base=(output.parent if output is not None else Path()).resolve(), prompt_field=prompt_field,
        answer_field=answer_field, notify=notify,
    )  # fmt: skip
    if output is not None:
        output.write_text(text, encoding="utf-8")
    if json:
        emit({"config": text, "path": None if output is None else str(output)})
    elif output is None:
        print(text, end="")
    notify(f"next: penstock check {output or 'FILE.toml'}")


def check(config: ConfigFile, *, overrides: Overrides = None, json: Json = False) -> None:
    """Validate data, model, reward, disk and GPUs; generate and score the samples of one step."""
    lines = _report(loaded(config, overrides), samples=True, json=json)
    if not json:
        notify(f"{'see the warning above' if 'warning' in lines else 'no problem found'}; start the run: penstock run {config}")


def _report(config: "Config", *, samples: bool, json: bool) -> dict[str, str]:
    """Print the results of `preflight.check` as they come, or with `json` together at the end; return check -> result."""
    from penstock.pipeline.launch.check import preflight

    results = preflight.check(
        config, tell=lambda name, text: None if json else print(f"{name:<10}  {text}", flush=True), samples=samples, notify=notify
    )
    if json:
        emit({**results.lines, "samples": list(results.samples)})
    return results.lines


def run(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="A TOML file; see docs/reference/configuration.md.")] = None,
    *,
    resume: Annotated[str | None, typer.Option("--resume", metavar="RUN", help="Resume a stopped run instead of starting CONFIG.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="A.B=C", help="Override one key of the configuration; repeatable. With --resume only some keys can change."
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
    from penstock.infra.errors import ConfigError
    from penstock.infra.paths import make_files_private
    from penstock.pipeline.config.security import security_settings
    from penstock.pipeline.runtime.registration.run_registry import usable

    make_files_private()
    if trust_code and resume is None:
        raise ConfigError("--trust-code is only for --resume RUN: the code that your own CONFIG names is trusted; remove this option")
    if resume is not None:
        if config is not None or dry_run or run_id is not None:
            raise ConfigError("--resume cannot be combined with CONFIG, --run-id or --dry-run: a run is resumed with its own configuration")
        from penstock.pipeline.launch import launcher
        from penstock.pipeline.runtime.registration.run_registry import resolve

        with at(bootstrap, security, attends=True) as log:
            shown = not plain and not json
            run = resolve(log, resume, executes=True)
            return launcher.resume(run, log=log, notify=notify, live=shown, json_out=json, overrides=overrides or (), trust_code=trust_code)
    if config is None:
        raise ConfigError("penstock run needs a CONFIG, for example: penstock run examples/demo.toml")
    if bootstrap != "embedded" or security:
        secured = [f'kafka.security.{key}="{value}"' for key, value in security_settings(security).items()]
        overrides = [f'kafka.bootstrap="{bootstrap}"', *secured, *(overrides or [])]
    settings = loaded(config, overrides)
    if run_id is not None:
        usable(run_id)
    if dry_run:
        # A dry run downloads nothing, and reports a data set that is not cached as missing.
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
        _report(settings, samples=False, json=json)
        return 0
    from penstock.pipeline.launch.launcher import launch

    return launch(settings, notify=notify, live=not plain and not json, json_out=json, run_id=run_id)


def create(
    config: ConfigFile,
    *,
    overrides: Overrides = None,
    run_id: RunId = None,
    if_absent: Annotated[
        bool, typer.Option("--if-absent", help="Succeed if the run already exists with the same configuration, data and code.")
    ] = False,
    topics: Annotated[
        Literal["create", "existing"], typer.Option(help="`existing`: expect the topics to exist, and report wrong settings.")
    ] = "create",
    wait_broker: Annotated[
        float, typer.Option("--wait-broker", min=0, metavar="SECONDS", help="Wait up to this long for a broker that does not respond yet.")
    ] = 0.0,
    json: Json = False,
) -> None:
    """Validate a configuration, register its run and create its topics; start no worker."""
    from penstock.infra.errors import ConfigError
    from penstock.pipeline.launch.check import preflight
    from penstock.pipeline.launch.check.changes import require_same
    from penstock.pipeline.launch.create import create as register
    from penstock.pipeline.launch.create import require_topics
    from penstock.pipeline.runtime.registration.run_registry import find, usable

    if (if_absent or topics == "existing") and not run_id:
        raise ConfigError(f"--{'if-absent' if if_absent else 'topics existing'} needs --run-id RUN: a generated id is always new")
    settings = loaded(config, overrides)
    with connected(settings.kafka.bootstrap, settings.kafka.security, wait_s=wait_broker) as log:
        if (record := find(log, usable(run_id)) if if_absent and run_id else None) is not None:
            require_same(record, settings, notify=notify)
        else:
            if topics == "existing" and run_id:
                require_topics(settings, usable(run_id), log, notify=notify)
            checked = preflight.check(settings, tell=preflight.important(notify), samples=False, here=False, notify=notify)
            record = register(settings, log=log, run_id=run_id, checked=checked.info, notify=notify)
    if json:
        emit({"run": record.run, "status": record.status, "bootstrap": log.bootstrap})
    else:
        print(record.run)
        notify(f"start the workers: penstock worker ROLE --run {record.run} --bootstrap {log.bootstrap}")


def worker(context: typer.Context) -> int:
    """Run one worker of a run until the run ends, on any machine that can reach the broker."""
    from penstock.pipeline.runtime.main import parsed, start

    debug = ["--debug"] if "--debug" in sys.argv else []  # `main` has removed it from the arguments
    try:
        return start(parsed([*context.args, *debug], prog="penstock worker"))
    except SystemExit as ended:  # argparse has printed its help
        return int(ended.code or 0)


def fork(
    run: Run,
    *,
    from_step: Annotated[
        int | None,
        typer.Option("--from-step", min=0, metavar="S", help="Start from the state after S steps; default: after all steps."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change one key of the configuration; repeatable.")
    ] = None,
    without: Annotated[
        str | None, typer.Option("--without", metavar="GROUP[,GROUP]", help="Never use the data rows of these groups of the parent run.")
    ] = None,
    run_id: RunId = None,
    start: Annotated[bool, typer.Option("--start", help="Start the new run at once, as `penstock run --resume` does.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="With --start: plain lines instead of the live view.")] = False,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory with the parent's config.json and tokenizer, if not its model.path.")
    ] = None,
    trust_code: TrustRun = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> int:
    """Register a new run that starts from another run's weights, optimizer state and data position after some of its steps."""
    from penstock.infra.paths import make_files_private
    from penstock.pipeline.replay.recording import Recording, prepare
    from penstock.pipeline.runtime.registration.run_registry import resolve
    from penstock.pipeline.runtime.registration.trust import Trust, require_trusted

    make_files_private()
    with at(bootstrap, security, attends=start, start=True) as log:
        with closing(Recording.open(log, resolve(log, run, executes=True), model=model)) as recording:
            require_trusted(recording.registration, trust=Trust(code=trust_code), notify=notify)
            prepare(recording.config)
            from penstock.pipeline.replay.fork import fork as make  # imports torch, which reads the environment then

            created = make(recording, from_step, overrides or [], run_id=run_id, notify=notify, without=group_numbers(without))
        new, origin = created.record.run, created.origin
        state = f"{origin['run']} after {origin['step']} steps"
        notify(f"{new} starts from {state}; the weights, digest {origin['digest'][:16]}…, are in {created.directory}")
        if start:
            from penstock.pipeline.launch.launcher import resume

            return resume(new, log=log, notify=notify, live=not plain and not json, json_out=json)
    if json:
        result = {"run": new, "status": created.record.status, "forked_from": origin}
        emit({**result, "directory": str(created.directory), "bootstrap": log.bootstrap})
    else:
        print(new)
        notify(f"start the new run: penstock run --resume {new}")
    return 0


def plan(
    *,
    accelerators: Annotated[int | None, typer.Option(min=2, help="Number of accelerators for rollout and training together.")] = None,
    speed: Annotated[
        str | None,
        typer.Option(metavar="N:TOKENS_PER_S,…", help="Tokens per second of an engine by concurrent samples, e.g. 1:60,32:1400,128:3200."),
    ] = None,
    train_speed: Annotated[
        float | None, typer.Option(metavar="TOKENS_PER_S", help="Tokens per second of one training accelerator.")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="LENGTHS", help="uniform:LONGEST, lognormal:MEAN:SIGMA[:LONGEST], constant:N, or a file with one length per line."
        ),
    ] = None,
    max_lag: Annotated[int, typer.Option(min=0, help="Largest lag of a trained sample, in policy versions.")] = 4,
    samples_per_prompt: Annotated[int, typer.Option(min=1, help="Samples per prompt.")] = 8,
    prompts_per_step: Annotated[int | None, typer.Option(min=1, help="Prompts per optimizer step; default: the best of 8 to 128.")] = None,
    steps_per_version: Annotated[int, typer.Option(min=1, help="Optimizer steps per published policy version.")] = 1,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Concurrent samples per engine; default: the largest number in --speed.")
    ] = None,
    engine_size: Annotated[int, typer.Option(min=1, help="Accelerators of one engine (tensor parallel).")] = 1,
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="DIR", help="Consider only splits on which this model fits into memory, and print settings."),
    ] = None,
    load_s: Annotated[float, typer.Option(min=0, help="Seconds to load new weights into an engine.")] = 0.0,
    publish_s: Annotated[float, typer.Option(min=0, help="Seconds from the end of a step until engines can load its weights.")] = 0.0,
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG", help="Print broker traffic, disk space and partitions of this run; needs --step-s, takes the next options."
        ),
    ] = None,
    step_s: Annotated[float | None, typer.Option(min=0.001, help="Seconds of an optimizer step.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="With --cluster: rollout workers; default: rollout.workers.")] = None,
    machines: Annotated[int | None, typer.Option(min=1, help="With --cluster: rollout machines; default: one per worker.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Mean prompt length in tokens; default: data.max_prompt_tokens.")] = None,
    dropped: Annotated[float, typer.Option(min=0, max=0.99, help="Share of groups that are filtered, stale or failed.")] = 0.0,
    delta: Annotated[
        float | None, typer.Option(min=0, max=1, help="Size of a weight delta relative to the full weights; default: estimated.")
    ] = None,
    from_run: Annotated[
        str | None, typer.Option(metavar="RUN|DIR", help="Use the times measured in a run; compare numbers of workers and schedules.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="PATH", help="Plot speed by split to a .png or .svg file.")] = None,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Find the best split of accelerators between rollout and training, by simulating each split with the rules of live runs."""
    from penstock.infra.errors import ConfigError

    try:
        if plot is not None:
            from penstock.pipeline.launch.planning.rendering import check_path

            check_path(plot)
        if cluster is not None:
            _cluster(
                cluster, step_s=step_s, workers=workers, machines=machines, lengths=lengths, prompt_tokens=prompt_tokens, dropped=dropped,
                delta=delta, json=json,
            )  # fmt: skip
            return
        if from_run is not None:
            _from_run(from_run, accelerators=accelerators, max_lag=max_lag, bootstrap=bootstrap, security=security, plot=plot, json=json)
            return
        required = {"--accelerators": accelerators, "--speed": speed, "--train-speed": train_speed, "--lengths": lengths}
        if accelerators is None or speed is None or train_speed is None or lengths is None:
            missing = ", ".join(name for name, value in required.items() if value is None)
            raise ValueError(f"missing options: {missing}; give these too, or --from-run RUN to take the times from a run")
        searched = _described(
            accelerators, speed, train_speed, lengths, concurrency=concurrency, engine_size=engine_size, model=model, max_lag=max_lag,
            samples_per_prompt=samples_per_prompt, prompts_per_step=prompts_per_step, steps_per_version=steps_per_version,
            load_s=load_s, publish_s=publish_s,
        )  # fmt: skip
        _show(searched, plot=plot, json=json)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _described(
    accelerators: int, speed: str, train_speed: float, lengths: str, *, concurrency: int | None, engine_size: int, model: Path | None,
    max_lag: int, samples_per_prompt: int, prompts_per_step: int | None, steps_per_version: int, load_s: float, publish_s: float,
) -> "Cluster":  # fmt: skip
    """Return the accelerators and the workload that the options of `penstock plan` describe. Raises `ValueError`."""
    from penstock.pipeline.launch.planning.search import STEP_SIZES, Cluster
    from penstock.pipeline.launch.planning.workload import Workload, from_speeds, parse
    from penstock.pipeline.scheduling.rules import preset

    points, distribution = _speeds(speed), parse(lengths)
    settings = None
    if model is not None:
        from penstock.infra.backends.hardware import visible_gpus
        from penstock.pipeline.launch.check.fit import memory_or_usual, planned

        memory = (min(memory_or_usual(visible_gpus() or ("0",), notify)),) * accelerators  # the memory of the smallest GPU here
        settings = planned(model, memory, engine_size=engine_size, samples_per_prompt=samples_per_prompt, longest=distribution.longest)
    if not train_speed > 0:
        raise ValueError(f"--train-speed {train_speed:g}: expected tokens per second above 0")
    sizes = STEP_SIZES if prompts_per_step is None else (prompts_per_step,)
    work = Workload(
        schedule=preset("pipelined", prompts_per_step=sizes[0], samples_per_prompt=samples_per_prompt, steps_per_version=steps_per_version),
        steps=1, lengths=distribution, engines=1, concurrency=concurrency or max(samples for samples, _ in points),
        decode=from_speeds(points), train_token_s=1.0 / train_speed, load_s=load_s, publish_s=publish_s,
    )  # fmt: skip
    return Cluster(accelerators=accelerators, base=work, max_lag=max_lag, engine_size=engine_size, step_sizes=sizes, settings=settings)


def _cluster(
    path: Path, *, step_s: float | None, workers: int | None, machines: int | None, lengths: str | None, prompt_tokens: int | None,
    dropped: float, delta: float | None, json: bool,
) -> None:  # fmt: skip
    """Print broker traffic, disk space and partitions of a run (`penstock plan --cluster`)."""
    from penstock.pipeline.config.load import load
    from penstock.pipeline.launch.planning.cluster import ClusterPlan, as_json, as_text
    from penstock.pipeline.launch.planning.workload import parse

    if step_s is None:
        raise ValueError("--cluster needs --step-s, the seconds per optimizer step; `penstock report RUN` shows them for an earlier run")
    config = load(path, [] if workers is None else [f"rollout.workers={workers}"])
    tokens = config.max_completion_tokens if lengths is None else round(parse(lengths).mean)
    plan = ClusterPlan(
        config=config, step_s=step_s, machines=machines or config.rollout.workers, tokens=tokens, dropped=dropped, delta=delta,
        prompt_tokens=prompt_tokens or config.data.max_prompt_tokens,
    )  # fmt: skip
    emit(as_json(plan)) if json else print(as_text(plan), end="")


def _from_run(
    run: str, *, accelerators: int | None, max_lag: int, bootstrap: str, security: list[str] | None, plot: Path | None, json: bool
) -> None:
    """Simulate variants of a recorded run and print them; with `accelerators`, find their best split."""
    from penstock.pipeline.launch.planning import recorded

    if plot is not None and accelerators is None:
        raise ValueError("--plot needs --accelerators with --from-run: it plots the speed of each split")
    with reading(run, bootstrap, security) as (log, run_id):
        record = recorded.read(log, run_id)
    if accelerators is None:
        variants = recorded.compare(record, run=run_id)
        emit(recorded.as_json(variants)) if json else print(recorded.as_text(variants), end="")
        return
    from penstock.pipeline.launch.planning.search import Cluster

    config, work = record.config, recorded.workload(record)
    in_flight = config.engine.swaps_in_flight
    cluster = Cluster(
        accelerators=accelerators, base=work, max_lag=max_lag if in_flight else min(max_lag, 1),
        engine_size=max(1, config.rollout.gpus_per_worker), trainer_size=max(1, config.trainer.gpus, config.trainer.processes),
        step_sizes=(work.schedule.prompts_per_step,), in_flight=in_flight,
    )  # fmt: skip
    _show(cluster, plot=plot, json=json)


def _speeds(text: str) -> list[tuple[int, float]]:
    """Parse `--speed`: (concurrent samples, tokens per second) of an engine. Raises `ValueError`."""
    try:
        return [(int(samples), float(speed)) for samples, speed in (word.split(":") for word in text.split(","))]
    except ValueError:
        raise ValueError(f"--speed {text!r}: expected SAMPLES:TOKENS_PER_S, separated by commas, as in 1:60,32:1400") from None


def _show(cluster: "Cluster", *, plot: Path | None, json: bool) -> None:
    """Search the best split of a cluster, print it, and plot all splits to the file `plot` unless it is None."""
    from penstock.pipeline.launch.planning.rendering import plan_as_json, plan_as_text
    from penstock.pipeline.launch.planning.search import search

    result = search(cluster)
    if plot is not None:
        from penstock.pipeline.launch.planning.rendering import plot as write_plot

        write_plot(result, plot)
        notify(f"wrote {plot}")
    emit(plan_as_json(result)) if json else print(plan_as_text(result), end="")
