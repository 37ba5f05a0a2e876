"""Head size, positions and KV cache size of a model, read from its `config.json` before vLLM is imported; None if not stated there."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.infra.errors import EngineRefused, one_line

ADVICE = "set model.path to a Hugging Face causal LM directory, or make one with `penstock model tiny DIR`"

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's CPU attention is compiled for; others load and fail at the first forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes of a decoder; None if its configuration has another form."""

    positions: int | None
    head_dim: int | None
    kv_elements: int | None
    """Elements of the KV cache for one token, over all layers."""
    experts: int
    """Experts of a layer; at most 1 for a dense model."""

    def kv_bytes(self, tokens: int, *, item_bytes: int, block_tokens: int) -> int | None:
        """Return bytes of KV cache for one sequence of `tokens`, in full blocks and with the one that vLLM reserves; None if unknown."""
        if self.kv_elements is None:
            return None
        return (-(-tokens // block_tokens) + 1) * block_tokens * self.kv_elements * item_bytes


def read_geometry(directory: Path) -> Geometry:
    """Return the sizes of the model in a directory. Raises `EngineRefused` if it has none."""
    try:
        root = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        reason = "it has no config.json" if directory.is_dir() else "no such directory"
        raise EngineRefused(f"there is no model in {directory} ({reason}): {ADVICE}") from None
    except (OSError, ValueError) as error:
        raise EngineRefused(f"cannot read the model's configuration {directory / 'config.json'} ({error}): {ADVICE}") from error
    if not isinstance(root, dict):
        raise EngineRefused(f"{directory / 'config.json'} is not a JSON object: {ADVICE}")
    text = root.get("text_config")
    config: dict[str, Any] = text if isinstance(text, dict) else root
    positions, layers, heads = (_size(config, name) for name in ("max_position_embeddings", "num_hidden_layers", "num_attention_heads"))
    hidden = _size(config, "hidden_size")
    head_dim = _size(config, "head_dim") or (hidden // heads if hidden and heads else None)
    kv_heads = _size(config, "num_key_value_heads") or heads
    latent = "kv_lora_rank" in config  # such models cache latent vectors, which are smaller than keys and values
    return Geometry(
        positions=positions,
        head_dim=None if latent else head_dim,
        kv_elements=2 * layers * kv_heads * head_dim if layers and kv_heads and head_dim and not latent else None,
        experts=max(_size(config, name) or 0 for name in ("num_experts", "num_local_experts", "n_routed_experts")),
    )


def parameter_shapes(directory: Path, hf_config: Any) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the parameters as in `named_parameters()` of the Hugging Face model: tied ones once."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(hf_config), trust_remote_code=False)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError) as error:
        raise EngineRefused(f"transformers cannot build the model in {directory} ({one_line(error)}): {ADVICE}") from error
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _size(config: dict[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
