"""Attention of short rows by matrix products against torch's own kernel: the same results and gradients."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from penstock.infra.backends.logprobs import prefix_tree
from penstock.infra.backends.logprobs.prefix_tree import short_attention

pytestmark = pytest.mark.costly  # imports transformers


def tensors(dtype, *, rows=3, heads=6, groups=2, queries=5, keys=9, width=8):
    torch.manual_seed(0)
    shapes = [(rows, heads, queries, width), (rows, groups, keys, width), (rows, groups, keys, width)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def seen(queries, keys):
    """[1, 1, C, W] a mask that lets the queries, which come last, see themselves and what is before them."""
    return (torch.arange(keys) <= torch.arange(keys - queries, keys)[:, None])[None, None]


def by_the_kernel(query, key, value, mask, scaling=None):
    causal = mask is None
    found = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=True)
    return found.transpose(1, 2)


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("mask", ["causal", "boolean", "added"])
def test_short_attention_and_its_gradients_are_those_of_the_kernel(mask, scaling):
    queries, keys = (7, 7) if mask == "causal" else (5, 9)
    masks = {"causal": None, "boolean": seen(5, 9), "added": torch.randn(1, 1, 5, 9)}
    results = []
    for attention in (short_attention, by_the_kernel):
        given = tensors(torch.float32, queries=queries, keys=keys)
        found = attention(*given, masks[mask], scaling=scaling)
        (found * torch.linspace(-1, 1, found.numel()).view(found.shape)).sum().backward()
        results.append([found, *(tensor.grad for tensor in given)])
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "limit", "short"), [
    (torch.bfloat16, 10_000, True),
    (torch.bfloat16, 100, False),
    (torch.float32, 10_000, False),
])  # fmt: skip
def test_only_bfloat16_with_few_scores_is_attended_to_by_matrix_products(monkeypatch, dtype, limit, short):
    taken = []
    monkeypatch.setattr(prefix_tree, "SHORT_SCORES", limit)
    monkeypatch.setattr(prefix_tree, "short_attention", lambda *given, **_: taken.append(True) or short_attention(*given))
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 3, True
    query, key, value = tensors(dtype)
    found = prefix_tree._attend(module, query, key, value, seen(5, 9))
    assert taken == [True] * short
    torch.testing.assert_close(found.float(), by_the_kernel(query, key, value, seen(5, 9)).float(), atol=2e-2, rtol=2e-2)
