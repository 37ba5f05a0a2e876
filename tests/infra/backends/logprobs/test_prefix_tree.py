"""Rows that share their prefixes, and logits in pieces, against padded rows and all logits: for every loss and correction."""

import math
from functools import lru_cache

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.infra.backends.logprobs.forward import Forward, choose_forward
from penstock.infra.backends.logprobs.prefix_tree import TREE_ATTENTION, prefix_tree
from penstock.infra.backends.registry import open_backend
from penstock.infra.errors import BackendError
from penstock.pipeline.algorithms.losses import batch_loss
from penstock.pipeline.algorithms.registry import CORRECTIONS, LOSSES
from penstock.pipeline.learner.micro_batches import TokenSequence, pack
from tests.support.training import batch_of, loss_of

pytestmark = pytest.mark.costly  # imports transformers

CPU = torch.device("cpu")
VOCABULARY = 40
WAYS = {
    "plain": Forward(),
    "shared": Forward(shared=True),
    "in pieces": Forward(in_pieces=True),
    "both": Forward(shared=True, in_pieces=True),
}
PROVEN = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1,    "head_dim": 16, "max_position_embeddings": 1024,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip


def model_of(kind, **more):
    """A small random model whose attention and head matter to what it says."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **(SMALL | more)), attn_implementation="sdpa"
    ).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@lru_cache
def qwen3():
    return model_of("qwen3")


@st.composite
def groups_of(draw, *, prompt, completion, samples, groups):
    """A micro-batch: few letters in the completions, so that many begin alike or are equal."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    head = random.integers(3, VOCABULARY, prompt)
    rows = []
    for group in range(draw(st.integers(1, groups))):
        size = draw(st.integers(1, prompt))
        own = draw(st.integers(0, size))
        ids = np.concatenate([head[: size - own], random.integers(3, VOCABULARY, own)]).astype(np.int32)
        for sample in range(draw(st.integers(1, samples))):
            tokens = draw(st.integers(0, completion))
            rows.append(TokenSequence(
                group=group, sample=sample, prompt_ids=ids, completion_ids=random.integers(3, 6, tokens).astype(np.int32),
                behaviour_logprobs=random.normal(-3.5, 0.5, tokens).astype(np.float32), loss_mask=random.random(tokens) < 0.9,
                advantage=float(random.normal()), temperature=(0.7, 1.0)[sample % 2],
            ))  # fmt: skip
    return pack(rows)


def check(batch, objectives):
    """Losses to 1e-5 and gradients to 1e-4, relative, under each way."""
    model = qwen3()
    parameters = list(model.parameters())
    found = {}
    for name, forward in WAYS.items():
        model.set_attn_implementation(TREE_ATTENTION if forward.shared else "sdpa")
        found[name] = forward(model, batch, device=CPU)[0]
    assert not found["shared"][~torch.from_numpy(batch.completion_mask)].any()
    for loss, correction in objectives:
        results = {}
        for name, logprobs in found.items():
            value, _ = batch_loss(
                logprobs,
                batch,
                surrogate=LOSSES[loss].surrogate,
                correction=correction,
                proximal=None if correction != "none" else batch.behaviour_logprobs,
            )
            gradients = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
            results[name] = float(value.detach()), torch.cat([g.flatten() for g in gradients if g is not None])
        value, gradient = results["plain"]
        for name in WAYS:
            assert results[name][0] == pytest.approx(value, rel=1e-5, abs=1e-5), (name, loss, correction)
            assert float((results[name][1] - gradient).norm()) <= 1e-4 * float(gradient.norm()) + 1e-7, (name, loss, correction)


EVERY = [(loss, correction) for loss in LOSSES for correction in ("none", *CORRECTIONS)]


@settings(PROVEN, max_examples=3)
@given(groups_of(prompt=12, completion=8, samples=4, groups=3))
def test_losses_and_gradients_are_those_of_padded_rows_for_every_loss_and_correction(batch):
    check(batch, EVERY)


