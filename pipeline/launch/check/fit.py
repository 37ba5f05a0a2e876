"""Compares a run with the memory of its GPUs: what exceeds it, the smallest change that fits, and the fastest setting that fits."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.infra.backends.hardware import GIB, MEMORY, gpu_memory, this_memory, visible_gpus
from penstock.pipeline.config.load import Config, ConfigError, from_table, with_device_defaults, with_values
from penstock.pipeline.inspect.records.runs import size
from penstock.pipeline.launch.check.memory import (
    UTILIZATION,
    Estimate,
    Shape,
    cache_row,
    cached_rows,
    estimates,
    shape_in,
    staging_share,
    time_shared,
)

FULL = 0.93
"""Share of a GPU's memory that a trainer may take: torch's allocator loses 5 % and more to fragments."""
PLANNED = 0.88
"""Share that a proposed setting takes, so that prompts longer than those measured fit too."""
BUDGETS = (16_384, 8_192, 4_096, 2_048)
"""Values of `trainer.micro_batch_tokens` to choose from."""
ROWS = (512, 256, 128, 64, 32, 16)
"""Values of `rollout.concurrency` to choose from; with fewer rows an engine reads all weights for hardly a token."""
LORA_RANK = 32
USUAL_PROMPT, USUAL_COMPLETION = 320, 1024
"""Tokens of a prompt and of a completion if they are unknown."""
USUAL_MEMORY = 80 * GIB
"""Memory that a GPU is taken to have if the driver does not tell."""


def memory_line(config: Config) -> str:
    """Expected peak memory of each worker on its GPU and on the host. Raises `ConfigError` if a GPU's memory is exceeded."""
    shape = shape_in(config.model_directory)
    if shape is None:
        return "not estimated, because the model is not a decoder with dense gated layers"
    gpus, memory = len(visible_gpus()), gpu_memory(visible_gpus())
    workers, counts = estimates(config, shape, gpu=gpus > 0), {"trainer": config.trainer.processes, "rollout": config.rollout.workers}
    free = this_memory().available
    if not gpus:
        total = sum(each.total * counts.get(each.role, 1) for each in workers)
        return f"about {_each(workers, counts, 'total')} at the peak, {size(total)} together; {size(free)} are free"
    if memory and (excess := exceeded(config, shape, memory)):
        raise ConfigError(f"{excess}; {_advice(config, shape, memory)}")
    gpu, host = time_shared(workers)
    shared = f", {size(gpu)} of the time-shared GPU" if config.colocated else ""
    together = host if config.colocated else sum(each.host * counts.get(each.role, 1) for each in workers)
    there = f"each GPU has {size(min(memory))}" if memory else f"the GPU's memory is unknown: set {MEMORY} to its GiB"
    rows = ""
    if memory and _cached(config):
        rows = f"; each engine's cache holds {cached_rows(config, shape, min(memory))} of the longest samples"
    return (
        f"about {_each(workers, counts, 'gpu')} of GPU memory at the peak{shared}, {there}{rows}; {_each(workers, counts, 'host')} of host "
        f"memory, {size(together)} together, {size(free)} are free"
    )


def _each(workers: Sequence[Estimate], counts: Mapping[str, int], where: str) -> str:
    """The size of each worker as text, by the property `where` of its estimate, and how many of it there are."""
    parts = (
        f"{each.role} {size(getattr(each, where))}" + (f" x {count}" if (count := counts.get(each.role, 1)) > 1 else "") for each in workers
    )
    return ", ".join(parts)


