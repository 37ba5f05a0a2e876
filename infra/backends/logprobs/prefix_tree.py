"""A micro-batch in which every distinct prefix occurs once, and the attention for it.

Shared are prompts, heads of chat templates, common prefixes of completions, and equal samples. Values per token stay [B, L] as in
`TokenBatch`. On a CPU attention unfolds to rows; on a GPU it runs on the line of distinct tokens. A model whose layers do not pass the
tree to attention raises instead of attending across rows.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from penstock.infra.backends.base import TokenBatch

BLOCK = 128
"""Tokens of a block, which divides the length of a line; tokens of two blocks that do not attend to each other cost nothing."""


def subtree_ends(first: np.ndarray, shared: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return [T] index behind the last descendant of each token, for rows in lexicographic order: a token's descendants follow it.

    `first` is the index of each row's own tokens, `shared` its number of columns that are shared with earlier rows.
    """
    ends = np.zeros(int(first[-1] + lengths[-1] - shared[-1]), np.int64)
    nearest = np.full(int(lengths.max()), len(ends))  # the first later row that branches off at or before a column
    for begin, kept, length in zip(first[::-1], shared[::-1], lengths[::-1], strict=True):
        ends[begin : begin + length - kept] = nearest[kept:length]
        nearest[kept:] = begin
    return ends


