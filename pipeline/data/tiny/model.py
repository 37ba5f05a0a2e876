"""Makes tiny models: Qwen3 with 0.1 M parameters over single characters, pretrained on imperfect demonstrations of a tiny task."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.infra.paths import new_directory
from penstock.pipeline.data.tiny.lake import demonstration
from penstock.pipeline.data.tiny.task import demonstrations

SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS = 0, 1, 2
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
POSITIONS = 2048
"""Maximum sequence length; leaves room for real prompts at one token per character."""

Progress = Callable[[int, int, float], None]
Text = list[tuple[str, bool]]
"""Pieces of one demonstration, each with True if the policy generates it; a generated piece ends with the end token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainTask:
    """Supervised task and architecture of a tiny model."""

    demonstrations: Callable[[int, random.Random], Sequence[Text]]
    steps: int
    batch: int
    peak_lr: float
    layers: int
    heads: int


SUCCESSOR = PretrainTask(
    demonstrations=lambda count, rng: [[(row["prompt"], False), (row["answer"], True)] for row in demonstrations(count, rng)],
    steps=200, batch=64, peak_lr=5e-3, layers=3, heads=2,
)  # fmt: skip
LAKE = PretrainTask(
    demonstrations=lambda count, rng: [demonstration(rng) for _ in range(count)], steps=200, batch=32, peak_lr=3e-3, layers=2, heads=4
)


def make_tiny_model(
    directory: str | Path, *, seed: int = 0, task: PretrainTask = SUCCESSOR, steps: int | None = None, progress: Progress | None = None
) -> Path:
    """Write model and tokenizer to a new directory after supervised learning; `steps` defaults to the task's number.

    `progress` is called with (step, steps, loss). Raises `ValueError` if the directory is not empty.
    """
    steps = task.steps if steps is None else steps
    tokenizer = tiny_tokenizer()
    threads = torch.get_num_threads()
    with new_directory(Path(directory), holds="the tiny model") as aside:
        torch.set_num_threads(1)  # bits differ between thread counts
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = _untrained(task)
                _pretrain(model, tokenizer, task, seed=seed, steps=steps, progress=progress)
        finally:
            torch.set_num_threads(threads)
        _save(model, tokenizer, aside)
    return Path(directory)


def tiny_tokenizer() -> Any:
    """Return a fast tokenizer, one token per character; an unknown character is `<unk>`, and no special tokens are added."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate((*SPECIALS, *CHARACTERS))}
    built = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    built.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=built, padding_side="left", model_max_length=POSITIONS, clean_up_tokenization_spaces=False, **names
    )


def _untrained(task: PretrainTask) -> Any:
    """Return a Qwen3 model for the task with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(SPECIALS) + len(CHARACTERS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=task.layers,
        num_attention_heads=task.heads,
        num_key_value_heads=1,
        head_dim=32,  # the smallest that vLLM supports on a CPU
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def _pretrain(model: Any, tokenizer: Any, task: PretrainTask, *, seed: int, steps: int, progress: Progress | None) -> None:
    """Train the model on demonstrations with AdamW and a learning rate that falls linearly to a tenth."""
    rng, ids_of = random.Random(seed), tokenizer.get_vocab()  # by table: calling the tokenizer would cost a fifth of the time
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.peak_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = task.peak_lr * min(1.0, (step + 1) / 10) * (1 - 0.9 * step / steps)
        ids, labels = _batch(task.demonstrations(task.batch, rng), ids_of)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if progress is not None:
            progress(step + 1, steps, float(loss.detach()))
    model.eval()


def _batch(texts: Sequence[Text], ids_of: Mapping[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return right-padded ids `int64[B, L]` and next-token labels `int64[B, L-1]`, -1 for tokens that are not learned."""
    rows = [
        [pair for piece, mine in text for pair in [*((ids_of[c], mine) for c in piece), *([(EOS, True)] if mine else [])]] for text in texts
    ]
    length = max(map(len, rows))
    ids = torch.full((len(rows), length), PAD)
    labels = torch.full((len(rows), length), -1)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor([token for token, _ in row])
        labels[number, : len(row)] = torch.tensor([token if mine else -1 for token, mine in row])
    return ids, labels[:, 1:]


def _save(model: Any, tokenizer: Any, directory: Path) -> None:
    """Write configuration, tokenizer and weights as a Hugging Face model directory."""
    from safetensors.torch import save_file

    model.config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # By name and once each: tied embeddings are one parameter. `save_pretrained` would import an accelerator library, which takes seconds.
    tensors = {name: value.detach().contiguous() for name, value in model.named_parameters()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
