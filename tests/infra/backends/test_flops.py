"""Model FLOPs: what is counted is what the matrix products take, and peaks are those of the device at hand."""

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from penstock.infra.backends.hardware import FlopCount, peak_flops

pytestmark = pytest.mark.costly  # imports transformers


def small_llama(*, tied: bool, **changes):
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=tied, attn_implementation="eager", **changes,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [True, False])
def test_the_count_is_that_of_the_matrix_products_of_a_pass_forward_and_backward(tied: bool) -> None:
    model, lengths = small_llama(tied=tied), (40, 24)
    with FlopCounterMode(display=False) as counted:
        for length in lengths:
            model(input_ids=torch.randint(0, 300, (1, length))).logits.sum().backward()
    expected = FlopCount.of_model(model).of(lengths, computed=sum(lengths))
    assert expected == pytest.approx(counted.get_total_flops(), rel=0.02)


def test_frozen_weights_take_no_gradient_of_their_own_and_shared_prompts_are_computed_once() -> None:
    model, lengths = small_llama(tied=False), (10, 10)
    whole = FlopCount.of_model(model).of(lengths, computed=20)
    model.requires_grad_(False)
    frozen = FlopCount.of_model(model)
    assert frozen.trained == 0 and frozen.of(lengths, computed=20) < 0.7 * whole
    assert frozen.of(lengths, computed=15) == pytest.approx(0.75 * frozen.of(lengths, computed=20))
    assert frozen.of(lengths, computed=40) == frozen.of(lengths, computed=20)  # padding is no use


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", {"dtype": "bfloat16"}, 989e12),
        ("NVIDIA H100 PCIe", {"dtype": "bfloat16"}, 756e12),
        ("NVIDIA A100-SXM4-80GB", {"dtype": "bfloat16"}, 312e12),
        ("NVIDIA L40S", {"dtype": "bfloat16"}, 362e12),
        ("NVIDIA H200", {"dtype": "float32", "tf32": True}, 494.5e12),
        ("NVIDIA H200", {"dtype": "float32"}, None),
        ("cpu", {"dtype": "float32"}, None),
        ("cpu", {"dtype": "float32", "configured_tflops": 0.1}, 1e11),
    ],
)
def test_the_peak_is_the_given_one_or_that_of_the_device_in_its_arithmetic(device: str, settings: dict, expected: float | None) -> None:
    assert peak_flops(device, **{"tf32": False, "configured_tflops": None, **settings}) == expected