@pytest.mark.slow
@settings(PROVEN, max_examples=60)
@given(groups_of(prompt=500, completion=200, samples=16, groups=2), st.sampled_from(EVERY))
def test_losses_and_gradients_are_those_of_padded_rows_at_real_lengths(batch, objective):
    check(batch, [objective])


@settings(PROVEN, max_examples=60)
@given(groups_of(prompt=12, completion=8, samples=6, groups=3))
def test_every_prefix_that_predicts_something_is_computed_once_and_nothing_else(batch):
    prefixes = set()
    for ids, mask in zip(batch.input_ids.tolist(), batch.completion_mask, strict=True):
        needed = int(np.flatnonzero(mask).max(initial=0)) + 1
        prefixes |= {tuple(ids[: end + 1]) for end in range(needed)}
    assert len(prefix_tree(batch).ids) == len(prefixes)


@pytest.mark.parametrize(("kind", "more", "in_pieces"), [
    ("llama", {"tie_word_embeddings": False}, True),
    ("mistral", {"sliding_window": 4}, True),
    ("gemma3_text", {"sliding_window": 4}, True),
    ("gemma2", {"sliding_window": 4, "final_logit_softcapping": 2.0}, False),
    ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, True),
])  # fmt: skip
def test_families_share_prompts_with_their_windows_and_caps(kind, more, in_pieces):
    model = model_of(kind, **more)
    model.set_attn_implementation("sdpa")
    batch = batch_of(1, 4, prompt=9)
    batch.input_ids[:, :9] = batch.input_ids[0, :9]
    expected = Forward()(model, batch, device=CPU)[0]
    chosen = choose_forward(model, share="on", device=CPU)
    assert chosen == Forward(shared=True, in_pieces=in_pieces)
    torch.testing.assert_close(chosen(model, batch, device=CPU)[0], expected, atol=1e-4, rtol=1e-4)


def test_a_model_that_carries_state_along_the_line_is_refused_by_name_or_runs_padded():
    model = model_of("lfm2", full_attn_idxs=[1])
    with pytest.raises(BackendError, match=r"share_prompts.*'lfm2' models cannot share prompts \(.*\); set it to 'auto' or 'off'"):
        choose_forward(model, share="on", device=CPU)
    for share in ("auto", "off"):
        assert choose_forward(model, share=share, device=CPU).shared is False
    batch = batch_of(1, 4)
    padded = Forward()(model, batch, device=CPU)[0]
    torch.testing.assert_close(choose_forward(model, share="auto", device=CPU)(model, batch, device=CPU)[0], padded)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model_of("qwen3").save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("name", "own", "checkpointing"),
    [
        ("torch", {}, False),
        ("torch", {}, True),
        pytest.param("deepspeed", {"zero_stage": 2}, False, marks=pytest.mark.slow),
        pytest.param("deepspeed", {"zero_stage": 2}, True, marks=pytest.mark.slow),
        pytest.param("deepspeed", {"zero_stage": 3}, False, marks=pytest.mark.slow),
        ("deepspeed", {"zero_stage": 3}, True),
    ],
)
def test_a_backend_takes_the_same_step_with_shared_prompts_and_says_so_in_its_fingerprint(model_path, name, own, checkpointing):
    batch = batch_of(2, 6, prompt=9)
    batch.input_ids[:, :9] = batch.input_ids[0, :9]
    norms, computed = {}, {}
    for share in ("on", "off"):
        backend = open_backend(name, model_path=model_path, lr=1e-3, share_prompts=share, gradient_checkpointing=checkpointing, **own)
        computed[share] = backend.backward(batch, loss_of(batch))["computed_tokens"]
        norms[share] = backend.step(denominator=float(batch.tokens)).grad_norm
        assert backend.fingerprint()["forward"].startswith("shared rows" if share == "on" else "padded rows, logits whole")
        backend.close()
    assert norms["on"] == pytest.approx(norms["off"], rel=1e-4)
    assert computed == {"on": 9 + int(batch.completion_mask.sum()) - 6, "off": 6 * (batch.input_ids.shape[1] - 1)}
    assert not math.isnan(norms["on"])
