"""DeepSpeed's own options: a file or a table, what of it a person may set, and what the record of a run holds."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.backends.deepspeed.options import OURS, merged, mistake, passed_on
from penstock.pipeline.config.load import Config, ConfigError, from_json, load, to_json

HUGGING_FACE = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto", "sub_group_size": 1000000, "contiguous_gradients": True},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}  # fmt: skip
"""As the documentation of transformers has them."""


def nested(name: str, value: Any) -> dict[str, Any]:
    first, _, rest = name.partition(".")
    return {first: nested(rest, value) if rest else value}


def configured(tmp_path: Path, trainer: str) -> Config:
    file = tmp_path / "run.toml"
    file.write_text(f'[run]\nsteps = 1\n[model]\npath = "m"\n[data]\nsource = "d.jsonl"\n[trainer]\n{trainer}', encoding="utf-8")
    return load(file)


@pytest.mark.parametrize("name", OURS)
def test_what_penstock_decides_is_refused_in_one_line_unless_it_is_auto(name: str) -> None:
    line = mistake(nested(name, 7))
    assert line is not None and line.startswith(f"trainer.deepspeed_config: {name} ") and "\n" not in line
    assert mistake(nested(name, "auto")) is None


def test_a_line_names_the_key_to_use_instead() -> None:
    for name, key in {
        "gradient_clipping": "trainer.max_grad_norm", "zero_optimization.stage": "trainer.zero_stage", "bf16": "trainer.dtype",
        "zero_optimization.offload_param.device": "trainer.offload", "scheduler": "trainer.lr_schedule", "optimizer": "trainer.lr",
    }.items():  # fmt: skip
        assert key in str(mistake(nested(name, {"type": "Lamb"} if name == "optimizer" else 1)))


def test_a_file_of_hugging_face_says_only_what_is_not_auto() -> None:
    assert mistake(HUGGING_FACE) is None
    assert passed_on(HUGGING_FACE) == {"zero_optimization": {"sub_group_size": 1000000, "contiguous_gradients": True}}


def test_options_are_laid_over_ours_table_by_table_and_change_neither() -> None:
    ours = {"zero_optimization": {"stage": 2, "overlap_comm": False}, "steps_per_print": 9}
    found = merged(ours, {"zero_optimization": {"overlap_comm": True}, "wall_clock_breakdown": True})
    assert found == {"zero_optimization": {"stage": 2, "overlap_comm": True}, "steps_per_print": 9, "wall_clock_breakdown": True}
    assert ours["zero_optimization"] == {"stage": 2, "overlap_comm": False}


def test_the_record_of_a_run_holds_what_a_file_said_when_it_was_read(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(HUGGING_FACE), encoding="utf-8")
    from_file = configured(tmp_path, 'backend = "deepspeed"\ndeepspeed_config = "ds.json"')
    file.unlink()
    assert from_json(to_json(from_file)).trainer.deepspeed_config == HUGGING_FACE
    table = 'backend = "deepspeed"\n[trainer.deepspeed_config.zero_optimization]\nsub_group_size = 5'
    assert configured(tmp_path, table).trainer.deepspeed_config == {"zero_optimization": {"sub_group_size": 5}}


@pytest.mark.parametrize(("trainer", "line"), [
    ('deepspeed_config = "none.json"\nbackend = "deepspeed"', r"cannot read .*none\.json: No such file"),
    ('deepspeed_config = "run.toml"\nbackend = "deepspeed"', r"run\.toml is not valid JSON"),
    ("[trainer.deepspeed_config]\nwall_clock_breakdown = true", r"trainer\.deepspeed_config: only trainer\.backend = 'deepspeed' reads it"),
    ('backend = "deepspeed"\n[trainer.deepspeed_config]\ngradient_clipping = 2.0', r"gradient_clipping .* trainer\.max_grad_norm"),
    ('offload = "optimizer"', r"trainer\.offload: 'optimizer' needs trainer\.backend = 'deepspeed'"),
    ('offload = "optimizer"\nbackend = "deepspeed"\nzero_stage = 0', r"trainer\.offload: 'optimizer' needs trainer\.zero_stage 1 to 3"),
    ('offload = "parameters"\nbackend = "deepspeed"\nzero_stage = 2', r"trainer\.offload: 'parameters' needs trainer\.zero_stage = 3"),
])  # fmt: skip
def test_what_cannot_be_is_refused_where_the_configuration_is_read(tmp_path: Path, trainer: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        configured(tmp_path, trainer)
