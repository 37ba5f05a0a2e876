"""Sizes that follow from a configuration: of a step and the run, bytes on disk, and memory of each worker. No weight is read."""

import bisect
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil

from penstock.infra.backends.nvidia import visible_gpus
from penstock.infra.errors import PenstockError
from penstock.infra.paths import state_path
from penstock.infra.tensors.parameter_count import parameters
from penstock.pipeline.config.load import Config, ConfigError, with_values
from penstock.pipeline.inspect.records.runs import size
from penstock.pipeline.launch.placement import place
from penstock.pipeline.runtime.roles import ROLES
from penstock.pipeline.scheduling.rules import versions_of
from penstock.topics.catalogue import DELETED_SEGMENT_BYTES


def arithmetic(config: Config, *, rows: int) -> list[tuple[str, str]]:
    """The numbers that follow from the configuration, as (name, value) for a person."""
    rules, steps = config.rules, config.steps(rows)
    groups = steps * rules.prompts_per_step
    samples = groups * rules.samples_per_prompt
    a_step, lag_steps = rules.prompts_per_step * rules.samples_per_prompt, rules.max_lag * rules.steps_per_version
    clip = f"-{config.clip_low}/+{config.clip_high}" + (f", dual {config.clip_dual:g}" if config.clip_dual else "")
    return [
        ("schedule", f"{rules.mode}, order {rules.order}, max_lag {rules.max_lag} version(s) = {lag_steps} step(s)"),
        ("one step", f"{rules.prompts_per_step} groups x {rules.samples_per_prompt} samples = {a_step} samples"),
        ("one round", f"{rules.steps_per_version} step(s) = {rules.round_groups} groups between two published weights"),
        ("the run", f"{steps} steps, {versions_of(steps, steps_per_version=rules.steps_per_version)} versions after the initial one"),
        ("trained", f"{groups:,} groups, {samples:,} samples, at most {samples * config.sampling.max_new_tokens:,} tokens"),
        ("data", f"{rows:,} rows, {groups / rows:.2f} epochs without replacements for dropped groups"),
        ("ahead", f"at most {rules.round_groups * (1 + rules.max_lag)} groups are admitted ahead of the newest weights"),
        ("kafka", f"{config.partitions} partitions, broker {config.kafka.bootstrap}"),
        ("workers", ", ".join(f"{count} {role.name}" for role in ROLES.values() if (count := role.workers(config)))),
        ("threads", threads(config)),
        ("engine", f"{config.rollout.engine}; trainer {config.trainer.backend}"),
        ("gpus", _gpus(config)),
        (
            "loss",
            f"{config.algorithm.loss}: advantage {config.advantage}, {config.aggregate}, clip {clip}, "
            f"proximal {config.proximal}, correction {config.correction}, kl_coef {config.algorithm.kl_coef}",
        ),
    ]


def threads(config: Config) -> str:
    """Number of computing threads, and the trainer's number format."""
    trainer, rollout = config.trainer, config.rollout
    each = f" in each of {trainer.processes} processes" if trainer.processes > 1 else ""
    return f"trainer {trainer.threads}{each}, in {trainer.dtype}; each rollout worker {rollout.threads}, in {rollout.dtype}"


def _gpus(config: Config) -> str:
    try:
        return str(place(config, visible_gpus()))
    except ConfigError as error:  # examining a configuration for another machine is no error
        return f"not on this machine: {error}"


