"""The trainer backends, by the name used in `trainer.backend`."""

from collections.abc import Mapping
from typing import Any

from penstock.infra.backends.base import Backend, BackendKind
from penstock.infra.engines.packages import Package
from penstock.infra.engines.unused_packages import import_transformers


def _torch(**settings: Any) -> Backend:
    import_transformers()
    from penstock.infra.backends.torch_backend import TorchBackend

    return TorchBackend(**settings)


def _deepspeed(**settings: Any) -> Backend:
    import_transformers()
    from penstock.infra.backends.deepspeed_backend import DeepSpeedBackend

    return DeepSpeedBackend(**settings)


def _fits(trainer: Mapping[str, Any]) -> str | None:
    stage = trainer.get("zero_stage", 2)
    if trainer.get("dtype") == "bfloat16" and stage < 2:
        return f"trainer.zero_stage: {stage} with dtype 'bfloat16' keeps no float32 gradient sums in DeepSpeed; use stage 2 or 3"
    if trainer.get("lora_rank") and stage == 3:
        return "trainer.lora_rank: adapters are not sharded; take zero_stage 2 or less, or backend 'torch'"
    return None


BACKENDS: Mapping[str, BackendKind] = {
    "torch": BackendKind(
        open=_torch,
        packages=(Package(module="torch", name="torch", purpose="rollout and training", extra="trainer"),),
        sleeps=True,
    ),
    "deepspeed": BackendKind(
        open=_deepspeed,
        own=("zero_stage",),
        check=_fits,
        packages=(Package(module="deepspeed", name="deepspeed", purpose="the deepspeed backend", extra="trainer"),),
    ),
}


def open_backend(name: str, **settings: Any) -> Backend:
    """Open the backend `name` with `BackendSettings`' fields and its own; imports torch. Raises `ValueError`, `BackendError`."""
    if name not in BACKENDS:
        raise ValueError(f"unknown trainer backend {name!r}: choose one of {', '.join(BACKENDS)}")
    if mistake := BACKENDS[name].check(settings):
        raise ValueError(mistake)
    return BACKENDS[name].open(**settings)
