"""A value head: a linear function of the policy's hidden states that predicts the advantage of a sample from its tokens so far.

The value of a token depends on the tokens before it only, so subtracting it leaves the expected policy gradient unchanged and lowers its
variance (the baseline of REINFORCE; PipelineRL, arXiv 2509.19128). The states are detached: the head does not change the policy's
gradient, norm or weights.
"""

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch.nn import functional

from penstock.infra.backends.settings import BackendSettings
from penstock.infra.errors import BackendError


class ValueHead:
    """A linear layer from hidden states to values, zero at first, with its AdamW."""

    def __init__(self, size: int, *, lr: float, betas: tuple[float, float], device: torch.device) -> None:
        self.weight = torch.zeros(size, device=device, requires_grad=True)
        self.bias = torch.zeros(1, device=device, requires_grad=True)
        self.parameters = [self.weight, self.bias]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=lr, betas=betas, weight_decay=0.0)

    @classmethod
    def of(cls, model: Any, settings: BackendSettings, *, device: torch.device, in_pieces: bool) -> Self | None:
        """Return a head for a model's hidden states; None without `value_lr`. Raises `BackendError` if only logits can be read."""
        if settings.value_lr is None:
            return None
        if not in_pieces:
            raise BackendError(
                "algorithm.value_lr: a value head needs hidden states, which this model does not expose; remove algorithm.value_lr"
            )
        return cls(model.get_output_embeddings().weight.shape[1], lr=settings.value_lr, betas=settings.betas, device=device)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Return [M] float32 values of hidden states [M, hidden], with gradient for the head only."""
        normalised = functional.layer_norm(states.detach().float(), states.shape[-1:])
        return normalised @ self.weight + self.bias

    @torch.no_grad()
    def step(self, *, denominator: float, ranks: int) -> None:
        """Divide the gradient sum, over all ranks, by the step's denominator, and update the head."""
        for parameter in self.parameters:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if ranks > 1:
                torch.distributed.all_reduce(gradient)
            parameter.grad = gradient / denominator
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the head's weights and its optimizer moments."""
        yield from self.parameters
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def state(self) -> dict[str, Any]:
        """Return the head's weights and optimizer moments, as stored in a checkpoint."""
        return {"parameters": [parameter.detach() for parameter in self.parameters], "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Restore weights and moments from `state`; the learning rate stays."""
        for parameter, saved in zip(self.parameters, state["parameters"], strict=True):
            parameter.copy_(saved)
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
