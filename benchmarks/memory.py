"""The memory estimate against measured peaks: a run of a few steps, with the peak resident memory that every worker reports.

    python -m benchmarks memory .penstock/smollm2 [--steps 3] [--set trainer.lora_rank=16]
    python -m benchmarks memory .penstock/smollm2 --shape qwen2.5-0.5b --set trainer.lora_rank=16

Configuration and task are those of examples/smollm2.toml with the overrides. With `--shape` the model has random weights in the sizes of
a known one, and the tokenizer of the directory. Groups with equal rewards are trained too, since a random model solves nothing. Prints
estimate and peak of each role, their ratio, and the parts of the estimate.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.command import ROOT, parser_of, penstock_json, set_words, with_numbers, with_settings
from penstock.infra.paths import run_directory
from penstock.pipeline.config.load import from_json
from penstock.pipeline.launch.check.memory import estimates, shape_of

EXAMPLE = ROOT / "examples" / "smollm2.toml"
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True,
    },
}  # fmt: skip


def with_random_weights(shape: str, tokenizer: Path, directory: Path) -> Path:
    """A Qwen2 of these sizes in bfloat16, with another model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    Qwen2ForCausalLM(Qwen2Config(**SHAPES[shape], eos_token_id=loaded.eos_token_id)).save_pretrained(directory)
    loaded.save_pretrained(directory)
    return directory


def run(model: Path, steps: int, settings: list[str]) -> str:
    """Id of a finished run. Raises `SystemExit` if it fails."""
    overrides = [
        f'model.path="{model}"', f"run.steps={steps}", "algorithm.filter_zero_variance=false", "trainer.checkpoint_every=0",
        "trainer.export=false", "eval.limit=32", "mlflow.enabled=false", *settings,
    ]  # fmt: skip
    return str(penstock_json("run", str(EXAMPLE), *set_words(overrides))["run"])


def peaks(run_id: str) -> dict[str, float]:
    """Role -> largest peak in bytes that its workers report."""
    highest: dict[str, float] = {}
    for line in (run_directory(run_id) / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        for name, value in json.loads(line).items():
            if name.endswith("/peak_rss_mib"):
                role = name.split("/")[1].partition("-")[0]
                highest[role] = max(highest.get(role, 0.0), value * 2**20)
    return highest


def main(arguments: Sequence[str]) -> None:
    """Run, compare, print."""
    parser = parser_of(__name__, __doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--shape", choices=SHAPES)
    with_numbers(parser, steps=3)
    with_settings(parser)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        model = chosen.model.resolve()
        if chosen.shape:
            model = with_random_weights(chosen.shape, model, Path(directory) / chosen.shape)
        run_id = run(model, chosen.steps, chosen.settings)
        config = from_json((run_directory(run_id) / "config.json").read_text(encoding="utf-8"))
        shape = shape_of(json.loads((model / "config.json").read_text(encoding="utf-8")))
    assert shape is not None
    measured = peaks(run_id)
    print(
        f"{run_id}: {shape.parameters / 1e6:.0f} million parameters, trainer {config.trainer.dtype}, LoRA rank {config.trainer.lora_rank}"
    )
    for each in estimates(config, shape):
        peak = measured[each.role]
        counted = ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in each.parts.items() if size)
        sizes = f"estimate {each.total / 2**20:6,.0f} MiB, peak {peak / 2**20:6,.0f}, ratio {each.total / peak:.2f}"
        print(f"{each.role:<10} {sizes}: {counted}")
    others = ", ".join(f"{role} {size / 2**20:,.0f}" for role, size in sorted(measured.items()))
    print(f"peaks of all roles, MiB: {others}")
