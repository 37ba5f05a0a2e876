"""Writes model directories in Hugging Face format, which load to the same weights bit for bit."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import save_torch_state_dict
from transformers.core_model_loading import revert_weight_conversion

from penstock.infra.errors import BackendError
from penstock.infra.tensors.stream import TensorBytes
from penstock.infra.tensors.torch_copy import copy_into

TOKENIZER_FILES = ("token*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "chat_template*", "*.model", "generation_config.json")


def save_model(model: Any, weights: dict[str, torch.Tensor], directory: Path, *, tokenizer: str | Path) -> None:
    """Write a model with these weights, by name and once each, and the tokenizer of another model directory.

    `save_pretrained` is not used because it imports DeepSpeed, which takes seconds.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model.config.update({"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")})
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    save_torch_state_dict(revert_weight_conversion(model, weights), directory, max_shard_size="50GB")
    for pattern in TOKENIZER_FILES:
        for file in sorted(Path(tokenizer).glob(pattern)):
            shutil.copyfile(file, directory / file.name)


def write_model(architecture: str | Path, tensors: Iterable[TensorBytes], directory: Path) -> None:
    """Write the model that `config.json` in `architecture` describes, with these weights. Raises `BackendError`."""
    weights = list(tensors)
    dtype = getattr(torch, weights[0].dtype)
    try:
        config = transformers.AutoConfig.from_pretrained(architecture, local_files_only=True, trust_remote_code=False)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        copy_into(model, weights)
    except (OSError, ValueError) as error:
        raise BackendError(f"the recorded weights do not fit the architecture in {architecture}: {str(error).splitlines()[0]}") from error
    save_model(model, dict(model.named_parameters()), directory, tokenizer=architecture)
