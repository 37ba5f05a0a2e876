"""Keeps what the backward pass needs in the host's memory until then (`trainer.offload_activations`).

The rule: bits are copied and copied back, so that a step is the same with it and without.
"""

from typing import Any

import torch


def saved_on_host(model: Any, *, device: torch.device) -> torch.autograd.graph.saved_tensors_hooks:
    """A context for the forward pass; with gradient checkpointing it is the inputs of layers that are moved.

    Weights stay where they are. Under ZeRO-3 those that a pass has gathered are not the model's own, and are moved too.
    """
    host = torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> Any:
        return tensor if tensor.untyped_storage().data_ptr() in weights else host.pack_hook(tensor)

    def unpack(packed: Any) -> torch.Tensor:
        tensor: torch.Tensor = packed if isinstance(packed, torch.Tensor) else host.unpack_hook(packed)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
