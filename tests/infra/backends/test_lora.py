"""Adapters are trained, merged weights are read: by engines, by plain transformers and by peft."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.infra.backends.registry import open_backend
from penstock.infra.tensors.stream import digest
from penstock.infra.tensors.torch_copy import from_bytes, to_bytes
from penstock.topics.versions import weight_adapter
from tests.support.training import batch_of, save_tiny_model, take_step, train

pytestmark = pytest.mark.costly  # imports transformers

KINDS = [("torch", {}), ("torch", {"dtype": "bfloat16"}), ("deepspeed", {"zero_stage": 2})]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), attention_bias=True)


def opened(model_path: str, name: str, **own: Any) -> Any:
    return open_backend(name, **{"model_path": model_path, "lr": 1e-2, "lora_rank": 4, **own})


def plain(model_path: Any, dtype: str = "float32") -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype)).eval()


@pytest.mark.parametrize(("name", "own"), KINDS)
def test_version_0_is_the_model_bit_for_bit_and_training_moves_its_linear_layers_alone(
    model_path: str, name: str, own: dict[str, Any]
) -> None:
    backend, base = opened(model_path, name, **own), plain(model_path, own.get("dtype", "float32"))
    before = to_bytes(base.named_parameters())
    assert digest(backend.weights()) == digest(before)
    losses = [loss for loss, _ in train(backend, 3)]
    assert all(np.isfinite(losses))
    after = {tensor.name: from_bytes(tensor) for tensor in backend.weights()}
    moved = {tensor.name for tensor in before if not torch.equal(after[tensor.name], from_bytes(tensor))}
    assert moved == {name for name in after if name.endswith("_proj.weight")}
    backend.close()


def test_an_export_gives_the_trained_logits_in_plain_transformers_and_its_adapters_in_peft(model_path: str, tmp_path: Any) -> None:
    from peft import PeftModel

    backend, batch = opened(model_path, "torch"), batch_of(5)
    train(backend, 3)
    backend.export(tmp_path, backend.weights())
    ids = torch.from_numpy(batch.input_ids)
    with torch.no_grad():
        unmerged = backend.model(input_ids=ids).logits
        merged = plain(tmp_path)(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(plain(model_path), tmp_path / "adapter").eval()(input_ids=ids).logits
        assert (unmerged - plain(model_path)(input_ids=ids).logits).abs().max() > 1e-3
    torch.testing.assert_close(merged, unmerged, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(adapted, unmerged, atol=2e-5, rtol=1e-4)
    assert digest(to_bytes(plain(tmp_path).named_parameters())) == digest(backend.weights())
    backend.close()


def test_the_reference_is_the_model_with_its_adapters_off_and_takes_no_copy(model_path: str) -> None:
    backend, batch = opened(model_path, "torch", reference=True), batch_of(0)
    start = backend.logprobs(batch)
    train(backend, 2)
    assert backend.reference is None
    np.testing.assert_array_equal(backend.reference_logprobs(batch), start)
    assert np.abs(backend.logprobs(batch) - start).max() > 1e-3
    take_step(backend, [batch])  # the adapters are on again
    backend.close()


def test_a_checkpoint_of_adapters_is_small_and_goes_on_to_the_same_bits(model_path: str, tmp_path: Any) -> None:
    backend = opened(model_path, "torch")
    train(backend, 2)
    backend.save(tmp_path)
    train(backend, 2, first=2)
    again = opened(model_path, "torch")
    again.load(tmp_path)
    train(again, 2, first=2)
    assert digest(again.weights()) == digest(backend.weights())
    assert (tmp_path / "trainer.pt").stat().st_size < 1.5 * 12 * sum(master.numel() for master in backend.masters) + 50_000
    full = open_backend("torch", model_path=model_path, lr=1e-2)
    assert len(backend.masters) * 2 > len(full.masters) and sum(m.numel() for m in backend.masters) < sum(m.numel() for m in full.masters)


@pytest.mark.parametrize(("name", "own"), KINDS[:1] + KINDS[2:])
def test_recorded_weights_are_taken_over_whole(model_path: str, name: str, own: dict[str, Any]) -> None:
    backend, other = opened(model_path, name, **own), opened(model_path, "torch", seed=1)
    train(other, 2)
    backend.load_weights(other.weights())
    assert digest(backend.weights()) == digest(other.weights())
    take_step(backend, [batch_of(0)])
    with pytest.raises(ValueError, match="do not match the model"):
        backend.load_weights(other.weights()[1:])


@pytest.mark.parametrize(("name", "own"), KINDS)
def test_adapters_apart_are_the_weights_of_their_moment_and_a_reader_makes_the_same_of_them(
    model_path: str, name: str, own: dict[str, Any]
) -> None:
    backend = opened(model_path, name, **own)
    first = backend.weights()
    train(backend, 2)
    then, apart = backend.weights(), backend.adapted()
    train(backend, 1, first=2)
    assert digest(then) == digest(apart.merged()) != digest(backend.weights())
    assert apart.below_digest("blake3") == digest(first)
    below = sorted(first, key=lambda tensor: tensor.name)
    target = bytearray(b"".join(bytes(tensor.data) for tensor in below))
    stream = b"".join(bytes(part) for part in apart.blocks([(one.name, one.dtype, one.shape) for one in below]))
    weight_adapter.apply(stream, memoryview(bytes(target)), memoryview(target))
    assert target == b"".join(bytes(tensor.data) for tensor in sorted(then, key=lambda tensor: tensor.name))
    backend.close()


def test_adapters_are_not_sharded(model_path: str) -> None:
    with pytest.raises(ValueError, match=r"trainer.lora_rank: LoRA adapters cannot be sharded; set trainer.zero_stage to 2"):
        opened(model_path, "deepspeed", zero_stage=3)
