"""The memory estimate: sizes come from config.json alone, parameters are counted exactly, and what a setting saves is saved."""

from typing import Any

import pytest

from penstock.pipeline.config.load import from_table
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.launch.check.memory import (
    Estimate,
    Shape,
    adapter_bytes,
    engine_parts,
    estimates,
    shape_of,
    time_shared,
    trainer_parts,
)
from tests.support.least_config import LEAST, least_config

SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
QWEN = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip


def shape(config: dict[str, Any]) -> Shape:
    found = shape_of(config)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("config", "count"), [(SMOLLM2, 134_515_008), (QWEN, 494_032_768), (QWEN | {"tie_word_embeddings": False}, 630_167_424)]
)
def test_parameters_are_counted_exactly(config: dict[str, Any], count: int) -> None:
    assert shape(config).parameters == count


@pytest.mark.costly
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_parameters_are_those_of_the_model_that_transformers_makes(kind: str, tied: bool) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 90, "tie_word_embeddings": tied,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**sizes)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    assert shape(config.to_dict()).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_other_kinds_of_models_are_not_guessed() -> None:
    assert shape_of({"model_type": "t5", "d_model": 512}) is None
    assert shape_of(QWEN | {"num_experts": 8}) is None


def of(role: str, **sections: dict[str, Any]) -> Estimate:
    table = LEAST | {"data": {"source": "d.jsonl", "max_prompt_tokens": 64}, "schedule": {"prompts_per_step": 4}}
    config: Config = from_table(table | {"sampling": {"max_new_tokens": 16}} | sections)
    return next(each for each in estimates(config, shape(SMOLLM2)) if each.role == role)


def test_what_saves_memory_makes_the_estimate_smaller() -> None:
    full = of("trainer")
    assert of("trainer", trainer={"lora_rank": 16}).total < 0.75 * full.total
    adapters, merged = (of("trainer", trainer={"lora_rank": 16}, weights={"encoding": encoding}) for encoding in ("auto", "merged"))
    assert adapters.parts["published"] < 0.6 * merged.parts["published"]
    assert of("trainer", trainer={"dtype": "bfloat16"}).parts["activations"] < full.parts["activations"]
    assert of("trainer", trainer={"gradient_checkpointing": True}).parts["activations"] < full.parts["activations"]
    assert of("trainer", trainer={"share_prompts": "off"}).parts["activations"] > full.parts["activations"]
    sharded = of("trainer", trainer={"backend": "deepspeed", "zero_stage": 3, "processes": 2})
    assert all(sharded.parts[name] * 2 == full.parts[name] for name in ("weights", "moments", "gradients"))
    assert of("trainer", algorithm={"kl_coef": 0.1}).parts["frozen copies"] == full.parts["weights"]
    assert of("rollout", rollout={"engine": "vllm", "concurrency": 8}).total < of("rollout", rollout={"engine": "vllm"}).total


def test_what_is_offloaded_is_counted_for_the_hosts_memory() -> None:
    def host(**trainer: Any) -> int:
        return trainer_parts(least_config(trainer=trainer), shape(SMOLLM2), gpu=True)["offloaded"]

    count, sharded = shape(SMOLLM2).parameters, {"backend": "deepspeed", "zero_stage": 3, "dtype": "bfloat16", "processes": 2}
    assert host(**sharded) == 0
    assert host(**sharded, offload="optimizer") == pytest.approx(16 * count / 2)  # masters, two moments, gradients: 4 bytes each
    assert host(**sharded, offload="parameters") == pytest.approx(18 * count / 2)
    inputs, all_of_them = host(offload_activations=True, gradient_checkpointing=True), host(offload_activations=True)
    assert 0 < 10 * inputs < all_of_them
    masters = of("trainer", trainer={"backend": "deepspeed"}).parts["masters"]
    assert masters == 4 * count and of("trainer").parts["masters"] == 0


def test_the_adapters_of_a_version_are_counted_exactly() -> None:
    table = LEAST | {"trainer": {"lora_rank": 16}}
    assert adapter_bytes(from_table(table), shape(SMOLLM2)) == 4 * 4_884_480
    assert adapter_bytes(from_table(table | {"weights": {"encoding": "merged"}}), shape(SMOLLM2)) is None
    assert adapter_bytes(from_table(table), None) is None


def test_a_tied_output_layer_costs_vllm_a_packed_copy_of_the_embedding_on_a_cpu_alone() -> None:
    def parts(device: str, **changed: Any) -> dict[str, int]:
        rollout = {"engine": "vllm", "dtype": "bfloat16", "device": device}
        return dict(engine_parts(least_config(rollout=rollout), shape(QWEN | changed)))

    tied, untied, on_gpu = parts("cpu"), parts("cpu", tie_word_embeddings=False), parts("cuda:0")
    assert tied["packed output layer"] == shape(QWEN).vocabulary * shape(QWEN).hidden * 2  # bfloat16
    assert untied["packed output layer"] == on_gpu["packed output layer"] == 0
    assert tied["layers while they load"] == 2 * untied["layers while they load"]


def test_a_shared_gpu_holds_the_larger_of_two_and_the_host_what_the_trainer_has_there_meanwhile() -> None:
    parts = {"libraries": 10, "weights": 4, "masters": 8, "moments": 16, "published": 3, "activations": 50, "context": 2}
    trainer = Estimate(role="trainer", parts=parts)
    rollout = Estimate(role="rollout", parts={"libraries": 10, "weights": 4, "keys and values": 90, "new version": 2, "context": 1})
    assert (trainer.gpu, trainer.host, rollout.gpu, rollout.host) == (80, 13, 95, 12)
    assert time_shared([trainer, rollout]) == (95 + 2, 13 + 12 + 4 + 8 + 16)


def test_a_worker_without_a_gpu_has_all_of_its_memory_on_the_host() -> None:
    assert of("trainer").gpu == 0 and of("trainer").host == of("trainer").total
