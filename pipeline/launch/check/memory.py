"""Peak memory of a run's workers, on their GPUs and on the host, from the model's shape and the configuration. No weight is read."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.infra.backends.deepspeed.options import OVERLAPPING_BUCKET
from penstock.infra.backends.settings import PIECE_ELEMENTS, PIECE_ELEMENTS_OF_GPU
from penstock.infra.engines.vllm.process import STAGED_OF_FREE
from penstock.pipeline.config.load import Config

MIB = 2**20
ITEM = {"float32": 4, "bfloat16": 2}
LIBRARIES = {"trainer": 870 * MIB, "transformers": 870 * MIB, "vllm": 1550 * MIB}
"""Resident memory of a process that has imported what it needs and connected to the broker, and holds no model."""
CONTEXT, COMMUNICATION, GRAPHS = 720 * MIB, 900 * MIB, 500 * MIB
"""Memory of a GPU that CUDA takes in each process, NCCL in each of several trainer processes, and vLLM's CUDA graphs."""
BUCKET_ELEMENTS = {True: OVERLAPPING_BUCKET, False: 500_000_000}
"""`reduce_bucket_size` of DeepSpeed with `overlap_comm`, which has two float32 buckets, and without. As many gradients wait for one."""
GATHERED_ELEMENTS = 1_050_000_000
"""Parameters that ZeRO-3 gathers at a time: `max_live_parameters` and `prefetch_bucket_size`."""
UTILIZATION = 0.9
"""vLLM's default for `gpu_memory_utilization`."""
PREFILLED_TOKENS = 8_192
"""Tokens of vLLM's largest forward pass on a GPU."""
BLOCK_TOKENS = 16
ON_HOST = ("libraries", "published", "new version", "offloaded")
"""Parts that never are on a GPU."""
MOVED = ("weights", "masters", "adapters", "moments", "frozen copies")
"""Parts of a trainer that are on the host while a rollout worker has their GPU; an engine leaves none there."""
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
    def head(self) -> int:
        """Parameters of the output layer."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the model, tied ones once."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * queries + 2 * self.hidden * keys + (queries + 2 * keys if self.biases else 0)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.head * (1 if self.tied else 2) + self.layers * layer + self.hidden

    @property
    def linear(self) -> int:
        """Sum of input and output sizes of a layer's linear layers; times r, the parameters of rank-r adapters."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return 2 * (self.hidden + queries) + 2 * (self.hidden + keys) + 3 * (self.hidden + self.intermediate)

    def activations(self, item: int, *, adapters: bool = False) -> int:
        """Bytes that a layer saves per token for the backward pass. Norms compute in float32.

        With adapters each linear layer keeps its input in float32, and the frozen weights keep none.
        """
        hidden, inner = self.hidden, self.intermediate
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if adapters and item < 4:
            return item * (2 * queries + 4 * keys + 3 * inner) + 8 * hidden + 4 * (5 * hidden + queries + inner)
        return item * (4 * hidden + 3 * queries + 4 * keys + 4 * inner) + 8 * hidden

    def cached(self, tokens: int, item: int) -> int:
        """Bytes of the KV cache for `tokens` tokens."""
        return 2 * self.layers * self.kv_heads * self.head_dim * tokens * item


