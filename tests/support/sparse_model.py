"""Model directories in the sizes of Qwen2.5, whose weights are holes: 60 kB on disk, whatever the size of the model."""

import json
import math
import struct
from pathlib import Path
from typing import Any

from tests.support.light_model import light_model

QWEN = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
}
"""Hidden size, intermediate size, layers, heads, heads of keys and values, vocabulary, tied embeddings."""


def sizes(name: str) -> dict[str, Any]:
    """The sizes in `config.json`."""
    hidden, intermediate, layers, heads, groups, vocabulary, tied = QWEN[name]
    return {
        "model_type": "qwen2", "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": vocabulary, "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
    }  # fmt: skip


def sparse_model(folder: Path, name: str, **changed: Any) -> Path:
    """A directory with a byte-level tokenizer and a safetensors file that lists the tensors of the model."""
    light_model(folder, context=32768)
    config = {**sizes(name), "architectures": ["Qwen2ForCausalLM"], "eos_token_id": 257, "dtype": "bfloat16", **changed}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    header: dict[str, Any] = {}
    end = 0
    for tensor, shape in _shapes(name).items():
        start, end = end, end + 2 * math.prod(shape)
        header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)
    return folder


def _shapes(name: str) -> dict[str, list[int]]:
    hidden, intermediate, layers, heads, groups, vocabulary, tied = QWEN[name]
    keys = groups * (hidden // heads)
    of_layer = {
        "self_attn.q_proj.weight": [hidden, hidden], "self_attn.q_proj.bias": [hidden], "self_attn.k_proj.weight": [keys, hidden],
        "self_attn.k_proj.bias": [keys], "self_attn.v_proj.weight": [keys, hidden], "self_attn.v_proj.bias": [keys],
        "self_attn.o_proj.weight": [hidden, hidden], "mlp.gate_proj.weight": [intermediate, hidden],
        "mlp.up_proj.weight": [intermediate, hidden], "mlp.down_proj.weight": [hidden, intermediate],
        "input_layernorm.weight": [hidden], "post_attention_layernorm.weight": [hidden],
    }  # fmt: skip
    shapes = {f"model.layers.{layer}.{part}": shape for layer in range(layers) for part, shape in of_layer.items()}
    shapes |= {"model.embed_tokens.weight": [vocabulary, hidden], "model.norm.weight": [hidden]}
    return shapes if tied else {**shapes, "lm_head.weight": [vocabulary, hidden]}
