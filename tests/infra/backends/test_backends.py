"""Both trainer backends on tiny random models; run as a script it trains both and prints their digests."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers

from penstock.infra.backends.base import TokenBatch
from penstock.infra.backends.deepspeed.backend import DeepSpeedBackend
from penstock.infra.backends.registry import BACKENDS, open_backend
from penstock.infra.backends.settings import learning_rate
from penstock.infra.engines.shared_device import Sleepable
from penstock.infra.errors import BackendError, Diverged
from penstock.infra.tensors.stream import digest
from penstock.infra.tensors.torch_copy import copy_into, from_bytes, to_bytes
from tests.support.paths import ROOT
from tests.support.training import VOCABULARY, batch_of, loss_of, save_tiny_model, take_step, train

pytestmark = pytest.mark.costly  # imports transformers

STAGES = (0, 1, 2, 3)
ALL = [("torch", {}), *(("deepspeed", {"zero_stage": stage}) for stage in STAGES)]
SOME = [("torch", {}), ("deepspeed", {"zero_stage": 2}), ("deepspeed", {"zero_stage": 3})]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    (path / "tokenizer.json").write_text("{}")
    return save_tiny_model(path, attention_dropout=0.3)


@pytest.fixture
def opened(model_path):
    backends = []

    def make(name, **settings):
        backends.append(open_backend(name, **{"model_path": model_path, "lr": 1e-2, "total_steps": 10, "lr_schedule": "linear"} | settings))
        return backends[-1]

    yield make
    for backend in backends:
        backend.close()


def rows_of(batch, rows):
    columns = {name: getattr(batch, name) for name in TokenBatch.__slots__}
    return TokenBatch(**{name: None if column is None else column[rows] for name, column in columns.items()})


def plain_torch_losses(model_path, *, steps, clip, weight_decay=0.0):
    """An independent oracle: a whole-batch loop in the plainest torch, with attention masks and log_softmax over all logits."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager").eval()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    rest = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.95), eps=1e-8
    )
    results = []
    for step in range(steps):
        batches, total = [batch_of(10 * step, 4), batch_of(10 * step + 1, 3)], 0.0
        for batch in batches:
            ids = torch.from_numpy(batch.input_ids)
            logits = model(input_ids=ids, attention_mask=torch.from_numpy(batch.attention_mask).long()).logits[:, :-1]
            logprobs = torch.log_softmax(logits / torch.from_numpy(batch.temperatures)[:, None, None], -1)
            total = total + loss_of(batch)(logprobs.gather(-1, ids[:, 1:, None])[..., 0])[0]
        loss = total / sum(batch.tokens for batch in batches)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / 10)
        optimizer.step()
        results.append((float(loss.detach()), float(norm)))
    return results, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("name", "own"), ALL)
