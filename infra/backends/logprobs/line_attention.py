"""Attention over a line of distinct tokens on a GPU, by torch's FlexAttention: each token attends to itself and its ancestors in the tree.

Nothing is gathered or copied for the rows. The kernels are compiled at the first call, once for all lengths.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.masking_utils import causal_mask_function

BLOCK = 128
"""The length of a line is a multiple of it; tokens of two blocks that do not attend to each other cost nothing."""


def subtree_ends(first: np.ndarray, shared: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[T] index behind the last descendant of each token, for rows in lexicographic order: a token's descendants follow it.

    `first` is the index of each row's own tokens, `shared` its number of columns that are shared with earlier rows.
    """
    ends = np.zeros(int(first[-1] + lengths[-1] - shared[-1]), np.int64)
    nearest = np.full(int(lengths.max()), len(ends))  # the first later row that branches off at or before a column
    for begin, kept, length in zip(first[::-1], shared[::-1], lengths[::-1], strict=True):
        ends[begin : begin + length - kept] = nearest[kept:length]
        nearest[kept:] = begin
    return ends


def block_mask(ends: torch.Tensor, positions: torch.Tensor, rule: Callable[..., Any]) -> BlockMask:
    """Mask of a line: token q attends to kv if kv <= q < ends[kv] and if `rule`, the model's mask of one row, allows their positions."""
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
    """Mask from [N, N] blocks of queries and keys: in `partial` blocks a pair attends if `allowed`, in `full` blocks every pair does."""
    lists, size = [], len(partial) * BLOCK
    # `BlockMask.from_kv_blocks` would take milliseconds for the transposed ones. The kernels read the lists as contiguous rows.
    for chosen in (partial, full, partial.T.contiguous(), full.T.contiguous()):
        lists += [chosen.sum(1, dtype=torch.int32), chosen.int().argsort(dim=1, descending=True, stable=True).int()]
    return BlockMask((size, size), *(part[None, None] for part in lists), BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=allowed)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled for sizes of all kinds; one graph, so that it fails instead of running slowly."""
    return torch.compile(function, dynamic=True, fullgraph=True)


def line_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, *, scaling: float | None) -> torch.Tensor:
    """[1, T, heads, dim] from queries [1, heads, T, dim] and keys and values [1, groups, T, dim]."""
    attend = flex_attention if torch.compiler.is_compiling() else compiled(flex_attention)
    attended: torch.Tensor = attend(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)
    return attended.transpose(1, 2)
