"""`penstock doctor` and `penstock model`: this machine and what is on it. The rule: doctor changes nothing."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.pipeline.cli.options import Bootstrap, Json, emit, say

model_app = typer.Typer(help="Models to begin with.")


@model_app.callback()
def _models() -> None:
    """Keeps `tiny` a subcommand although it is the only one."""


@model_app.command()
def tiny(
    directory: Annotated[Path, typer.Argument(help="Where to write it.")],
    *,
    seed: Annotated[int, typer.Option(help="Of its weights and of its warm start.")] = 0,
    json: Json = False,
) -> None:
    """Make a tiny Qwen3 with its tokenizer and a short supervised warm start; nothing is downloaded."""
    from penstock.pipeline.envs.tiny.model import make_tiny_model

    def progress(step: int, steps: int, loss: float) -> None:
        if step % 50 == 0 or step == steps:
            say(f"warm start {step}/{steps}, loss {loss:.3f}")

    path = make_tiny_model(directory, seed=seed, progress=progress)
    if json:
        emit({"path": str(path), "seed": seed})
    else:
        print(path)


def doctor(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="A TOML file whose GPUs are to be placed, too.")] = None,
    *,
    bootstrap: Bootstrap = "embedded",
    json: Json = False,
) -> int:
    """Check this machine: packages, Java, broker, disk, memory, GPUs; says what to do about each."""
    from penstock.pipeline.config.load import load
    from penstock.pipeline.launch.doctor import as_text, examine

    findings = examine(bootstrap=bootstrap, config=None if config is None else load(config))
    if json:
        emit([finding.as_dict() for finding in findings])
    else:
        print(as_text(findings))
    return 1 if any(finding.level == "fail" for finding in findings) else 0
