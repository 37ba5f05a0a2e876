"""Opens models, and frozen copies of them: the reference model, and the proximal policy of a step.

Dropout is off, so that a forward pass depends only on weights and tokens.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from penstock.infra.backends.batch import TokenBatch
from penstock.infra.backends.logprobs.forward import choose_forward
from penstock.infra.backends.settings import BackendSettings
from penstock.infra.errors import BackendError
from penstock.infra.tensors.stream import TensorBytes
from penstock.infra.tensors.torch_copy import copy_into


def open_model(settings: BackendSettings, *, device: torch.device, path: str | None = None) -> Any:
    """Open the causal language model in `path`, by default `model_path`, without dropout. Raises `BackendError`."""
    path = path or settings.model_path
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, settings.dtype), local_files_only=True, trust_remote_code=False, attn_implementation="sdpa"
        )
    except (OSError, ValueError, ImportError) as error:
        raise BackendError(f"cannot open the model in {path}: {str(error).splitlines()[0]}") from error
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    return model.to(device)


class FrozenPolicy:
    """A copy of the model at one version that is not trained."""

    def __init__(self, settings: BackendSettings, *, device: torch.device, path: str | None = None) -> None:
        """Open the model in `path`, by default version 0 from `model_path`."""
        self.model = open_model(settings, device=device, path=path).eval().requires_grad_(False)
        self.forward = choose_forward(self.model, share=settings.share_prompts, device=device)
        self.device = device

    def load(self, tensors: Iterable[TensorBytes]) -> None:
        """Replace the weights by those of another version."""
        copy_into(self.model, tensors)

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> npt.NDArray[np.float32]:
        """[B, L-1] logprobs, 0 on untrained tokens."""
        return host_floats(self.forward(self.model, batch, device=self.device)[0])


def host_floats(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    """A tensor as a float32 array in host memory."""
    array: npt.NDArray[np.float32] = tensor.detach().float().cpu().numpy()
    return array
