"""Attention for the tokens of a `PrefixTree`: rows are taken out of the line, attended to by torch's own kernel, and put back.

The rule: a model whose layers do not pass the tree on raises instead of attending across rows.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from penstock.infra.backends.logprobs.prefix_tree import PrefixTree

NAME = "penstock_tree"
SHORT_SCORES = 2**21
"""Up to so many scores a call, all heads and rows together, attention in bfloat16 on a CPU is two matrix products: torch's kernel computes
in float32 there, which takes up to eight times as long for rows of tens of tokens and 1.7 times for rows of hundreds. More scores would
take more memory than that is worth: they are kept for the backward pass, two bytes each."""
_EXPECTED = contextvars.ContextVar("a tree is expected", default=False)


@contextlib.contextmanager
def tree_expected() -> Iterator[None]:
    """Within it, attention without a tree is an error."""
    token = _EXPECTED.set(True)
    try:
        yield
    finally:
        _EXPECTED.reset(token)


def tree_inputs(tree: PrefixTree) -> dict[str, Any]:
    """What a model's forward is called with.

    A mask [1, W] of ones asks for the mask of one row of W columns, whatever the length of the line; without it transformers takes
    positions that restart for packed rows.
    """
    ones = torch.ones(1, tree.whole.shape[1], dtype=torch.bool, device=tree.ids.device)
    return {"input_ids": tree.ids[None], "position_ids": tree.positions[None], "attention_mask": ones, "prefix_tree": tree}


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    prefix_tree: PrefixTree | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """[1, T, heads, dim] from [1, heads, T, dim]; the mask is that of one row, [1, 1, W, W], or None for a causal one."""
    if prefix_tree is None:
        if _EXPECTED.get():
            raise RuntimeError(f"{type(module).__name__} was not handed the tree: this model does not pass keyword arguments on")
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    tree = prefix_tree
    queries, keys, values = (_rows(x, tree.whole) for x in (query, key, value))
    parts = [_attend(module, queries, keys, values, attention_mask, **kwargs)]
    if len(tree.keys):
        keys, values = (_rows(x, tree.keys) for x in (key, value))
        allowed = _allowed(tree, attention_mask)
        parts.append(_attend(module, _rows(query, tree.own), keys, values, allowed, **kwargs))
    return torch.cat([part.flatten(0, 1) for part in parts]).index_select(0, tree.outputs)[None], None


def _attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
) -> torch.Tensor:
    """[R, C, heads, dim] from queries [R, heads, C, dim] and keys and values [R, groups, W, dim]; without a mask attention is causal."""
    scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    if query.device.type != "cpu" or query.dtype != torch.bfloat16 or scores > SHORT_SCORES:
        attended: torch.Tensor = sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]
        return attended
    return short_attention(query, key, value, mask, scaling=kwargs.get("scaling"))


def short_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *, scaling: float | None = None
) -> torch.Tensor:
    """Attention as `_attend` gives it, by matrix products in the dtype of `query`; the mask is a boolean or an added one."""
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(~mask, -torch.inf)
    per_key = query.shape[1] // key.shape[1]
    scaled = query * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    grouped = scaled.unflatten(1, (-1, per_key)).flatten(2, 3)  # heads that share keys are one product
    scores = (grouped @ key.transpose(-1, -2)).view(*query.shape[:3], -1) + mask
    weights = torch.softmax(scores, -1).view(*grouped.shape[:3], -1)
    return (weights @ value).view(query.shape).transpose(1, 2)


def _rows(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[R, heads, C, dim] from the line [1, heads, T, dim] and places [R, C]; the gradients of shared tokens add up in float32."""
    tokens = x[0].transpose(0, 1)
    return tokens.index_select(0, places.flatten()).view(*places.shape, *tokens.shape[1:]).transpose(1, 2)


def _allowed(tree: PrefixTree, mask: torch.Tensor | None) -> torch.Tensor:
    """[N, 1, C, W] what the model's own mask, a window for instance, leaves of what a row's token sees."""
    if mask is None:
        return tree.allowed
    rule = mask[0, 0][tree.columns][:, None]
    return tree.allowed & rule if rule.dtype == torch.bool else torch.where(tree.allowed, rule, torch.finfo(rule.dtype).min)


def _mask(*, batch_size: int, q_length: int, kv_length: int, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
    if attention_mask is not None:
        batch_size, q_length, kv_length = 1, attention_mask.shape[1], attention_mask.shape[1]
    return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, attention_mask=None, **kwargs)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