ITEM = {"float32": 4, "bfloat16": 2}
OPTIMIZER_BYTES = 12
"""A checkpoint holds a float32 master and two moments of each parameter."""
CHANGED_PER_LR = 4_000.0
"""Share of bfloat16 elements that a step of AdamW changes, by its learning rate; measured on SmolLM2-135M at 1e-6: 0.4 %."""
BYTES_A_CHANGE = 3
"""A new element of two bytes and its position's gap in one."""
SAMPLE_BYTES, TOKEN_BYTES, GROUP_BYTES = 4_500, 20.2, 7_600
"""Of a sample and each of its tokens in `rollouts` and `groups`, and of a group besides; at 4 characters a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Bytes on disk after each step of a run of a model of `count` parameters."""

    config: Config
    count: int
    share: float
    """Of a delta in the whole version; 1 for an upper bound."""
    adapters: int | None = None
    """Bytes of a version that is published as adapters; None where versions are whole ones and deltas."""

    @property
    def whole(self) -> int:
        """A version that is published whole."""
        return self.count * ITEM[self.config.trainer.dtype]

    @property
    def delta(self) -> int:
        """A version that is published as its difference from the one before."""
        return math.ceil(self.whole * self.share)

    @property
    def samples(self) -> int:
        """The samples of a step, all of the longest."""
        schedule, tokens = self.config.rules, self.config.max_completion_tokens
        return math.ceil(schedule.prompts_per_step * (GROUP_BYTES + schedule.samples_per_prompt * (SAMPLE_BYTES + TOKEN_BYTES * tokens)))

    def weights(self, steps: int) -> int:
        """The topic `weights` after so many steps."""
        chosen, versions = self.config.weights, versions_of(steps, steps_per_version=self.config.schedule.steps_per_version)
        undeleted = chosen.partitions * self.config.weight_segment_bytes  # disk is freed by whole segments
        if self.adapters is not None:
            everything = self.whole + versions * self.adapters
            return everything if chosen.keep == "all" else min(everything, self.whole + 3 * chosen.anchor_every * self.adapters + undeleted)
        longest = math.ceil(1 / max(self.share, 1e-6)) + 1  # the deltas of a chain are not more bytes than its anchor
        every = min(chosen.anchor_every, longest)
        anchors = versions // every
        everything = (1 + anchors) * self.whole + (versions - anchors) * self.delta
        if chosen.keep == "all":
            return everything
        cycle = self.whole + (every - 1) * self.delta
        return min(everything, self.whole + 3 * cycle + undeleted)  # version 0, two anchors with what follows them, and the next one

    def kept_samples(self, steps: int) -> int:
        """The samples that are there after so many steps."""
        keep, everything = self.config.kafka.keep_steps, steps * self.samples
        if keep is None:
            return everything
        undeleted = 2 * self.config.partitions * DELETED_SEGMENT_BYTES  # of rollouts and groups: disk is freed by whole segments
        return min(everything, (keep + 2 * self.config.trainer.checkpoint_every) * self.samples + undeleted)

    def checkpoints(self, steps: int) -> int:
        """The checkpoints after so many steps."""
        trainer = self.config.trainer
        if not trainer.checkpoint_every:
            return 0
        newest = min(math.ceil(steps / trainer.checkpoint_every), trainer.checkpoint_keep_last + 1)
        retained = newest + (steps // trainer.checkpoint_keep_every if trainer.checkpoint_keep_every else 0)
        return retained * self.count * (OPTIMIZER_BYTES + (ITEM[trainer.dtype] if trainer.export else 0))

    @property
    def exported(self) -> int:
        """The model that the run writes at its end."""
        return self.whole if self.config.trainer.export else 0

    def here(self, steps: int) -> int:
        """All of it on this machine after so many steps, with room for the model at the end; the log only if its broker is here."""
        log = self.weights(steps) + self.kept_samples(steps) if self.config.kafka.bootstrap == "embedded" else 0
        return log + self.checkpoints(steps) + self.exported

    def full_at(self, free: int, *, steps: int) -> int | None:
        """The first of `steps` steps after which more than `free` bytes are taken; None if all of them fit."""
        step = bisect.bisect_right(range(steps + 1), free, key=self.here)
        return step if step <= steps else None


def delta_share(dtype: str, lr: float) -> float:
    """Estimated size of a delta relative to the full version; at most 1, as no piece takes more than its bytes.

    In float32 every step changes all elements; in bfloat16 only those whose float32 master has crossed to the next number.

    Example:
        delta_share("bfloat16", 1e-6)  # -> 0.006
        delta_share("float32", 1e-6)   # -> 1.0
    """
    if dtype != "bfloat16":
        return 1.0
    return min(1.0, lr * CHANGED_PER_LR * BYTES_A_CHANGE / ITEM[dtype])


MIB = 2**20
LIBRARIES = {"trainer": 870 * MIB, "transformers": 870 * MIB, "vllm": 1550 * MIB}
"""Resident memory of a process that has imported what it needs and connected to the broker, and holds no model."""
LOGITS = 128 * MIB
"""Logits that are alive at once in the trainer, and their gradient."""
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
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.layers * layer + self.hidden

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
    parts = {"trainer": trainer_parts(config, shape), "rollout": (engine := engine_parts(config, shape))}
    if config.eval_sources and not config.evaluates_on_rollout_engine:
        parts["evaluator"] = engine
    return [Estimate(role=role, parts=sizes) for role, sizes in parts.items()]


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
    embedding = item * shape.vocabulary * shape.hidden
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


def check_disk(config: Config, info: Mapping[str, Any], note: Callable[[str, str], None]) -> None:
    """Compare what the run will write with what is free, where the log is on this machine. Raises `PenstockError`."""
    count = parameters(config.model_directory)
    if count is None:
        return
    chosen, steps, share = config.weights, info["steps"], delta_share(config.trainer.dtype, config.trainer.lr)
    of_model = partial(Growth, config=config, count=count, adapters=adapter_bytes(config, _shape(config)))
    likely, most = of_model(share=share), of_model(share=1.0)
    sent = (
        f"{size(likely.whole)} whole, every {chosen.anchor_every} versions; a delta about {size(likely.delta)} at trainer.lr = "
        f"{config.trainer.lr:g} in {config.trainer.dtype}"
        if likely.adapters is None
        else f"{size(likely.whole)} whole, once; the adapters of each version {size(likely.adapters)}"
    )
    note("weights", f'{sent}; weights.keep = "{chosen.keep}"')
    keeps = "" if config.kafka.keep_steps is None else f" (at most {size(likely.kept_samples(steps))} are retained)"
    home = next(parent for parent in (state_path(), *state_path().parents) if parent.exists())
    free = shutil.disk_usage(home).free
    full, earliest = likely.full_at(free, steps=steps), most.full_at(free, steps=steps)
    soon = f"; full after step {earliest} if every delta were whole" if earliest is not None and full is None else ""
    note(
        "disk",
        f"about {size(likely.weights(steps))} of weights (at most {size(most.weights(steps))}), {size(likely.samples)} of samples a step"
        f"{keeps}, {size(likely.checkpoints(steps))} of checkpoints, {size(likely.exported)} of the exported model; {size(free)} are free"
        f"{soon}",
    )
    if full is not None:
        chain = of_model(config=with_values(config, "weights", keep="chain"), share=share)
        less = f'set weights.keep = "chain" ({size(chain.here(steps))}), ' if chosen.keep == "all" and chain.here(steps) <= free else ""
        fewer = "set kafka.keep_steps, " if config.kafka.keep_steps is None and steps * likely.samples > free // 4 else ""
        raise PenstockError(
            f"the disk would be full after step {full} of {steps}: the run writes about {size(likely.here(steps))}, {size(free)} are free: "
            f'{less}{fewer}lower run.steps, raise schedule.steps_per_version, set trainer.dtype = "bfloat16", '
            "or set PENSTOCK_HOME to a larger disk"
        )


def memory_line(config: Config) -> str:
    """Expected peak memory of each worker, with a warning if the sum exceeds the free memory of this machine."""
    shape = _shape(config)
    if shape is None:
        return "not estimated: the model is no decoder with dense gated layers"
    workers, counts = estimates(config, shape), {"trainer": config.trainer.processes, "rollout": config.rollout.workers}
    parts = [f"{each.role} {size(each.total)}" + (f" x {count}" if (count := counts.get(each.role, 1)) > 1 else "") for each in workers]
    total, free = sum(each.total * counts.get(each.role, 1) for each in workers), psutil.virtual_memory().available
    if config.colocated and visible_gpus():
        gpu, host = time_shared(workers)
        turns = f"by turns the GPU holds {size(gpu)} at most and the host {size(host)}, {size(free)} are free"
        return f"about {', '.join(parts)} at the peak; {turns}"
    where = f"{size(free)} are free"
    if visible_gpus():
        host = offloaded(config, shape) * config.trainer.processes
        where = f"most of it on the GPUs{f', {size(host)} of the trainer in host memory, of which {where}' if host else ''}"
    return f"about {', '.join(parts)} at the peak, {size(total)} together; {where}"


def _shape(config: Config) -> Shape | None:
    return shape_of(json.loads((config.model_directory / "config.json").read_text(encoding="utf-8")))
