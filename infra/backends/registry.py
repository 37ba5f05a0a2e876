"""The trainer backends by their name in `trainer.backend`."""

from collections.abc import Mapping
from typing import Any

from penstock.infra.backends.base import Backend, BackendKind
from penstock.infra.backends.deepspeed.options import mistake
from penstock.infra.engines.packages import Package, import_transformers


def _torch(**settings: Any) -> Backend:
    import_transformers()
    from penstock.infra.backends.torch_backend import TorchBackend

    return TorchBackend(**settings)


def _deepspeed(**settings: Any) -> Backend:
    import_transformers()
    from penstock.infra.backends.deepspeed.backend import DeepSpeedBackend

    return DeepSpeedBackend(**settings)


def _torch_fits(trainer: Mapping[str, Any]) -> str | None:
    """Return an error about the first trainer setting that only DeepSpeed supports; None if there is none."""
    if trainer.get("offload", "none") != "none":
        return f"trainer.offload: {trainer['offload']!r} needs trainer.backend = 'deepspeed'; with 'torch' all state stays on the device"
    if trainer.get("deepspeed_config"):
        return "trainer.deepspeed_config: only trainer.backend = 'deepspeed' reads it; remove it, or set that backend"
    return None


def _deepspeed_fits(trainer: Mapping[str, Any]) -> str | None:
    """Return an error about the first trainer setting that the DeepSpeed backend does not support; None if all fit."""
    stage, offload = trainer.get("zero_stage", 2), trainer.get("offload", "none")
    if trainer.get("dtype") == "bfloat16" and stage < 2:
        return f"trainer.zero_stage: {stage} with dtype 'bfloat16' would sum gradients in bfloat16; use stage 2 or 3"
    if trainer.get("lora_rank") and stage == 3:
        return "trainer.lora_rank: LoRA adapters cannot be sharded; set trainer.zero_stage to 2 or less, or trainer.backend = 'torch'"
    if trainer.get("compile") and stage == 3:
        return (
            "trainer.compile: torch.compile cannot trace the hooks that gather weights in ZeRO stage 3; set trainer.zero_stage to at most 2"
        )
    if offload != "none" and stage == 0:
        return f"trainer.offload: {offload!r} needs trainer.zero_stage 1 to 3; stage 0 keeps all state on the device"
    if offload == "parameters" and stage < 3:
        return f"trainer.offload: 'parameters' needs trainer.zero_stage = 3, not {stage}; set that, or offload = 'optimizer'"
    return mistake(trainer.get("deepspeed_config") or {})


BACKENDS: Mapping[str, BackendKind] = {
    "torch": BackendKind(
        open=_torch,
        check=_torch_fits,
        packages=(Package(module="torch", name="torch", purpose="rollout and training", extra="trainer"),),
        sleeps=True,
        value_head=True,
    ),
    "deepspeed": BackendKind(
        open=_deepspeed,
        own=("zero_stage", "offload", "deepspeed_config"),
        check=_deepspeed_fits,
        packages=(Package(module="deepspeed", name="deepspeed", purpose="the deepspeed backend", extra="trainer"),),
    ),
}


def open_backend(name: str, **settings: Any) -> Backend:
    """Open the backend `name` with the fields of `BackendSettings` and its own keys; imports torch. Raises `ValueError`, `BackendError`."""
    if name not in BACKENDS:
        raise ValueError(f"unknown trainer backend {name!r}: choose one of {', '.join(BACKENDS)}")
    if mistake := BACKENDS[name].check(settings):
        raise ValueError(mistake)
    return BACKENDS[name].open(**settings)
