"""Peak memory of each worker, from the sizes in a model's `config.json`; no weight is read.

Pure functions of sizes. The memory of a process without a model was measured (`benchmarks/memory.py` repeats it); all else is
counted. On a GPU the same parts lie in its memory, but for the libraries.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.pipeline.config.load import Config

MIB = 2**20
LIBRARIES = {"trainer": 870 * MIB, "transformers": 870 * MIB, "vllm": 1550 * MIB}
"""Resident memory of a process that has imported what it needs and connected to the broker, and holds no model."""
LOGITS = 128 * MIB
"""Logits that are alive at once in the trainer, and their gradient."""
ITEM = {"float32": 4, "bfloat16": 2}
ON_HOST = ("libraries", "published", "new version")
"""Parts that never lie on a GPU."""
MOVED = ("weights", "masters", "adapters", "moments", "frozen copies")
"""Parts of a trainer that lie on the host while a rollout worker has their GPU; an engine keeps none of its own."""
OFFLOADED = {"none": (), "optimizer": ("masters", "moments", "gradients"), "parameters": ("masters", "moments", "gradients", "weights")}
"""Parts of the trainer that `trainer.offload` leaves in the host's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a decoder with gated feed-forward layers."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    biases: bool
    """True if queries, keys and values have biases (Qwen2)."""

    @property
    def parameters(self) -> int:
        """Parameters of the model, tied ones once."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * queries + 2 * self.hidden * keys + (queries + 2 * keys if self.biases else 0)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.embedding * (1 if self.tied else 2) + self.layers * layer + self.hidden

    @property
    def embedding(self) -> int:
        """Parameters of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def linear(self) -> int:
        """Inputs and outputs of all linear layers of a decoder layer: with rank r they have r times as many parameters in adapters."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return 2 * (self.hidden + queries) + 2 * (self.hidden + keys) + 3 * (self.hidden + self.intermediate)

    def activations(self, item: int) -> int:
        """Bytes that a layer keeps of one token for the backward pass; norms compute in float32."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return item * (4 * self.hidden + 3 * queries + 4 * keys + 4 * self.intermediate) + 4 * 4 * self.hidden

    def cached(self, tokens: int, item: int) -> int:
        """Bytes of keys and values of so many tokens."""
        return 2 * self.layers * self.kv_heads * self.head_dim * tokens * item


