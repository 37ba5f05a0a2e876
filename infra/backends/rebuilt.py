"""Writes a model directory from an architecture and separate weights.

The rule: the directory loads to the given weights, bit for bit.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
import transformers

from penstock.infra.backends.common import save_model
from penstock.infra.errors import BackendError
from penstock.infra.tensors.stream import TensorBytes
from penstock.infra.tensors.torch_copy import copy_into


def write_model(architecture: str | Path, tensors: Iterable[TensorBytes], directory: Path) -> None:
    """Write the model that `config.json` in `architecture` describes, with these weights. Raises `BackendError`."""
    held = list(tensors)
    dtype = getattr(torch, held[0].dtype)
    try:
        config = transformers.AutoConfig.from_pretrained(architecture, local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        copy_into(model, held)
    except (OSError, ValueError) as error:
        raise BackendError(
            f"the architecture in {architecture} does not take the recorded weights: {str(error).splitlines()[0]}"
        ) from error
    save_model(model, dict(model.named_parameters()), directory, tokenizer=architecture)
