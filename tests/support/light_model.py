"""A model's directory without weights: what is looked at before a run starts."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SIZES = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 64, "head_dim": 32}


def light_model(folder: Path, *, template: str | None = None, context: int | None = None) -> Path:
    """A model directory with a byte-level tokenizer, `</s>` as its end, and no weights."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    sizes = {} if context is None else {**SIZES, "max_position_embeddings": context}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": 257, **sizes}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
