"""Random Llamas of real shapes; nothing is downloaded."""

from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 100, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.05,
    },
    "5m": {
        "vocab_size": 100, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 8,
        "num_key_value_heads": 4, "max_position_embeddings": 1024, "initializer_range": 0.05,
    },
    "135m": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "max_position_embeddings": 2048, "initializer_range": 0.041666666666666664,
    },
}  # fmt: skip
"""Llama's shapes; the small ones have the tiny tokenizer's vocabulary, "135m" is SmolLM2-135M's."""


def make_model(directory: Path, *, size: str) -> int:
    """Write a random Llama of this size with the tiny tokenizer; returns its number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from penstock.pipeline.data.tiny.model import tiny_tokenizer

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES[size], tie_word_embeddings=True, eos_token_id=2, bos_token_id=1))
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def random_model(directory: Path, *, size: str, tokens: int) -> list[str]:
    """Make a random model; returns the settings (KEY=VALUE) that train it on completions of at most `tokens`.

    The model ends a completion with each token's probability, so that lengths are geometric; shorter ones have higher rewards.
    """
    make_model(directory, size=size)
    return [
        f"model.path={directory}",
        f'reward.functions=["soft_overlong?cache={tokens}"]',
        f"sampling.max_new_tokens={tokens}",
        "algorithm.filter_zero_variance=false",
    ]
