"""`penstock init` and `check`: write a configuration for a model, data and reward; validate one. Neither needs a broker."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.pipeline.cli.options import ConfigFile, Json, Overrides, emit, notify


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
    from penstock.infra.backends.processor import this_cpu
    from penstock.pipeline.config.load import load
    from penstock.pipeline.launch.placement import visible_gpus

    report(load(config, overrides or [], gpus=len(visible_gpus()), cpu=this_cpu()), samples=True, json=json)
    if not json:
        notify(f"all is well; start it: penstock run {config}")


def report(config: object, *, samples: bool, json: bool) -> None:
    """Print the results of `preflight.check` one by one; with `json`, together at the end."""
    from penstock.pipeline.config.load import Config
    from penstock.pipeline.launch.check import preflight

    assert isinstance(config, Config)
    results = preflight.check(config, tell=_nothing if json else _print, samples=samples, notify=notify)
    if json:
        emit({**results.lines, "samples": list(results.samples)})


def _print(name: str, text: str) -> None:
    print(f"{name:<10}  {text}", flush=True)


def _nothing(_name: str, _text: str) -> None:
    return