def shape_of(config: Mapping[str, Any]) -> Shape | None:
    """The sizes in a model's `config.json`; None for another kind of model, such as a mixture of experts."""
    text = config.get("text_config")
    sizes = text if isinstance(text, Mapping) else config
    if any("expert" in name or name == "kv_lora_rank" for name in sizes):
        return None
    try:
        heads, hidden = int(sizes["num_attention_heads"]), int(sizes["hidden_size"])
        return Shape(
            layers=int(sizes["num_hidden_layers"]),
            hidden=hidden,
            intermediate=int(sizes["intermediate_size"]),
            heads=heads,
            kv_heads=int(sizes.get("num_key_value_heads") or heads),
            head_dim=int(sizes.get("head_dim") or hidden // heads),
            vocabulary=int(sizes["vocab_size"]),
            tied=bool(sizes.get("tie_word_embeddings", config.get("tie_word_embeddings", True))),
            biases=bool(sizes.get("attention_bias", sizes.get("model_type") == "qwen2")),
        )
    except (KeyError, TypeError, ValueError):
        return None


def shape_in(directory: Path) -> Shape | None:
    """The sizes of the model in a directory, as `shape_of`."""
    return shape_of(json.loads((directory / "config.json").read_text(encoding="utf-8")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Peak memory of one worker by purpose, in bytes; of an engine on several GPUs, per GPU."""

    role: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def on_gpu(self) -> Mapping[str, int]:
        """The parts in GPU memory; empty for a worker without a GPU, which has no CUDA context."""
        return {part: size for part, size in self.parts.items() if part not in ON_HOST and "context" in self.parts}

    @property
    def gpu(self) -> int:
        return sum(self.on_gpu.values())

    @property
    def host(self) -> int:
        return self.total - self.gpu


def estimates(config: Config, shape: Shape, *, gpu: bool = False) -> list[Estimate]:
    """Peak memory of trainer (per process), rollout worker and evaluator; `gpu`: this machine has GPUs for those that may use one."""
    engine = engine_parts(config, shape, gpu=gpu and config.rollout.device != "cpu")
    parts = {"trainer": trainer_parts(config, shape, gpu=gpu and config.trainer.device != "cpu"), "rollout": engine}
    if config.eval_sources and not config.evaluates_on_rollout_engine:
        parts["evaluator"] = engine
    return [Estimate(role=role, parts=sizes) for role, sizes in parts.items()]


def time_shared(workers: Sequence[Estimate]) -> tuple[int, int]:
    """(bytes on the GPU, bytes on the host) at the peak, if the workers time-share one GPU."""
    asleep = {each.role: each.parts.get("context", 0) for each in workers}
    on_gpu = [each.gpu + sum(size for role, size in asleep.items() if role != each.role) for each in workers]
    moved = [sum(each.parts.get(part, 0) for part in MOVED) for each in workers if each.role == "trainer"]
    return max(on_gpu), sum(each.host for each in workers) + sum(moved)


def trainer_parts(config: Config, shape: Shape, *, gpu: bool = False) -> dict[str, int]:
    """Memory of a trainer process at its peak, in the backward pass, with weights, optimizer state and gradient sums."""
    trainer, count, item = config.trainer, shape.parameters, ITEM[config.trainer.dtype]
    rank = trainer.lora_rank
    trained = rank * shape.linear * shape.layers if rank else count
    deepspeed = trainer.backend == "deepspeed"
    stage, shards = (trainer.zero_stage if deepspeed else 0), trainer.processes
    optimizer, gradients, weights = (shards if stage >= first else 1 for first in (1, 2, 3))
    # DeepSpeed keeps masters of float32 weights, too, where it shards anything.
    masters = not rank and (item < 4 or stage > 0)
    # Rank 0 has a version, its base and a snapshot on the host; on GPUs each rank has the model there before, while it loads.
    copies = max(3, shards) if gpu else 3
    frozen = (config.algorithm.kl_coef > 0 and not rank) + (config.proximal == "snapshot")
    saved, one_layer, head = activations(config, shape, gpu=gpu)
    options = trainer.deepspeed_config.get("zero_optimization", {})
    overlaps = bool(options.get("overlap_comm", stage > 1 and shards > 1))
    bucket = 4 * int(options.get("reduce_bucket_size", BUCKET_ELEMENTS[overlaps])) if gpu and stage else 0
    parts = {
        "libraries": LIBRARIES["trainer"],
        "weights": item * count // weights,
        "masters": 4 * trained // optimizer if masters else 0,
        "adapters": 4 * trained if rank else 0,
        "moments": 8 * trained // optimizer,
        "gradients": 4 * trained // gradients,
        "frozen copies": frozen * item * count,
        "published": item * count + 4 * trained if config.sends_adapters else copies * item * count // shards,
        "activations": saved,
        "one layer, or the output layer": max(one_layer + min(bucket, 4 * trained), head),
    }
    if not gpu:
        return parts
    parts["context"] = CONTEXT + (COMMUNICATION if shards > 1 else 0)
    parts["reduced gradients"] = bucket * (2 if overlaps else 1)
    parts["gathered weights"] = item * min(count, GATHERED_ELEMENTS) if stage == 3 else 0
    on_host = (*OFFLOADED[trainer.offload], *(("activations",) if trainer.offload_activations else ()))
    parts["offloaded"] = sum(parts[name] for name in on_host)
    parts |= dict.fromkeys(on_host, 0)
    # A process loads all weights before it keeps its shard of them.
    at_peak = sum(size for part, size in parts.items() if part not in ON_HOST)
    parts["while loading"] = max(0, item * count + parts["masters"] + parts["context"] - at_peak)
    return parts


def adapter_bytes(config: Config, shape: Shape | None) -> int | None:
    """Bytes of a version published as adapters; None if versions are not, or the model's size is unknown."""
    return 4 * config.trainer.lora_rank * shape.linear * shape.layers if config.sends_adapters and shape is not None else None


def micro_batch(config: Config) -> int:
    """Computed tokens in the largest micro-batch, with prompts and completions of maximum length."""
    trainer, schedule = config.trainer, config.schedule
    prompt, completion = config.data.max_prompt_tokens, config.max_completion_tokens
    all_samples = schedule.samples_per_prompt * schedule.prompts_per_step
    if trainer.micro_batch_by == "computed" and trainer.share_prompts != "off":
        return min(schedule.prompts_per_step * prompt + all_samples * completion, max(trainer.micro_batch_tokens, prompt + completion))
    samples = min(all_samples, max(1, trainer.micro_batch_tokens // (prompt + completion)))
    prompts = math.ceil(samples / schedule.samples_per_prompt) if trainer.share_prompts != "off" else samples
    return prompts * prompt + samples * completion


def activations(config: Config, shape: Shape, *, gpu: bool = False) -> tuple[int, int, int]:
    """Bytes for the largest micro-batch: saved for the backward pass, in the backward pass of one layer, and of the output layer.

    One layer has its gradients, and with checkpointing its recomputed activations; the output layer its logits and its gradient.
    """
    trainer, tokens, item = config.trainer, micro_batch(config), ITEM[config.trainer.dtype]
    layer = tokens * shape.activations(item, adapters=trainer.lora_rank > 0)
    checkpoints = tokens * item * shape.hidden
    saved = shape.layers * (checkpoints if trainer.gradient_checkpointing else layer)
    trains_head = not trainer.lora_rank
    inner = (2 if trains_head else 3) * shape.intermediate
    gradients = tokens * item * (inner + shape.hidden) + (item * shape.head if shape.tied and trains_head else 0)
    one_layer = gradients + (layer if trainer.gradient_checkpointing else 0)
    logits = tokens * shape.vocabulary
    whole = trainer.backend == "deepspeed" and trainer.zero_stage == 3
    pieces = min(logits, PIECE_ELEMENTS_OF_GPU if gpu else PIECE_ELEMENTS) * (item + 8) + (2 * item * logits if whole else checkpoints)
    head = shape.head * (4 + (item if item < 4 else 0)) if trains_head and not whole else 0
    return saved, one_layer, pieces + head + tokens * 8 * shape.hidden


def engine_parts(config: Config, shape: Shape, *, gpu: bool = False) -> dict[str, int]:
    """Memory of a process with the rollout engine at its peak, per GPU, with the cache that `rollout.concurrency` fills."""
    rollout, item = config.rollout, ITEM[config.rollout.dtype]
    vllm, ranks = rollout.engine == "vllm", config.engine.gpus(config.rollout.vllm) if gpu else 1
    rows = rollout.concurrency if vllm else config.schedule.samples_per_prompt
    embedding = item * shape.head
    packed = embedding if vllm and shape.tied and not gpu and not rollout.device.startswith("cuda") else 0  # a CPU's is a packed copy
    parts = {
        "libraries": LIBRARIES["vllm" if vllm else "transformers"],
        "weights": item * shape.parameters // ranks,
        "packed output layer": packed,
        "new version": (2 if config.sends_adapters else 1) * ITEM[config.trainer.dtype] * shape.parameters,
        "layers while they load": embedding + packed if vllm else 0,
        "keys and values": rows * cache_row(config, shape) // ranks,
        "logits": rows * shape.vocabulary * 4 * 2,
    }
    if gpu:
        prefilled = PREFILLED_TOKENS * item * (4 * shape.hidden + 3 * shape.intermediate) // ranks
        parts |= {"context": CONTEXT + (GRAPHS + prefilled if vllm else 0) + (COMMUNICATION if ranks > 1 else 0)}
    return parts


def cache_row(config: Config, shape: Shape) -> int:
    """KV cache bytes of the longest sample, on all GPUs of an engine."""
    longest = config.data.max_prompt_tokens + config.max_completion_tokens
    return shape.cached(longest + (4 * BLOCK_TOKENS if config.rollout.engine == "vllm" else 0), ITEM[config.rollout.dtype])


def cached_rows(config: Config, shape: Shape, memory: int) -> int:
    """Number of samples of maximum length that fit into vLLM's KV cache; below 0 if the weights do not fit."""
    share = config.rollout.vllm.get("gpu_memory_utilization", UTILIZATION)
    parts = engine_parts(config, shape, gpu=True)
    taken = Estimate(role="rollout", parts={**parts, "keys and values": 0}).gpu
    ranks = config.engine.gpus(config.rollout.vllm)
    return math.floor((share * memory - taken) * ranks / cache_row(config, shape))


def staging_share(config: Config, shape: Shape, memory: int) -> float:
    """Largest `gpu_memory_utilization`, in twentieths and at most the default, that leaves room to stage a version on each GPU."""
    version = ITEM[config.trainer.dtype] * shape.parameters
    free = version / STAGED_OF_FREE + CONTEXT + GRAPHS
    return min(UTILIZATION, math.floor(20 * (1 - free / memory)) / 20)
