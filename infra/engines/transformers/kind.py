"""Declaration of the transformers engine, without importing torch."""

from penstock.infra.engines.base import Engine, EngineKind, EngineSettings
from penstock.infra.engines.packages import Package
from penstock.infra.engines.unused_packages import import_transformers


def _open(settings: EngineSettings) -> Engine:
    import torch

    import_transformers()
    from penstock.infra.engines.transformers.engine import TransformersEngine

    device = ("cuda" if torch.cuda.is_available() else "cpu") if settings.device == "auto" else settings.device
    return TransformersEngine(settings.directory, dtype=settings.dtype, device=device, threads=settings.threads)


KIND = EngineKind(
    open=_open,
    swaps_in_flight=False,
    sleeps=True,
    packages=(Package(module="transformers", name="transformers", purpose="models and tokenizers", extra="rollout"),),
)
