"""The user's DeepSpeed options (`trainer.deepspeed_config`): validated, and merged over Penstock's."""

from collections.abc import Mapping
from typing import Any

AUTO = "auto"
OVERLAPPING_BUCKET = 250_000_000
"""`reduce_bucket_size` with `overlap_comm`, which has two buckets."""

_BATCHES = "schedule.prompts_per_step and trainer.micro_batch_tokens set the batch sizes"
_PRECISION = "trainer.dtype sets the precision; master weights, Adam moments and gradient sums are always float32"
_CHECKPOINTS = "Penstock writes its own checkpoints to trainer.checkpoint_dir, which any number of processes can load"
_DIVISION = "the trainer supports data parallelism and ZeRO (trainer.zero_stage) only"
OURS: Mapping[str, str] = {
    "train_batch_size": _BATCHES,
    "train_micro_batch_size_per_gpu": _BATCHES,
    "gradient_accumulation_steps": _BATCHES,
    "managed_gradient_accumulation": _BATCHES,
    "gradient_clipping": "set trainer.max_grad_norm",
    "optimizer": "set trainer.lr, trainer.betas and trainer.weight_decay of AdamW",
    "scheduler": "set trainer.lr_schedule and trainer.warmup_steps",
    "zero_allow_untested_optimizer": "the optimizer is torch's AdamW",
    "zero_force_ds_cpu_optimizer": "the optimizer is torch's AdamW, on the host too",
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "amp": _PRECISION,
    "torch_autocast": _PRECISION,
    "data_types": _PRECISION,
    "communication_data_type": "gradients are added up over the processes in float32",
    "checkpoint": _CHECKPOINTS,
    "nebula": _CHECKPOINTS,
    "datastates_ckpt": _CHECKPOINTS,
    "zero_optimization.stage": "set trainer.zero_stage",
    "zero_optimization.offload_optimizer.device": "set trainer.offload",
    "zero_optimization.offload_param.device": "set trainer.offload",
    "zero_optimization.cpu_offload": "set trainer.offload",
    "zero_optimization.cpu_offload_param": "set trainer.offload",
    "zero_optimization.elastic_checkpoint": _CHECKPOINTS,
    "zero_optimization.mics_shard_size": _DIVISION,
    "zero_optimization.compute_grad_norm": "each step reports its gradient's norm",
    "tensor_parallel": _DIVISION,
    "sequence_parallel_size": _DIVISION,
    "pipeline": _DIVISION,
    "elasticity": _DIVISION,
}
"""Dotted option, or table of options -> what decides it."""
AGREED: Mapping[str, Any] = {"optimizer": {"type": "AdamW"}}
"""Values of such options that are accepted because they agree with Penstock's, without the "auto" entries."""


def mistake(options: Mapping[str, Any]) -> str | None:
    """Return an error about the first option that Penstock sets itself; None if there is none."""
    user_options = without_auto(options)
    for name, why in OURS.items():
        value: Any = user_options
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and value != AGREED.get(name):
            return f"trainer.deepspeed_config: {name} cannot be set here: {why}. Remove {name}"
    return None


def without_auto(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without those that are "auto", tables that are then empty, and tables whose `enabled` is "auto".

    Example:
        without_auto({"bf16": {"enabled": "auto"}, "zero_optimization": {"reduce_bucket_size": 5}})
        # -> {"zero_optimization": {"reduce_bucket_size": 5}}
    """
    result = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            inner = {} if value.get("enabled") == AUTO else without_auto(value)
            if inner:
                result[name] = inner
        elif value != AUTO:
            result[name] = value
    return result


def passed_on(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's options that are passed to DeepSpeed."""
    return {name: value for name, value in without_auto(options).items() if name not in AGREED}


def merged(ours: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with `options` merged over it, table by table."""
    result = dict(ours)
    for name, value in options.items():
        table = result.get(name)
        result[name] = merged(table, value) if isinstance(table, Mapping) and isinstance(value, Mapping) else value
    return result
