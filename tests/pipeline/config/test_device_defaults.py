"""Defaults that depend on the device: the table in docs/how-to/gpus.md is that of the code. `make format` rewrites it."""

from pathlib import Path
from typing import Any

import pytest

from docs.generate import table
from penstock.pipeline.config.load import DEVICE_DEFAULTS, ConfigError, from_json, load, to_json, with_device_defaults
from penstock.pipeline.runtime.sampling import request_of
from tests.support.strategies import a_prompt

DOCS = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "gpus.md"
BEGIN, END = "<!-- device defaults -->\n", "<!-- /device defaults -->"


def parts() -> tuple[str, str, str]:
    before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    return before + BEGIN, table, END + after


def as_markdown() -> str:
    rows = []
    for default in DEVICE_DEFAULTS:
        section = default.key.partition(".")[0]
        only = f", with `{section}.{default.only[0]} = {_toml(default.only[1])}`" if default.only else ""
        only += f", without `{section}.{default.unless[0]} = {_toml(default.unless[1])}`" if default.unless else ""
        rows.append((f"`{default.key}`", f"`{_toml(default.cpu)}`", f"`{_toml(default.gpu)}`{only}", default.why))
    return table(("key", "on a CPU", "on a GPU", "why"), *rows)


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def test_the_table_of_the_documentation_is_the_one_in_the_code() -> None:
    assert parts()[1] == as_markdown()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text('[run]\nsteps = 1\n[model]\npath = "m"\n[data]\nsource = "d.jsonl"\n[rollout]\nengine = "vllm"\n')
    return tmp_path / "run.toml"


def values(config: Any) -> dict[str, Any]:
    table = config.model_dump()
    return {default.key: table[default.key.partition(".")[0]][default.key.partition(".")[2]] for default in DEVICE_DEFAULTS}


def test_a_configuration_that_is_read_beside_a_gpu_has_its_defaults_and_keeps_them_on_every_machine(file: Path) -> None:
    overrides = ["trainer.backend=deepspeed"]
    assert values(load(file, overrides)) == {default.key: default.cpu for default in DEVICE_DEFAULTS}
    here = load(file, overrides, gpus=1)
    assert values(here) == {default.key: default.gpu for default in DEVICE_DEFAULTS}
    assert from_json(to_json(here)) == here  # a record says all of it, whoever reads it
    assert here.correction == "tis"  # rounding makes engine and trainer differ


def test_samples_of_quantised_weights_are_corrected_unless_the_ratio_is_to_the_behaviour_policy(file: Path) -> None:
    fp8 = ["rollout.vllm.quantization=fp8_per_tensor", "rollout.dtype=float32", "schedule.mode=synchronous"]
    assert load(file, fp8[1:]).correction == "none"
    assert load(file, fp8).correction == "tis"
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.quantization: .* remove algorithm\.correction, or set it to 'tis'"):
        load(file, [*fp8, "algorithm.correction=none"])
    assert load(file, [*fp8, "algorithm.correction=none", "algorithm.proximal=behaviour"]).correction == "none"


def test_what_a_person_chose_stands_and_so_does_a_device_of_its_own(file: Path) -> None:
    chosen = load(file, ["trainer.dtype=float32", "rollout.device=cpu"], gpus=2)
    assert (chosen.trainer.dtype, chosen.trainer.tf32) == ("float32", True)
    assert (chosen.rollout.dtype, chosen.rollout.engine_process) == ("float32", False)
    assert load(file, ["trainer.device=cuda"]).trainer.dtype == "bfloat16"


def test_a_key_holds_for_its_engine_or_backend_alone() -> None:
    filled = with_device_defaults({"rollout": {"engine": "transformers"}}, gpus=1)
    assert "engine_process" not in filled["rollout"] and "zero_stage" not in filled["trainer"]
    assert "compile" not in with_device_defaults({"trainer": {"zero_stage": 3}}, gpus=1)["trainer"]


def test_where_a_device_is_shared_there_is_one_rollout_worker_which_evaluates_too(file: Path) -> None:
    config = load(file, ["launch.placement=colocated", "eval.source=e.jsonl"])
    assert (config.rollout.workers, config.eval.engine) == (1, "rollout")
    with pytest.raises(ConfigError, match=r"set rollout\.workers = 1, not 3"):
        load(file, ["launch.placement=colocated", "rollout.workers=3"])
    assert load(file, ["eval.source=e.jsonl"]).rollout.workers == 2


def test_unseeded_samples_are_asked_of_vllm_alone(file: Path) -> None:
    config = load(file, ["sampling.seeded=false"])
    request = request_of(a_prompt(), [0], config=config, stop_ids=[2])
    assert not request.sampling.seeded and request_of(a_prompt(), [0], config=load(file), stop_ids=[2]).sampling.seeded
    with pytest.raises(ConfigError, match=r"sampling.seeded: only rollout.engine = 'vllm' supports false; 'toy' always seeds each sample"):
        load(file, ["sampling.seeded=false", "rollout.engine=toy"])


if __name__ == "__main__":
    before, _, after = parts()
    DOCS.write_text(before + as_markdown() + after, encoding="utf-8")
