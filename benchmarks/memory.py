"""The memory estimate beside measured peaks: a run of a few steps, every worker's peak of resident memory from its own reports.

    python benchmarks/memory.py .penstock/smollm2 [--steps 3] [--set trainer.lora_rank=16]
    python benchmarks/memory.py .penstock/smollm2 --shape qwen2.5-0.5b --set trainer.lora_rank=16

Configuration and task are those of examples/smollm2.toml with the overrides given. With `--shape` the model has random weights in the
sizes of a known one, and the tokenizer of the directory. Groups whose samples are rewarded alike are trained as well, since such a model
solves nothing. Printed are estimate and peak of each role, their ratio, and the parts of the estimate.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from command import PENSTOCK  # noqa: E402

from penstock.infra.paths import run_directory  # noqa: E402
from penstock.pipeline.config.load import from_json  # noqa: E402
from penstock.pipeline.launch.check.sizes import estimates, shape_of  # noqa: E402

EXAMPLE = ROOT / "examples" / "smollm2.toml"
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True,
    },
}  # fmt: skip


def with_random_weights(shape: str, tokenizer: Path, directory: Path) -> Path:
    """A Qwen2 of these sizes in bfloat16, beside another model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    found = AutoTokenizer.from_pretrained(tokenizer)
    Qwen2ForCausalLM(Qwen2Config(**SHAPES[shape], eos_token_id=found.eos_token_id)).save_pretrained(directory)
    found.save_pretrained(directory)
    return directory


def run(model: Path, steps: int, settings: list[str]) -> str:
    """A run's id. Raises `SystemExit` with the run's own words when it fails."""
    wanted = [
        f'model.path="{model}"', f"run.steps={steps}", "algorithm.filter_zero_variance=false", "trainer.checkpoint_every=0",
        "trainer.export=false", "eval.limit=32", "mlflow.enabled=false", *settings,
    ]  # fmt: skip
    command = [*PENSTOCK, "run", str(EXAMPLE), "--json", *(word for setting in wanted for word in ("--set", setting))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return str(json.loads(done.stdout)["run"])


def peaks(run_id: str) -> dict[str, float]:
    """Role -> the most bytes that a worker of it reports."""
    found: dict[str, float] = {}
    for line in (run_directory(run_id) / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        for name, value in json.loads(line).items():
            if name.endswith("/peak_rss_mib"):
                role = name.split("/")[1].partition("-")[0]
                found[role] = max(found.get(role, 0.0), value * 2**20)
    return found


def main() -> None:
    """Run, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    chosen = parser.parse_args()
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
        print(
            f"{each.role:<10} estimate {each.total / 2**20:6,.0f} MiB, peak {peak / 2**20:6,.0f}, ratio {each.total / peak:.2f}: {counted}"
        )
    others = ", ".join(f"{role} {size / 2**20:,.0f}" for role, size in sorted(measured.items()))
    print(f"peaks of all roles, MiB: {others}")


if __name__ == "__main__":
    main()
