"""Logits of a bfloat16 model in float32: the output layer's products are summed in float32 (`head_dtype` in vLLM)."""

from typing import Any

import torch
from torch.nn import functional


def float32_logits(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return [..., V] float32 logits of hidden states [..., hidden], with an output layer's weight [V, hidden] and bias [V]."""
    if states.is_cuda and states.ndim == 2 and weight.dtype != torch.float32 and not torch.is_grad_enabled():
        logits = torch.mm(states, weight.T, out_dtype=torch.float32)  # as fast as in bfloat16; it has no gradient
        return logits if bias is None else logits + bias
    return functional.linear(states.float(), weight.float(), None if bias is None else bias.float())


def set_float32_head(model: Any) -> None:
    """Let a causal language model compute its logits in float32; weights and hidden states keep their dtype."""
    layer = model.get_output_embeddings()
    layer.in_float32 = True
    layer.forward = lambda states: float32_logits(states, layer.weight, getattr(layer, "bias", None))
