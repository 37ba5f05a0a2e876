"""`penstock init` and `check`: from a model, data and a reward to a configuration, and from that to the samples of a step.

The rule: neither needs a broker nor leaves anything running.
"""

from pathlib import Path
from typing import Annotated

import typer

from penstock.pipeline.cli.options import ConfigFile, Json, Overrides, emit, notify


def init(
    *,
    model: Annotated[str, typer.Option("--model", metavar="DIR", help="A Hugging Face model's directory, or hf:ORG/NAME.")],
    data: Annotated[str, typer.Option("--data", metavar="SOURCE", help="A JSONL or Parquet file, hf:NAME, file.py:function, …")],
    reward: Annotated[list[str], typer.Option("--reward", metavar="FILE.py:FUNCTION", help="Or a built-in one: exact_match; repeatable.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it there instead of printing it.")] = None,
    prompt_field: Annotated[str | None, typer.Option(help="The column of the prompt, where its name does not show it.")] = None,
    answer_field: Annotated[str | None, typer.Option(help="The column of the answer, likewise.")] = None,
    json: Json = False,
) -> None:
    """Print a commented configuration for this model, data, reward and machine."""
    from penstock.infra.errors import ConfigError
    from penstock.pipeline.launch.check.propose import propose

    if output is not None and output.exists():
        raise ConfigError(f"--output {output}: there is such a file already; name another one, or remove it")
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
    """Try all that can fail later: data, model, reward, disk, GPUs; draw the samples of a step and judge them."""
    from penstock.infra.backends.processor import this_cpu
    from penstock.pipeline.config.load import load
    from penstock.pipeline.launch.placement import visible_gpus

    report(load(config, overrides or [], gpus=len(visible_gpus()), cpu=this_cpu()), samples=True, json=json)
    if not json:
        notify(f"all is well; start it: penstock run {config}")


def report(config: object, *, samples: bool, json: bool) -> None:
    """Print what `preflight.check` finds, as it is found; with `json`, all at once."""
    from penstock.pipeline.config.load import Config
    from penstock.pipeline.launch.check import preflight

    assert isinstance(config, Config)
    found = preflight.check(config, tell=_nothing if json else _print, samples=samples, notify=notify)
    if json:
        emit({**found.lines, "samples": list(found.samples)})


def _print(name: str, text: str) -> None:
    print(f"{name:<10}  {text}", flush=True)


def _nothing(_name: str, _text: str) -> None:
    return