def test_every_backend_trains_like_the_plainest_torch_loop(model_path, opened, name, own):
    expected, weights = plain_torch_losses(model_path, steps=5, clip=0.02, weight_decay=0.1)
    backend = opened(name, max_grad_norm=0.02, weight_decay=0.1, **own)
    results = train(backend)
    np.testing.assert_allclose([loss for loss, _ in results], [loss for loss, _ in expected], atol=1e-5)
    np.testing.assert_allclose([step.grad_norm for _, step in results], [norm for _, norm in expected], rtol=1e-3)
    assert [step.lr for _, step in results] == pytest.approx([1e-2, 9e-3, 8e-3, 7e-3, 6e-3])
    trained = {tensor.name: from_bytes(tensor) for tensor in backend.weights()}
    assert trained.keys() == weights.keys()
    assert "lm_head.weight" not in trained
    for key, value in weights.items():
        torch.testing.assert_close(trained[key], value, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(("name", "own"), SOME)
def test_the_gradient_of_micro_batches_is_that_of_the_whole_batch_divided_once(opened, name, own):
    whole, batch = opened(name, **own), batch_of(3, 6)
    loss, result = take_step(whole, [batch])
    after = {tensor.name: from_bytes(tensor) for tensor in whole.weights()}
    cut = opened(name, **own)
    cut_loss, cut_result = take_step(cut, [rows_of(batch, slice(0, 1)), rows_of(batch, slice(1, 4)), rows_of(batch, slice(4, 6))])
    assert cut_loss == pytest.approx(loss, abs=1e-6)
    assert cut_result.grad_norm == pytest.approx(result.grad_norm, rel=1e-5)
    for tensor in cut.weights():
        torch.testing.assert_close(from_bytes(tensor), after[tensor.name], atol=1e-4, rtol=1e-4)


def test_padding_and_neighbours_do_not_reach_a_sequence(opened):
    backend, batch = opened("torch"), batch_of(5, 4)
    together = backend.logprobs(batch)
    for row in range(4):
        length = int(batch.attention_mask[row].sum())
        alone = rows_of(batch, slice(row, row + 1))
        cut = TokenBatch(**{
            name: getattr(alone, name)[:, : length - (name in ("completion_mask", "behaviour_logprobs"))]
            if np.ndim(getattr(alone, name)) == 2 else getattr(alone, name)
            for name in TokenBatch.__slots__
        })  # fmt: skip
        np.testing.assert_allclose(together[row, : length - 1], backend.logprobs(cut)[0], atol=1e-5)
    assert not together[~batch.completion_mask].any()
    assert (together[batch.completion_mask] < 0).all()


@pytest.mark.parametrize(("name", "own"), SOME)
def test_training_goes_on_bit_for_bit_from_a_saved_state(opened, tmp_path, name, own):
    backend = opened(name, **own)
    train(backend, 2)
    backend.save(tmp_path / "state")
    through = train(backend, 2, first=2)
    end = digest(backend.weights())
    backend.load(tmp_path / "state")
    assert train(backend, 2, first=2) == through
    fresh = opened(name, **own)
    fresh.load(tmp_path / "state")
    assert fresh.steps == 2
    assert train(fresh, 2, first=2) == through
    assert digest(fresh.weights()) == end


@pytest.mark.parametrize("own", [{}, {"dtype": "bfloat16", "reference": True, "snapshot": True}, {"lora_rank": 2}])
def test_a_backend_that_sleeps_between_two_steps_gives_the_same_bits_and_can_be_read_meanwhile(opened, tmp_path, own):
    awake, sleeper = opened("torch", **own), opened("torch", **own)
    expected = train(awake, 3)
    found = []
    for step in range(3):
        found += train(sleeper, 1, first=step)
        sleeper.sleep()
        asleep = digest(sleeper.weights())
        sleeper.save(tmp_path / f"state-{step}")
        sleeper.wake()
        assert digest(sleeper.weights()) == asleep
    assert found == expected
    again = opened("torch", **own)
    again.load(tmp_path / "state-2")
    assert digest(again.weights()) == digest(sleeper.weights()) == digest(awake.weights())
    if own.get("snapshot"):
        batch = batch_of(1)
        assert np.array_equal(sleeper.reference_logprobs(batch), awake.reference_logprobs(batch))


def test_hooks_that_gather_weights_are_not_compiled(opened):
    with pytest.raises(ValueError, match=r"trainer.compile: .* set trainer.zero_stage to at most 2"):
        opened("deepspeed", zero_stage=3, compile=True)


@pytest.mark.slow  # compiling takes a minute
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(("name", "own"), [("torch", {"gradient_checkpointing": True}), ("deepspeed", {"zero_stage": 2})])
def test_compiled_layers_train_like_the_others(opened, name, own):
    plain, compiled = opened(name, **own), opened(name, compile=True, **own)
    expected, found = train(plain, 3), train(compiled, 3)
    np.testing.assert_allclose([loss for loss, _ in found], [loss for loss, _ in expected], atol=1e-5)
    np.testing.assert_allclose([step.grad_norm for _, step in found], [step.grad_norm for _, step in expected], rtol=1e-4)
    assert compiled.fingerprint() == plain.fingerprint() | {"forward": "shared rows, layers compiled, logits in pieces"}


def test_backends_that_say_they_sleep_are_those_that_do(opened):
    assert isinstance(opened("torch"), Sleepable) == BACKENDS["torch"].sleeps
    assert issubclass(DeepSpeedBackend, Sleepable) == BACKENDS["deepspeed"].sleeps


@pytest.mark.parametrize(("name", "own"), [*SOME, ("torch", {"dtype": "bfloat16"}), ("deepspeed", {"zero_stage": 2, "dtype": "bfloat16"})])
def test_loaded_weights_are_the_ones_that_are_trained_on(opened, name, own):
    backend = opened(name, **own)
    changed = to_bytes((t.name, from_bytes(t) * 1.5) for t in backend.weights())
    backend.load_weights(changed)
    assert digest(backend.weights()) == digest(changed)
    with pytest.raises(ValueError, match="do not match the model"):
        backend.load_weights(changed[1:])
    _, result = take_step(backend, [batch_of(0)])
    moved = {tensor.name: from_bytes(tensor).float() for tensor in backend.weights()}
    for tensor in changed:  # AdamW's first step moves a weight by at most the learning rate: masters were replaced, too
        assert (moved[tensor.name] - from_bytes(tensor).float()).abs().max() <= result.lr * 1.01 + 0.02 * (own.get("dtype") == "bfloat16")


def test_bfloat16_weights_are_published_and_small_updates_add_up_in_float32(opened):
    backends = [opened("torch", dtype="bfloat16", lr=2e-5, lr_schedule="constant", max_grad_norm=0.0)]
    backends.append(opened("deepspeed", zero_stage=2, dtype="bfloat16", lr=2e-5, lr_schedule="constant", max_grad_norm=0.0))
    ends = []
    for backend in backends:
        start = {tensor.name: from_bytes(tensor).float() for tensor in backend.weights()}
        for _ in range(15):
            take_step(backend, [batch_of(1), batch_of(2)])
        assert {tensor.dtype for tensor in backend.weights()} == {"bfloat16"}
        ends.append({tensor.name: from_bytes(tensor).float() - start[tensor.name] for tensor in backend.weights()})
    # most steps of 2e-5 round away in a bfloat16 weight of 0.02, whose spacing is 1.2e-4: what is seen has added up in the masters
    name = "model.layers.0.mlp.up_proj.weight"
    assert ends[0][name].abs().mean() > 5 * 2e-5
    cosine = torch.nn.functional.cosine_similarity(ends[0][name].flatten(), ends[1][name].flatten(), dim=0)
    assert float(cosine) > 0.9


@pytest.mark.parametrize(("name", "own"), ALL)
def test_a_gradient_that_is_not_finite_stops_the_step_and_leaves_the_weights(opened, name, own):
    backend, batch = opened(name, **own), batch_of(0)
    train(backend, 1)
    before = digest(backend.weights())
    backend.backward(batch, lambda logprobs: (logprobs.sum() * float("nan"), {}))
    with pytest.raises(Diverged, match=r"gradient norm of optimizer step 1 is (nan|inf)"):
        backend.step(denominator=4.0)
    assert digest(backend.weights()) == before


@pytest.mark.parametrize(("name", "own"), SOME)
def test_frozen_copies_stay_while_the_policy_moves(opened, name, own):
    backend, batch = opened(name, reference=True, snapshot=True, entropy=True, **own), batch_of(0)
    start, version_0 = backend.logprobs(batch), backend.weights()
    np.testing.assert_array_equal(backend.snapshot_logprobs(batch), start)
    train(backend, 1)
    backend.take_snapshot()
    between = backend.logprobs(batch)
    train(backend, 1)
    np.testing.assert_array_equal(backend.reference_logprobs(batch), start)
    np.testing.assert_array_equal(backend.snapshot_logprobs(batch), between)
    assert np.abs(between - start).max() > 1e-4
    assert np.abs(backend.logprobs(batch) - between).max() > 1e-4
    stats = backend.backward(batch, loss_of(batch))
    assert stats["extra"] == 1.0
    assert stats["tokens"] == batch.tokens
    assert 0 < stats["entropy_sum"] / batch.tokens < np.log(VOCABULARY)
    backend.take_snapshot(version_0)
    np.testing.assert_array_equal(backend.snapshot_logprobs(batch), start)


def test_gradient_checkpointing_changes_memory_only(opened):
    plain, saving = opened("torch"), opened("torch", gradient_checkpointing=True)
    assert train(plain, 2) == train(saving, 2)


@pytest.mark.parametrize(("name", "own"), [("torch", {}), ("deepspeed", {"zero_stage": 3})])
def test_an_exported_directory_is_the_trained_model_and_takes_no_accelerator_library(opened, tmp_path, monkeypatch, name, own):
    backend = opened(name, **own)
    train(backend, 1)
    monkeypatch.delattr("transformers.modeling_utils.unwrap_model")  # which imports one, for seconds
    backend.export(tmp_path, backend.weights())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert digest(to_bytes(model.named_parameters())) == digest(backend.weights())
    assert (tmp_path / "tokenizer.json").read_text() == "{}"


def test_copy_into_fits_everything_before_it_changes_anything(model_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    tensors = to_bytes((name, parameter.float() * 2) for name, parameter in model.named_parameters())
    before = digest(to_bytes(model.named_parameters()))
    wrong = to_bytes([(tensors[-1].name, torch.zeros(3))])
    with pytest.raises(ValueError, match=r"do not match the model: .* has shape \(3,\)"):
        copy_into(model, [*tensors[:-1], *wrong])
    assert digest(to_bytes(model.named_parameters())) == before
    copy_into(model, tensors)
    assert digest(to_bytes(model.named_parameters())) == digest(to_bytes((t.name, from_bytes(t).bfloat16()) for t in tensors))


@pytest.mark.slow
def test_another_process_ends_in_the_same_bits_without_a_compiler_and_without_noise(opened, model_path):
    expected = []
    for name, own in (("torch", {}), ("deepspeed", {"zero_stage": 2})):
        backend = opened(name, **own)
        losses = [loss for loss, _ in train(backend, 3)]
        expected.append([digest(backend.weights()), losses, backend.fingerprint()])
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "DS_ACCELERATOR")}
    environment |= {"PATH": "/nonexistent", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", __file__, model_path]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert child.stderr == ""
    assert json.loads(child.stdout) == expected


def test_the_learning_rate_warms_up_and_falls():
    assert [learning_rate(step, lr=1.0, warmup_steps=4) for step in (0, 3, 4, 900)] == [0.25, 1.0, 1.0, 1.0]
    linear = [learning_rate(step, lr=2.0, schedule="linear", warmup_steps=1, total_steps=5) for step in range(7)]
    assert linear == [2.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    assert learning_rate(5, lr=1.0, schedule="cosine", total_steps=10) == pytest.approx(0.5)


@pytest.mark.parametrize(("name", "settings", "message"), [
    ("torch", {"dtype": "float16"}, "'float16'"),
    ("torch", {"lr": 0.0}, "learning rate"),
    ("torch", {"lr_schedule": "linear", "total_steps": 0}, "total_steps"),
    ("torch", {"lr_schedule": "steps"}, "'steps'"),
    ("torch", {"model_path": "/nowhere"}, "'/nowhere'"),
    ("torch", {"threads": 0}, "thread"),
    ("deepspeed", {"zero_stage": 4}, "zero_stage"),
    ("deepspeed", {"zero_stage": 1, "dtype": "bfloat16"}, "stage 2 or 3"),
    ("jax", {}, "'jax'"),
])  # fmt: skip
def test_a_setting_that_cannot_be_is_named(model_path, name, settings, message):
    with pytest.raises(ValueError, match=message):
        open_backend(name, **{"model_path": model_path, "lr": 1e-3} | settings)


@pytest.mark.parametrize(("name", "own"), [("torch", {}), ("deepspeed", {"zero_stage": 2})])
def test_misuse_is_refused_in_one_line(opened, tmp_path, name, own):
    backend = opened(name, **own)
    with pytest.raises(BackendError, match="backward pass"):
        backend.step(denominator=1.0)
    backend.backward(batch_of(0), loss_of(batch_of(0)))
    with pytest.raises(ValueError, match="denominator of a step must be a positive number, not 0"):
        backend.step(denominator=0.0)
    with pytest.raises(BackendError, match="reference=True"):
        backend.reference_logprobs(batch_of(0))
    for call in (backend.take_snapshot, lambda: backend.snapshot_logprobs(batch_of(0))):
        with pytest.raises(BackendError, match="snapshot=True"):
            call()
    with pytest.raises(BackendError, match="state"):
        backend.load(tmp_path / "nothing")


def main(model_path):
    results = []
    for name, own in (("torch", {}), ("deepspeed", {"zero_stage": 2})):
        backend = open_backend(name, model_path=model_path, lr=1e-2, total_steps=10, lr_schedule="linear", **own)
        losses = [loss for loss, _ in train(backend, 3)]
        results.append([digest(backend.weights()), losses, backend.fingerprint()])
        backend.close()
    print(json.dumps(results))


def test_the_norm_of_an_update_is_that_of_the_change_of_the_weights(opened):
    backend = opened("torch")
    for seed in range(3):
        before = {tensor.name: from_bytes(tensor).clone() for tensor in backend.weights()}
        _, result = take_step(backend, [batch_of(seed)])
        change = sum(float((from_bytes(tensor) - before[tensor.name]).square().sum()) for tensor in backend.weights()) ** 0.5
        assert result.measures["update_norm"] == pytest.approx(change, rel=1e-4)


if __name__ == "__main__":
    main(sys.argv[1])


@pytest.mark.parametrize(("name", "settings"), [("torch", {}), ("deepspeed", {"zero_stage": 2})])
def test_strict_determinism_refuses_an_operation_without_a_deterministic_form_in_one_line(opened, name, settings):
    def loss(logprobs):
        picked = torch.zeros(1, device=logprobs.device).put_(
            torch.zeros(1, dtype=torch.int64, device=logprobs.device), logprobs.detach().sum()
        )  # has none, on a CPU either
        return logprobs.sum() * 0.0 + picked.sum(), {}

    strict = opened(name, deterministic="strict", **settings)
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    strict.backward(batch_of(0, 4), loss_of(batch_of(0, 4)), denominator=1.0)  # what a step needs has one
    with pytest.raises(
        BackendError, match=r"^trainer.deterministic = 'strict': put_ does not have .*\. Set trainer.deterministic = 'warn'$"
    ):
        strict.backward(batch_of(0, 4), loss, denominator=1.0)
    warning = opened(name, **settings)
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    with pytest.warns(UserWarning, match="put_ does not have a deterministic implementation"):
        warning.backward(batch_of(0, 4), loss, denominator=1.0)


def test_float32_products_keep_their_mantissa_unless_tf32_is_asked_for_and_the_fingerprint_says_so(opened):
    plain = opened("torch").fingerprint()
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cudnn.allow_tf32
    reduced = opened("torch", tf32=True).fingerprint()
    assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
    assert reduced == plain | {"tf32": "on"}
    opened("torch")
    assert torch.get_float32_matmul_precision() == "highest"
