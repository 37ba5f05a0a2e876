"""New weights for a dense model that vLLM runs on a CPU: each layer's weights are joined and packed anew, and nothing else happens.

The rule: it stands in for vLLM's reload, most of whose time goes into bookkeeping, only for models all of whose parameters it knows, and
only after it has left the same layers behind as the reload.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""vLLM's joined layers, and what they are joined from, row after row."""


@dataclass(slots=True)
class Repacking:
    """Where each tensor of a version goes."""

    linears: list[tuple[Any, tuple[str, ...]]] = field(default_factory=list)
    """Layers that compute with a packed copy and hold no weights, with the tensors they are made of."""
    copies: list[tuple[torch.Tensor, tuple[str, ...]]] = field(default_factory=list)
    """Parameters that are held, maybe with rows behind those of the tensors, which stay zero."""
    heads: list[Any] = field(default_factory=list)
    """Output layers that compute with a packed copy of a parameter that is held."""

    @classmethod
    def of(cls, model: Any, tensors: Mapping[str, torch.Tensor]) -> "Repacking | None":
        """The places of these tensors in a model; None when one of them, or of the model's parameters, is not understood."""
        found, used = cls(), set[str]()
        held = dict(model.named_parameters())
        for name, module in model.named_modules():
            if not hasattr(module, "cpu_linear"):
                continue
            weight = held.get(f"{name}.weight")
            if weight is None or weight.numel():  # an output layer, or one that shares the embedding
                found.heads.append(module)
                continue
            parts = _parts(f"{name}.weight")
            rows, columns = module.output_size, module.input_size
            if not all(part in tensors for part in parts) or rows != module.output_size_per_partition:
                return None
            if sum(tensors[part].shape[0] for part in parts) != rows or any(tensors[part].shape[1:] != (columns,) for part in parts):
                return None
            found.linears.append((module, parts))
            used.update(parts)
            del held[f"{name}.weight"]
        for name, parameter in held.items():
            parts = _parts(name)
            if not all(part in tensors for part in parts):
                return None
            rows = sum(tensors[part].shape[0] for part in parts)
            if parameter.ndim != tensors[parts[0]].ndim or parameter.shape[1:] != tensors[parts[0]].shape[1:] or parameter.shape[0] < rows:
                return None
            found.copies.append((parameter.data, parts))
            used.update(parts)
        return found if used == tensors.keys() else None

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put a version in."""
        with torch.no_grad():
            for parameter, parts in self.copies:
                row = 0
                for part in parts:
                    parameter[row : row + len(tensors[part])].copy_(tensors[part])
                    row += len(tensors[part])
            for layer, parts in self.linears:
                joined = torch.cat([tensors[part] for part in parts]).to(layer.weight.dtype)  # a copy, for one part too
                layer.weight = torch.nn.Parameter(joined, requires_grad=False)
                layer.quant_method.process_weights_after_loading(layer)
        for head in self.heads:
            head.quant_method.process_weights_after_loading(head)

    def changes_nothing(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether a model that vLLM's reload has given these tensors is the same after `apply`; where not, it has to be reloaded."""
        before = list(self.results())
        self.apply(tensors)
        return all(torch.equal(one, other) for one, other in zip(before, self.results(), strict=True))

    def results(self) -> Iterator[torch.Tensor]:
        """What tells two states of the model apart: the held parameters, and what every packed layer makes of some numbers."""
        for parameter, _ in self.copies:
            yield parameter.clone()
        generator = torch.Generator().manual_seed(0)
        for layer in [layer for layer, _ in self.linears] + self.heads:
            columns = getattr(layer, "input_size", None) or layer.embedding_dim
            numbers = torch.randn((3, columns), generator=generator).to(layer.weight.dtype)
            yield layer.cpu_linear(numbers, layer.weight, None).float()


def _parts(name: str) -> tuple[str, ...]:
    """The tensors that a parameter is joined from.

    Example:
        _parts("model.layers.0.mlp.gate_up_proj.weight")
        # -> ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight")
    """
    path, _, kind = name.rpartition(".")
    owner, _, leaf = path.rpartition(".")
    return tuple(f"{owner}.{one}.{kind}" for one in FUSED[leaf]) if leaf in FUSED else (name,)