def block_mask(ends: torch.Tensor, positions: torch.Tensor, rule: Callable[..., Any]) -> BlockMask:
    """Return the mask of a line: token q attends to kv if kv <= q < ends[kv] and the model's `rule` for one row allows their positions."""
    blocks = torch.arange(len(ends) // BLOCK, device=ends.device)
    longest, shortest = ends.view(-1, BLOCK).amax(1), ends.view(-1, BLOCK).amin(1)
    some = (blocks <= blocks[:, None]) & ((blocks == blocks[:, None]) | (blocks[:, None] * BLOCK < longest))

    def descends(_batch: Any, _head: Any, q: Any, kv: Any) -> Any:
        return (kv <= q) & (q < ends[kv])

    def allowed(batch: Any, head: Any, q: Any, kv: Any) -> Any:
        return (kv <= q) & (q < ends[kv]) & rule(batch, head, positions[q], positions[kv])

    if rule is not causal_mask_function:
        return _of_blocks(some, torch.zeros_like(some), allowed)
    full = (blocks < blocks[:, None]) & ((blocks[:, None] + 1) * BLOCK <= shortest)
    return _of_blocks(some & ~full, full, descends)


def _of_blocks(partial: torch.Tensor, full: torch.Tensor, allowed: Callable[..., Any]) -> BlockMask:
    """Return a mask from [N, N] blocks of queries and keys: pairs in `partial` blocks attend if `allowed`, all in `full` blocks do."""
    lists, size = [], len(partial) * BLOCK
    # `BlockMask.from_kv_blocks` would take milliseconds for the transposed ones. The kernels read the lists as contiguous rows.
    for chosen in (partial, full, partial.T.contiguous(), full.T.contiguous()):
        lists += [chosen.sum(1, dtype=torch.int32), chosen.int().argsort(dim=1, descending=True, stable=True).int()]
    return BlockMask((size, size), *(part[None, None] for part in lists), BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=allowed)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled for sizes of all kinds, as one graph, so that it fails instead of running slowly."""
    return torch.compile(function, dynamic=True, fullgraph=True)


def line_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, *, scaling: float | None) -> torch.Tensor:
    """Return [1, T, heads, dim] from queries [1, heads, T, dim] and keys and values [1, groups, T, dim] of the line."""
    attend = flex_attention if torch.compiler.is_compiling() else compiled(flex_attention)
    attended: torch.Tensor = attend(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)
    return attended.transpose(1, 2)


TREE_ATTENTION = "penstock_tree"
SHORT_SCORES = 2**21
"""Up to so many attention scores per call, over all heads and rows, bfloat16 attention on a CPU is computed as two matrix products.

torch's kernel computes in float32 there, which takes up to eight times as long for rows of tens of tokens and 1.7 times for rows of
hundreds. More scores would take too much memory: they are saved for the backward pass, two bytes each.
"""
_EXPECTED: contextvars.ContextVar["PrefixTree | None"] = contextvars.ContextVar("the tree that is computed", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowIndices:
    """Index in the line of each column of the B rows, for attention that runs on rows."""

    whole: torch.Tensor
    """[A, W] index of every column, for rows with at least as many own tokens as shared ones; padded with the row's tokens."""
    own: torch.Tensor
    """[N, C] indices of the own tokens of the other rows."""
    columns: torch.Tensor
    """[N, C] columns of these tokens."""
    keys: torch.Tensor
    """[N, W] index of every column of those rows."""
    allowed: torch.Tensor
    """[N, 1, C, W] columns that each own token attends to."""
    outputs: torch.Tensor
    """[T] index of each token's output in the flattened outputs of `whole`, then `own`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """T distinct tokens as one line: linear layers run on the line, attention on its rows or on the line too."""

    ids: torch.Tensor
    """[T] ids of the distinct tokens."""
    positions: torch.Tensor
    """[T] column of each token in its row."""
    rows: RowIndices | None
    """None for attention on the line."""
    ends: torch.Tensor | None
    """[T] index behind the last descendant of each token; None for attention on rows."""
    predict: torch.Tensor
    """[U] index of each predicting token: the prompt's last token predicts the first tokens of its K completions."""
    temperatures: torch.Tensor
    """[U] sampling temperatures, float32."""
    row: torch.Tensor
    """[M] index in U of the token that predicts each trained token, ascending."""
    target: torch.Tensor
    """[M] id of each trained token."""
    slot: torch.Tensor
    """[M] flat index of each trained token in [B, L-1]."""

    def to(self, device: torch.device) -> "PrefixTree":
        """Return a copy on `device`."""
        return PrefixTree(**_moved(self, device))


def _moved(record: Any, device: torch.device) -> dict[str, Any]:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    moved = {name: value.to(device, non_blocking=True) for name, value in values.items() if isinstance(value, torch.Tensor)}
    rows = values.get("rows")
    return values | moved | ({} if rows is None else {"rows": RowIndices(**_moved(rows, device))})


def prefix_tree(batch: TokenBatch, *, line: bool = False) -> PrefixTree:
    """Return the tree of a micro-batch; rows without a common prefix follow each other without padding.

    A row branches off the earlier row with which it has the longest common prefix. Tokens after a row's last prediction are not computed.
    With `line`, rows are in lexicographic order and pads fill the last block, at least the second.
    """
    trained = batch.completion_mask
    lengths = np.where(trained.any(1), trained.shape[1] - trained[:, ::-1].argmax(1), 1)
    count, width = len(lengths), int(lengths.max())
    ids, column = batch.input_ids[:, :width], np.arange(width)
    order = np.lexsort(np.where(column < lengths[:, None], ids, -1).T[::-1]) if line else np.arange(count)
    ids, lengths = ids[order], lengths[order]
    indices, shared = _indices(ids, lengths)
    own = lengths - shared
    total, first = int(own.sum()), np.cumsum(own) - own
    owner = np.repeat(np.arange(count), own)
    positions = np.arange(total) - np.repeat(first - shared, own)
    pads = max(-total % BLOCK, 2 * BLOCK - total) if line else 0  # sizes of 1 would be compiled apart
    ends = np.append(subtree_ends(first, shared, lengths), total + 1 + np.arange(pads)) if line else None
    arrays = {
        "ids": np.pad(ids[owner, positions], (0, pads)),
        "positions": np.pad(positions, (0, pads)),
        **_predictions(batch, indices[np.argsort(order)]),
    }
    return PrefixTree(
        rows=None if line else RowIndices(**_tensors(_row_indices(indices, shared, own, outputs_of=(owner, positions)))),
        ends=None if ends is None else torch.from_numpy(ends),
        **_tensors(arrays),
    )


def _tensors(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def _row_indices(
    indices: np.ndarray, shared: np.ndarray, own: np.ndarray, *, outputs_of: tuple[np.ndarray, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the fields of `RowIndices`; `outputs_of` are row and column of each token of the line."""
    count, width = indices.shape
    column, (owner, positions) = np.arange(width), outputs_of
    full = np.flatnonzero((own > 0) & (own >= shared))  # attention over a full causal row costs less than over its tail alone
    branches = np.flatnonzero((own > 0) & (own < shared))
    longest = int(own[branches].max(initial=0))
    columns = (shared[branches, None] + np.arange(longest)) % width
    first_output = np.zeros(count, np.int64)  # index of the output of a row's column 0
    first_output[full] = np.arange(len(full)) * width
    first_output[branches] = len(full) * width + np.arange(len(branches)) * longest - shared[branches]
    return {
        "whole": indices[full],
        "own": indices[branches[:, None], columns],
        "columns": columns,
        "keys": indices[branches],
        "allowed": (column <= columns[:, :, None])[:, None],
        "outputs": first_output[owner] + positions,
    }


def _indices(ids: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ([B, W] index of every column in the line of distinct tokens, [B] number of columns shared with an earlier row)."""
    count, width = ids.shape
    column, total = np.arange(width), 0
    indices, shared = np.zeros((count, width), np.int64), np.zeros(count, np.int64)
    for row, size in enumerate(lengths):
        if row:
            same = (ids[:row, :size] == ids[row, :size]) & (column[:size] < lengths[:row, None])
            agree = np.where(same.all(1), size, same.argmin(1))
            nearest = int(agree.argmax())
            shared[row] = agree[nearest]
            indices[row, : shared[row]] = indices[nearest, : shared[row]]
        indices[row, shared[row] : size] = total + np.arange(size - shared[row])
        indices[row, size:] = np.resize(indices[row, :size], width - size)  # one index for all pads would be summed one by one
        total += int(size - shared[row])
    return indices, shared


def _predictions(batch: TokenBatch, indices: np.ndarray) -> dict[str, np.ndarray]:
    """Return the fields of `PrefixTree` about trained tokens; a batch without any predicts one without effect, so that it has a loss."""
    trained = batch.completion_mask
    row, column = np.nonzero(trained) if trained.any() else (np.zeros(1, np.int64), np.zeros(1, np.int64))
    temperatures, degree = np.unique(batch.temperatures, return_inverse=True)
    pairs, predicted_by = np.unique(indices[row, column] * len(temperatures) + degree[row], return_inverse=True)
    order = np.argsort(predicted_by, kind="stable")
    row, column = row[order], column[order]
    return {
        "predict": pairs // len(temperatures),
        "temperatures": temperatures[pairs % len(temperatures)],
        "row": predicted_by[order],
        "target": batch.input_ids[row, column + 1],
        "slot": row * trained.shape[1] + column,
    }


@contextlib.contextmanager
def tree_expected(tree: PrefixTree) -> Iterator[None]:
    """In the block, build attention masks for the tree, and raise an error for attention that does not get the tree."""
    token = _EXPECTED.set(tree)
    try:
        yield
    finally:
        _EXPECTED.reset(token)


def tree_inputs(tree: PrefixTree) -> dict[str, Any]:
    """Return the arguments of a model's forward for a tree.

    A mask [1, W] of ones requests the mask of one row of W columns; without it transformers treats restarting positions as packed rows.
    """
    width = len(tree.ids) if tree.rows is None else tree.rows.whole.shape[1]
    ones = torch.ones(1, width, dtype=torch.bool, device=tree.ids.device)
    inputs = {"input_ids": tree.ids[None], "position_ids": tree.positions[None], "attention_mask": ones}
    return inputs if tree.rows is None else inputs | {"prefix_tree": tree}


def tree_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, *,
    prefix_tree: PrefixTree | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Return [1, T, heads, dim] from [1, heads, T, dim]; the mask is a line's, one row's [1, 1, W, W], or None for causal attention."""
    if isinstance(attention_mask, BlockMask):
        return line_attention(query, key, value, attention_mask, scaling=kwargs.get("scaling")), None
    if prefix_tree is None or prefix_tree.rows is None:
        if _EXPECTED.get() is not None:
            raise RuntimeError(f"{type(module).__name__} did not receive the prefix tree: the model drops keyword arguments")
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    rows = prefix_tree.rows
    queries, keys, values = (_rows(x, rows.whole) for x in (query, key, value))
    parts = [_attend(module, queries, keys, values, attention_mask, **kwargs)]
    if len(rows.keys):
        keys, values = (_rows(x, rows.keys) for x in (key, value))
        allowed = _allowed(rows, attention_mask)
        parts.append(_attend(module, _rows(query, rows.own), keys, values, allowed, **kwargs))
    return torch.cat([part.flatten(0, 1) for part in parts]).index_select(0, rows.outputs)[None], None


def _attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
) -> torch.Tensor:
    """Return [R, C, heads, dim] from queries [R, heads, C, dim], keys and values [R, groups, W, dim]; causal without a mask."""
    scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    if query.device.type != "cpu" or query.dtype != torch.bfloat16 or scores > SHORT_SCORES:
        attended: torch.Tensor = sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]
        return attended
    return short_attention(query, key, value, mask, scaling=kwargs.get("scaling"))


def short_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *, scaling: float | None = None
) -> torch.Tensor:
    """Compute `_attend` by matrix products in the dtype of `query`; the mask is boolean or additive."""
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


def _rows(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return [R, heads, C, dim] from the line of distinct tokens [1, heads, T, dim] and indices [R, C]; sums gradients in float32."""
    tokens = x[0].transpose(0, 1)
    return tokens.index_select(0, indices.flatten()).view(*indices.shape, *tokens.shape[1:]).transpose(1, 2)


def _allowed(rows: RowIndices, mask: torch.Tensor | None) -> torch.Tensor:
    """Return [N, 1, C, W] mask of own tokens, combined with the model's own mask, such as a sliding window."""
    if mask is None:
        return rows.allowed
    rule = mask[0, 0][rows.columns][:, None]
    return rows.allowed & rule if rule.dtype == torch.bool else torch.where(rows.allowed, rule, torch.finfo(rule.dtype).min)


def _mask(*, batch_size: int, q_length: int, kv_length: int, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
    """Return the mask of the expected tree's line, or of padded rows or one row of a tree; transformers calls it."""
    tree = _EXPECTED.get()
    if tree is not None and tree.ends is not None:
        return block_mask(tree.ends, tree.positions, kwargs["mask_function"])
    if attention_mask is not None:
        batch_size, q_length, kv_length = 1, attention_mask.shape[1], attention_mask.shape[1]
    return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, attention_mask=None, **kwargs)


AttentionInterface.register(TREE_ATTENTION, tree_attention)
AttentionMaskInterface.register(TREE_ATTENTION, _mask)