def shape_of(config: Mapping[str, Any]) -> Shape | None:
    """The sizes in a model's `config.json`; None of another kind of model, such as a mixture of experts."""
    text = config.get("text_config")
    sizes = text if isinstance(text, Mapping) else config
    try:
        layers, hidden, intermediate, heads, vocabulary = (
            int(sizes[name]) for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        )
    except (KeyError, TypeError, ValueError):
        return None
    if any("expert" in name or name == "kv_lora_rank" for name in sizes):
        return None
    return Shape(
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=int(sizes.get("num_key_value_heads") or heads),
        head_dim=int(sizes.get("head_dim") or hidden // heads),
        vocabulary=vocabulary,
        tied=bool(sizes.get("tie_word_embeddings", config.get("tie_word_embeddings", True))),
        biases=bool(sizes.get("attention_bias", sizes.get("model_type") == "qwen2")),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The peak of one worker's resident memory, by what it is for, in bytes."""

    role: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())


def estimates(config: Config, shape: Shape) -> list[Estimate]:
    """Trainer (each of its processes), rollout worker and evaluator."""
    engine = Estimate(role="rollout", parts=engine_parts(config, shape))
    shown = [Estimate(role="trainer", parts=trainer_parts(config, shape)), engine]
    return (
        [*shown, Estimate(role="evaluator", parts=engine.parts)]
        if config.eval_sources and not config.evaluates_on_rollout_engine
        else shown
    )


def time_shared(workers: Sequence[Estimate]) -> tuple[int, int]:
    """(bytes on the GPU, bytes on the host) at the peak, where the workers have one GPU by turns."""
    on_gpu = [sum(size for part, size in each.parts.items() if part not in ON_HOST) for each in workers]
    stays = [sum(size for part, size in each.parts.items() if part in ON_HOST) for each in workers]
    moved = [sum(each.parts.get(part, 0) for part in MOVED) for each in workers if each.role == "trainer"]
    return max(on_gpu), sum(stays) + sum(moved)


def trainer_parts(config: Config, shape: Shape) -> dict[str, int]:
    """Memory of a trainer process at its peak."""
    trainer, count = config.trainer, shape.parameters
    item, rank = ITEM[trainer.dtype], trainer.lora_rank
    trained = rank * shape.linear * shape.layers if rank else count
    shards = trainer.processes if trainer.backend == "deepspeed" else 1
    of_stage = {0: (1, 1, 1), 1: (shards, 1, 1), 2: (shards, shards, 1), 3: (shards, shards, shards)}
    optimizer, gradients, weights = of_stage[trainer.zero_stage] if shards > 1 else (1, 1, 1)
    # DeepSpeed keeps masters of float32 weights, too, where it shards anything.
    masters = not rank and (item < 4 or (trainer.backend == "deepspeed" and trainer.zero_stage > 0))
    frozen = (config.algorithm.kl_coef > 0 and not rank) + (config.proximal == "snapshot")
    return {
        "libraries": LIBRARIES["trainer"],
        "weights": item * count // weights,
        "masters": 4 * trained // optimizer if masters else 0,
        "adapters": 4 * trained if rank else 0,
        "moments": 8 * trained // optimizer,
        "gradients": 4 * trained // gradients,
        "frozen copies": frozen * item * count,
        "published": item * count + 4 * trained if config.sends_adapters else 2 * item * count,
        "activations": sum(activations(config, shape)) + LOGITS,
    }


def offloaded(config: Config, shape: Shape) -> int:
    """Bytes of a trainer process that stay in the host's memory although it computes on a GPU."""
    parts = trainer_parts(config, shape)
    on_host = activations(config, shape)[0] if config.trainer.offload_activations else 0
    return on_host + sum(parts[name] for name in OFFLOADED[config.trainer.offload])


def adapter_bytes(config: Config, shape: Shape | None) -> int | None:
    """Bytes of a version that is published as adapters; None for other versions, and for models that are not estimated."""
    return 4 * config.trainer.lora_rank * shape.linear * shape.layers if config.sends_adapters and shape is not None else None


def activations(config: Config, shape: Shape) -> tuple[int, int]:
    """Bytes of the largest micro-batch, every prompt and completion of maximum length: retained for the backward pass, recomputed in it."""
    trainer, schedule = config.trainer, config.schedule
    prompt, completion = config.data.max_prompt_tokens, config.max_completion_tokens
    samples = min(schedule.samples_per_prompt * schedule.prompts_per_step, max(1, trainer.micro_batch_tokens // (prompt + completion)))
    prompts = math.ceil(samples / schedule.samples_per_prompt) if trainer.share_prompts != "off" else samples
    tokens, item = prompts * prompt + samples * completion, ITEM[trainer.dtype]
    layer = tokens * shape.activations(item)
    return (shape.layers * tokens * item * shape.hidden, layer) if trainer.gradient_checkpointing else (shape.layers * layer, 0)


def engine_parts(config: Config, shape: Shape) -> dict[str, int]:
    """Memory of a process with the rollout engine at its peak."""
    rollout, item = config.rollout, ITEM[config.rollout.dtype]
    longest = config.data.max_prompt_tokens + config.max_completion_tokens
    vllm = rollout.engine == "vllm"
    rows = rollout.concurrency if vllm else config.schedule.samples_per_prompt
    embedding = item * shape.embedding
    packed = embedding if vllm and shape.tied and not rollout.device.startswith("cuda") else 0  # a CPU's output layer is a packed copy
    return {
        "libraries": LIBRARIES["vllm" if vllm else "transformers"],
        "weights": item * shape.parameters,
        "packed output layer": packed,
        "new version": (2 if config.sends_adapters else 1) * ITEM[config.trainer.dtype] * shape.parameters,
        "layers while they load": embedding + packed if vllm else 0,
        "keys and values": shape.cached(rows * (longest + (64 if vllm else 0)), item),
        "logits": rows * shape.vocabulary * 4 * 2,
    }
