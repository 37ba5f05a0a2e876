"""Attention on the line of distinct tokens, with dense attention by the same mask in the place of the GPU's kernel, against padded rows."""

import numpy as np
import pytest
import torch
import transformers
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention

from penstock.infra.backends.logprobs import forward as forward_module
from penstock.infra.backends.logprobs import prefix_tree as tree_module
from penstock.infra.backends.logprobs.forward import Forward, _gap
from penstock.infra.backends.logprobs.prefix_tree import BLOCK, TREE_ATTENTION, prefix_tree
from penstock.pipeline.learner.micro_batches import TokenSequence, pack

pytestmark = pytest.mark.costly
CPU = torch.device("cpu")
LINE, PLAIN = Forward(shared=True, in_pieces=True, compiled=True), Forward()


def pairs(mask: BlockMask) -> torch.Tensor:
    """[T, T] pairs of query and key that a kernel computes: all of a full block, those of the mask in other listed blocks."""
    size = mask.shape[-1]
    index = torch.arange(size)
    allowed = mask.mask_mod(torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64), index[:, None], index[None])

    def listed(counts: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        dense = torch.zeros(size // BLOCK, size // BLOCK, dtype=torch.bool)
        for row, count in enumerate(counts[0, 0].tolist()):
            dense[row, blocks[0, 0, row, :count].long()] = True
        return dense.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)

    kernels_read = (mask.kv_indices, mask.full_kv_indices, mask.q_indices, mask.full_q_indices)
    assert all(indices.is_contiguous() for indices in kernels_read)
    full, partial = listed(mask.full_kv_num_blocks, mask.full_kv_indices), listed(mask.kv_num_blocks, mask.kv_indices)
    assert torch.equal(full, listed(mask.full_q_num_blocks, mask.full_q_indices).T)
    assert torch.equal(partial, listed(mask.q_num_blocks, mask.q_indices).T)
    assert not (full & ~allowed).any()
    return full | allowed & partial


def dense(query, key, value, *, block_mask, scale, enable_gqa):
    return scaled_dot_product_attention(query, key, value, attn_mask=pairs(block_mask), scale=scale, enable_gqa=enable_gqa)


@pytest.fixture(autouse=True)
def dense_kernel(monkeypatch):
    monkeypatch.setattr(tree_module, "compiled", lambda _: dense)
    monkeypatch.setattr(forward_module, "compiled", lambda function: function)


def batch_of_groups(groups=3, samples=4, prompt=150, longest=120, seed=0):
    """Prompts with a common head, completions of few letters: many begin alike, some are prefixes of others or equal."""
    random = np.random.default_rng(seed)
    head, rows = random.integers(0, 40, 60), []
    for group in range(groups):
        ids = np.concatenate([head, random.integers(0, 40, prompt - 60)]).astype(np.int32)
        first = random.integers(3, 5, longest).astype(np.int32)
        for sample in range(samples):
            tokens = int(random.integers(1, longest))
            own = first[:tokens] if sample < 3 else random.integers(3, 5, tokens).astype(np.int32)
            rows.append(TokenSequence(
                group=group, sample=sample, prompt_ids=ids, completion_ids=own, behaviour_logprobs=np.zeros(tokens, np.float32),
                loss_mask=np.ones(tokens, np.bool_), advantage=1.0, temperature=(0.7, 1.0)[sample % 2],
            ))  # fmt: skip
    return pack([rows[n] for n in random.permutation(len(rows))])


def model_of(kind, **more):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=TREE_ATTENTION).eval().double()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("seed", range(4))
def test_each_token_of_the_line_attends_to_its_row_up_to_itself(seed):
    batch = batch_of_groups(seed=seed)
    tree = prefix_tree(batch, line=True)
    mask = tree_module.block_mask(tree.ends, tree.positions, tree_module.causal_mask_function)
    assert len(tree.ids) % BLOCK == 0
    prefixes = {(): 0}
    seen = pairs(mask)
    for token, ancestors in enumerate(seen):
        line = ancestors.nonzero()[:, 0]
        assert line[-1] == token
        assert tree.positions[line].tolist() == list(range(len(line)))
        prefixes[tuple(tree.ids[line].tolist())] = token
    needed = {
        tuple(ids[: end + 1])
        for ids, trained in zip(batch.input_ids.tolist(), batch.completion_mask, strict=True)
        for end in range(int(np.flatnonzero(trained).max()) + 1)
    }
    assert needed <= set(prefixes)
    assert len(tree.ids) < len(needed) + BLOCK


@pytest.mark.parametrize(("kind", "more"), [
    ("qwen2", {}),
    ("llama", {"tie_word_embeddings": False}),
    ("mistral", {"sliding_window": 20}),
    ("gemma3_text", {"sliding_window": 20, "query_pre_attn_scalar": 8}),
])  # fmt: skip
@pytest.mark.parametrize("checkpointing", [False, True])
def test_logprobs_and_gradients_on_the_line_are_those_of_padded_rows(kind, more, checkpointing):
    model, batch = model_of(kind, **more), batch_of_groups()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    parameters, results = list(model.parameters()), []
    for forward in (LINE, PLAIN):
        logprobs, entropies, *_ = forward(model, batch, device=CPU, entropy=True)
        weights = torch.linspace(-1, 1, logprobs.numel(), dtype=logprobs.dtype).view(logprobs.shape)
        loss = (logprobs * weights).sum() + (entropies * weights).sum()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        results.append([logprobs.detach(), entropies.detach(), *(gradient for gradient in gradients if gradient is not None)])
    for mine, theirs in zip(*results, strict=True):  # norms and positions are float32 in these models
        assert float((mine - theirs).norm()) <= 1e-5 * float(theirs.norm())


def test_the_comparison_at_the_start_accepts_the_line_and_refuses_a_kernel_with_a_wrong_result_or_gradient(monkeypatch):
    model, batch = model_of("qwen2").float(), batch_of_groups()
    assert _gap(model, batch, LINE, PLAIN, device=CPU) is None

    def scaled_gradient(*given, **masks):
        out = dense(*given, **masks)
        return out.detach() + 0.5 * (out - out.detach())

    for kernel, reason in (
        (lambda *given, **masks: 0.9 * dense(*given, **masks), "logprobs differ"),
        (scaled_gradient, "gradient differs"),
        (lambda *_, **__: 1 / 0, "ZeroDivisionError"),
    ):
        monkeypatch.setattr(tree_module, "compiled", lambda _, kernel=kernel: kernel)
        assert reason in (_gap(model, batch, LINE, PLAIN, device=CPU) or "")
