"""Activation offload (`trainer.offload_activations`): saved tensors are in host memory until the backward pass, bit for bit."""

from typing import Any

import torch


def saved_on_host(model: Any, *, device: torch.device) -> torch.autograd.graph.saved_tensors_hooks:
    """A context for the forward pass; with gradient checkpointing only the inputs of layers are moved.

    Weights are not moved, except those that ZeRO-3 gathers for a pass.
    """
    host = torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> Any:
        return tensor if tensor.untyped_storage().data_ptr() in weights else host.pack_hook(tensor)

    def unpack(packed: Any) -> torch.Tensor:
        tensor: torch.Tensor = packed if isinstance(packed, torch.Tensor) else host.unpack_hook(packed)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
