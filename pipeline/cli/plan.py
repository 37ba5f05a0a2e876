"""`penstock plan`: simulates splits of accelerators between rollout and training."""

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.pipeline.cli.options import Bootstrap, Json, Security, emit, notify, reading


def plan(
    *,
    accelerators: Annotated[int | None, typer.Option(min=2, help="Number of accelerators for rollout and training together.")] = None,
    speed: Annotated[
        str | None,
        typer.Option(metavar="N:TOKENS_PER_S,…", help="Speed of an engine by number of concurrent samples: 1:60,32:1400,128:3200."),
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
    max_lag: Annotated[int, typer.Option(min=0, help="Largest staleness of a trained sample, in versions.")] = 4,
    samples_per_prompt: Annotated[int, typer.Option(min=1, help="K.")] = 8,
    prompts_per_step: Annotated[int | None, typer.Option(min=1, help="U; the best of 8 to 128 if absent.")] = None,
    steps_per_version: Annotated[int, typer.Option(min=1, help="S.")] = 1,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Concurrent samples in an engine; the largest number in --speed if absent.")
    ] = None,
    engine_size: Annotated[int, typer.Option(min=1, help="Accelerators of one engine (tensor parallel).")] = 1,
    load_s: Annotated[float, typer.Option(min=0, help="Seconds to load new weights into an engine.")] = 0.0,
    publish_s: Annotated[float, typer.Option(min=0, help="Seconds from a step's end to its weights at the engines.")] = 0.0,
    from_run: Annotated[
        str | None, typer.Option(metavar="RUN|DIR", help="Take all times from a run; compare other worker numbers and schedules.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="PATH", help="Plot speed by split to a .png or .svg file.")] = None,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Find the best split of accelerators between rollout and training, by simulation under the schedule rules of live runs."""
    from penstock.infra.errors import ConfigError

    try:
        if plot is not None:
            from penstock.pipeline.launch.planning.rendering import check_path

            check_path(plot)
        if from_run is not None:
            _from_run(from_run, accelerators=accelerators, max_lag=max_lag, bootstrap=bootstrap, security=security, plot=plot, json=json)
            return
        required = {"--accelerators": accelerators, "--speed": speed, "--train-speed": train_speed, "--lengths": lengths}
        if accelerators is None or speed is None or train_speed is None or lengths is None:
            raise ValueError(f"give {', '.join(name for name, value in required.items() if value is None)} as well, or --from-run RUN")
        from penstock.pipeline.launch.planning.search import STEP_SIZES, Cluster
        from penstock.pipeline.launch.planning.workload import Workload, from_speeds, parse
        from penstock.pipeline.scheduling.rules import preset

        points = _speeds(speed)
        if not train_speed > 0:
            raise ValueError(f"--train-speed must be above 0, not {train_speed:g}")
        sizes = STEP_SIZES if prompts_per_step is None else (prompts_per_step,)
        work = Workload(
            schedule=preset(
                "pipelined", prompts_per_step=sizes[0], samples_per_prompt=samples_per_prompt, steps_per_version=steps_per_version
            ),
            steps=1,
            lengths=parse(lengths),
            engines=1,
            concurrency=concurrency or max(samples for samples, _ in points),
            decode=from_speeds(points),
            train_token_s=1.0 / train_speed,
            load_s=load_s,
            publish_s=publish_s,
        )
        cluster = Cluster(accelerators=accelerators, base=work, max_lag=max_lag, engine_size=engine_size, step_sizes=sizes)
        _show(cluster, plot=plot, json=json)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _from_run(
    run: str, *, accelerators: int | None, max_lag: int, bootstrap: str, security: list[str] | None, plot: Path | None, json: bool
) -> None:
    """Compare variants of a recorded run; with `accelerators`, find their best split."""
    from penstock.pipeline.launch.planning import recorded, what_if

    if plot is not None and accelerators is None:
        raise ValueError("--plot shows speed by split: add --accelerators")
    with reading(run, bootstrap, security) as (log, run_id):
        record = recorded.read(log, run_id)
    if accelerators is None:
        variants = what_if.compare(record, run=run_id)
        if json:
            emit(what_if.as_json(variants))
        else:
            print(what_if.as_text(variants), end="")
        return
    from penstock.pipeline.launch.planning.search import Cluster

    config, work = record.config, recorded.workload(record)
    in_flight = config.engine.swaps_in_flight
    cluster = Cluster(
        accelerators=accelerators,
        base=work,
        max_lag=max_lag if in_flight else min(max_lag, 1),
        engine_size=max(1, config.rollout.gpus_per_worker),
        trainer_size=max(1, config.trainer.gpus, config.trainer.processes),
        step_sizes=(work.schedule.prompts_per_step,),
        in_flight=in_flight,
    )
    _show(cluster, plot=plot, json=json)


def _speeds(text: str) -> list[tuple[int, float]]:
    try:
        return [(int(samples), float(speed)) for samples, speed in (word.split(":") for word in text.split(","))]
    except ValueError:
        raise ValueError(f"--speed {text!r}: expected SAMPLES:TOKENS_PER_S, separated by commas, as in 1:60,32:1400") from None


def _show(cluster: Any, *, plot: Path | None, json: bool) -> None:
    from penstock.pipeline.launch.planning.rendering import plan_as_json, plan_as_text
    from penstock.pipeline.launch.planning.search import search

    result = search(cluster)
    if plot is not None:
        from penstock.pipeline.launch.planning.rendering import plot as write_plot

        write_plot(result, plot)
        notify(f"wrote {plot}")
    if json:
        emit(plan_as_json(result))
    else:
        print(plan_as_text(result), end="")
