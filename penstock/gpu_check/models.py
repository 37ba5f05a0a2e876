"""Models with random weights, and samples with the lengths of a usual run."""

from pathlib import Path

import numpy as np
import torch
import transformers

from penstock.pipeline.learner.micro_batches import TokenSequence

SHAPES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128,
             "vocab_size": 512, "tie_word_embeddings": True},
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
             "vocab_size": 151936, "tie_word_embeddings": True},
    "1.5B": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960,
             "vocab_size": 151936, "tie_word_embeddings": True},
}  # fmt: skip
"""Sizes of Qwen2.5's models, and one for a CPU."""


def random_model(folder: Path, *, shape: str, dtype: str = "bfloat16", device: torch.device | str = "cpu") -> Path:
    """Directory of a model of that shape with random weights, without a tokenizer; written once for each folder."""
    path = folder / f"{shape}-{dtype}"
    if not (path / "config.json").exists():
        config = transformers.Qwen2Config(**SHAPES[shape], max_position_embeddings=32768, use_sliding_window=False)
        torch.manual_seed(0)
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        model.save_pretrained(path)
    return path


def samples(
    groups: int, *, per_group: int = 8, prompt: int = 250, mean: int = 300, longest: int = 1024, vocabulary: int = 150_000
) -> list[TokenSequence]:
    """Random samples of `per_group` for each prompt; lengths of completions are log-normal with that mean, sigma 0.6."""
    random = np.random.default_rng(0)
    sequences = []
    for group in range(groups):
        prompt_ids = random.integers(0, vocabulary, prompt).astype(np.int32)
        for sample in range(per_group):
            tokens = int(np.clip(random.lognormal(np.log(mean) - 0.18, 0.6), 2, longest))
            sequences.append(
                TokenSequence(
                    group=group, sample=sample, prompt_ids=prompt_ids,
                    completion_ids=random.integers(0, vocabulary, tokens).astype(np.int32),
                    behaviour_logprobs=np.full(tokens, -np.log(vocabulary), np.float32), loss_mask=np.ones(tokens, np.bool_),
                    advantage=float(random.normal()),
                )
            )  # fmt: skip
    return sequences