def _cached(config: Config) -> bool:
    """True if the engine fills the rest of its share of GPU memory with a KV cache."""
    return config.rollout.engine == "vllm" and config.rollout.device != "cpu"


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that workers need on one GPU, and the limit of what they may use."""

    who: str
    parts: Mapping[str, int]
    limit: float
    there: int

    @property
    def share(self) -> float:
        """Required memory divided by the limit."""
        return sum(self.parts.values()) / self.limit

    def __str__(self) -> str:
        largest = sorted(self.parts.items(), key=lambda part: -part[1])[:4]
        listed = ", ".join(f"{part} {size(taken)}" for part, taken in largest if taken)
        needed, limit = size(sum(self.parts.values())), size(int(self.limit))
        return f"{self.who} needs {needed} of a GPU and may take {limit} of its {size(self.there)} ({listed})"


def exceeded(config: Config, shape: Shape, memory: Sequence[int], *, share: float = FULL, rows: int = 1) -> Need | None:
    """The need that exceeds its limit most; None if trainer and engines fit on GPUs of these sizes.

    `share` is that of a GPU that a trainer may take; vLLM's cache must hold `rows` samples of maximum length.
    """
    workers = {each.role: each for each in estimates(config, shape, gpu=True)}
    trainer, engine = dict(workers["trainer"].on_gpu), dict(workers["rollout"].on_gpu)
    first, taken = config.trainer.gpus, share
    if _cached(config):
        engine["keys and values"] = rows * cache_row(config, shape) // config.engine.gpus(config.rollout.vllm)
        taken = config.rollout.vllm.get("gpu_memory_utilization", UTILIZATION)
    if config.colocated:
        first, engines = 1, memory[:1]
        trainer["engine asleep"] = engine.get("context", 0)
    elif not first and not config.rollout.gpus_per_worker:  # all use the first GPU
        first, engines = 1, memory[:1]
        count = config.rollout.workers + ("evaluator" in workers)
        trainer["engines"] = count * int(taken * memory[0] if _cached(config) else sum(engine.values()))
    else:
        engines = memory[first:] if config.rollout.gpus_per_worker else ()
    needs = [Need("the trainer", trainer, share * min(memory[:first]), min(memory[:first]))] if first else []
    needs += [Need("a rollout worker", engine, taken * min(engines), min(engines))] if engines else []
    largest = max(needs, key=lambda need: need.share)
    return largest if largest.share > 1 else None


def _variants(config: Config, shape: Shape, gpus: int) -> Iterator[Config]:
    """The configuration on `gpus` GPUs: each division between trainer and engines, and each way to save memory in training."""
    for divided in _divided(config, shape, gpus):
        own, processes = divided.trainer, divided.trainer.processes
        ways: list[dict[str, Any]] = [{}, {"backend": "torch", "offload": "none", "deepspeed_config": {}}]
        ways += [{"backend": "deepspeed", "zero_stage": stage} for stage in (2, 3)] if processes > 1 else []
        for way in ways:
            for rank in {own.lora_rank: 0, LORA_RANK: 0} if way.get("backend") == "torch" else (own.lora_rank,):
                for checkpointing in {own.gradient_checkpointing: 0, True: 0}:
                    for tokens in {own.micro_batch_tokens: 0} | dict.fromkeys(BUDGETS, 0):
                        if not (rank and way.get("zero_stage") == 3):
                            values = {"lora_rank": rank, "gradient_checkpointing": checkpointing, "micro_batch_tokens": tokens}
                            yield with_values(divided, "trainer", **way, **values)


def _divided(config: Config, shape: Shape, gpus: int) -> Iterator[Config]:
    """The configuration unchanged, then with each division of the GPUs between trainer and engines that leaves none idle."""
    yield config
    if gpus == 1 or config.colocated:
        return
    evaluators = bool(config.eval_sources) and not config.evaluates_on_rollout_engine
    for engine in (1, 2, 4, 8) if config.engine.gpus_key else (1,):
        vllm = dict(config.rollout.vllm)
        if engine > 1 or "tensor_parallel_size" in vllm:
            vllm["tensor_parallel_size"] = engine
        for trainer in range(1, gpus):
            workers, idle = divmod(gpus - trainer, engine)
            if not idle and workers > evaluators and shape.heads % engine == 0:
                divided = with_values(config, "trainer", gpus=trainer, processes=trainer)
                yield with_values(divided, "rollout", workers=workers - evaluators, gpus_per_worker=engine, vllm=vllm)


def _advice(config: Config, shape: Shape, memory: Sequence[int]) -> str:
    """The smallest change with which the configuration fits, as text."""
    fitting = [variant for variant in _variants(config, shape, len(memory)) if exceeded(variant, shape, memory) is None]
    if not fitting:
        return "no setting fits on these GPUs: use a smaller model, or GPUs with more memory"
    ways = [_changes(config, variant) for variant in sorted(fitting, key=_cost_in(shape, memory))]
    least = min(ways, key=lambda changes: len(changes) + 4 * ("trainer.lora_rank" in changes))  # adapters are a large change
    return f"set {', '.join(f'{key} = {json.dumps(value)}' for key, value in least.items())}"


def _changes(config: Config, other: Config) -> dict[str, Any]:
    """Keys of trainer and rollout with another value in `other` -> that value."""
    changed: dict[str, Any] = {}
    for section in ("trainer", "rollout"):
        before, after = getattr(config, section).model_dump(), getattr(other, section).model_dump()
        changed |= {f"{section}.{key}": value for key, value in after.items() if value != before[key]}
    for key, value in changed.pop("rollout.vllm", {}).items():
        if value != config.rollout.vllm.get(key):
            changed[f"rollout.vllm.{key}"] = value
    return changed


def proposals(config: Config, shape: Shape, memory: Sequence[int]) -> dict[tuple[int, int], Config]:
    """(GPUs of the trainer, GPUs per engine) -> the fastest configuration that fits; with adapters only if nothing else fits.

    Raises `ConfigError` if none fits.
    """
    cost = _cost_in(shape, memory)
    everything = [
        (variant, exceeded(variant, shape, memory, share=PLANNED, rows=ROWS[-1])) for variant in _variants(config, shape, len(memory))
    ]
    fitting = [variant for variant, excess in everything if excess is None]
    if not fitting:
        least = min((excess for _, excess in everything if excess), key=lambda need: need.share)
        raise ConfigError(f"{least}, and no setting needs less: use a smaller model, or GPUs with more memory")
    fitting = [variant for variant in fitting if not variant.trainer.lora_rank] or fitting
    best = {}
    for variant in sorted(fitting, key=cost, reverse=True):
        best[variant.trainer.processes, variant.engine.gpus(variant.rollout.vllm)] = variant
    return {division: _filled(variant, shape, min(memory)) for division, variant in best.items()}


def memory_or_usual(gpus: Sequence[str], notify: Callable[[str], None]) -> tuple[int, ...]:
    """Memory of each GPU; if it is unknown, the usual size, with a message to `notify`."""
    memory = gpu_memory(gpus)
    if gpus and not memory:
        notify(f"the memory of the GPUs is unknown, assuming {size(USUAL_MEMORY)}; set {MEMORY} to their GiB")
        return (USUAL_MEMORY,) * len(gpus)
    return memory


def planned(
    model: Path, memory: Sequence[int], *, engine_size: int, samples_per_prompt: int, longest: float
) -> Mapping[int, Mapping[str, Any]]:
    """GPUs of the trainer -> settings with which a model fits, for engines of `engine_size` GPUs and completions of `longest` tokens.

    Raises `ConfigError` if there are none.
    """
    shape, gpus = shape_in(model), len(memory)
    if shape is None:
        raise ConfigError(f"--model {model}: memory cannot be estimated, because it is not a decoder with dense gated layers; omit --model")
    tokens = int(longest) if math.isfinite(longest) else USUAL_COMPLETION
    table = {
        "run": {"steps": 1}, "model": {"path": str(model)}, "sampling": {"max_new_tokens": tokens},
        "data": {"source": "rows.jsonl", "max_prompt_tokens": USUAL_PROMPT},
        "schedule": {"mode": "in_flight", "samples_per_prompt": samples_per_prompt, "prompts_per_step": 32},
        "rollout": {"engine": "vllm", "workers": gpus - 1, "gpus_per_worker": 1}, "trainer": {"gpus": 1, "micro_batch_tokens": BUDGETS[0]},
    }  # fmt: skip
    config = from_table(with_device_defaults(table, gpus=gpus))
    fitting = proposals(config, shape, memory)
    settings = {trainer: _changes(config, variant) for (trainer, size), variant in fitting.items() if size == engine_size}
    if not settings:
        sizes = ", ".join(map(str, sorted({size for _, size in fitting})))
        raise ConfigError(f"--engine-size {engine_size}: the model fits with engines of {sizes} GPUs; set --engine-size")
    return settings


def proposed(config: Config, shape: Shape, memory: Sequence[int]) -> Config:
    """The fastest of the `proposals`. Raises `ConfigError` if there is none."""
    return min(proposals(config, shape, memory).values(), key=_cost_in(shape, memory))


def _filled(config: Config, shape: Shape, memory: int) -> Config:
    """The configuration with as many concurrent samples as the engines' KV cache can hold.

    The cache leaves room to stage new weights if 256 samples fit all the same.
    """
    if not _cached(config):
        return config
    share = staging_share(config, shape, memory)
    staging = with_values(config, "rollout", vllm={**config.rollout.vllm, "gpu_memory_utilization": share})
    if share > 0 and not config.colocated and cached_rows(staging, shape, memory) >= ROWS[1]:
        config = staging
    sizes = [with_values(config, "rollout", concurrency=rows) for rows in ROWS]
    return next((sized for sized in sizes if cached_rows(sized, shape, memory) >= sized.rollout.concurrency), config)


def _cost_in(shape: Shape, memory: Sequence[int]) -> Callable[[Config], float]:
    """A function that estimates the relative time of a step in a configuration.

    Training and generation overlap. With recomputation a step takes as long to train as to generate on equally many GPUs.
    """

    def cost(config: Config) -> float:
        trainer, engine_gpus = config.trainer, config.engine.gpus(config.rollout.vllm)
        communication = 0.05 * max(0, trainer.zero_stage - 1) if trainer.backend == "deepspeed" else 0.0
        passes = 1.0 if trainer.gradient_checkpointing else 0.75
        training = (1.0 + communication + 3_072 / trainer.micro_batch_tokens) * passes / trainer.processes
        rows = max(1, cached_rows(config, shape, min(memory))) if _cached(config) else ROWS[1]
        generating = max(1.0, ROWS[1] / rows) ** 0.7 * (1.0 if engine_gpus == 1 else 1.1) / (config.rollout.workers * engine_gpus)
        return training + generating if config.colocated else max(training, generating) + 0.01 * (training + generating)

    return cost
