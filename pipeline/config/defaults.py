"""Defaults that depend on the machine: number formats, threads, and settings for GPUs or a shared device.

They are resolved when a configuration is read and written to the run's record, which then means the same on every machine. The trainer's
threads depend on the model and the cores alone, because last bits depend on the threads, and runs of all schedules end in equal weights.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.infra.backends.processor import Cpu
from penstock.infra.errors import PenstockError
from penstock.infra.tensors.parameter_count import parameters
from penstock.pipeline.config.fields import Section
from penstock.pipeline.config.hub import is_hub_name
from penstock.pipeline.config.schema import EvalSection, RolloutSection, TrainerSection

SMALL = 10_000_000
"""Models with fewer parameters are trained with one thread: a second one would wait longer than it computes."""
SECTIONS: Mapping[str, type[Section]] = {"rollout": RolloutSection, "trainer": TrainerSection, "eval": EvalSection}
ON_DEVICE_OF = {"eval": "rollout"}
"""Section without a device of its own -> section with the device of its engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDefault:
    """A key with a different default on a GPU."""

    key: str
    gpu: Any
    why: str
    only: tuple[str, str] | None = None
    """Condition: a key of the same section and its value."""

    @property
    def cpu(self) -> Any:
        """Default without a GPU, from the schema."""
        section, _, name = self.key.partition(".")
        return SECTIONS[section].model_fields[name].default


DEVICE_DEFAULTS = (
    DeviceDefault(key="rollout.dtype", gpu="bfloat16", why="half the memory and half the bytes of a version, twice the speed"),
    DeviceDefault(
        key="rollout.engine_process",
        gpu=True,
        why="loading and hashing a version would take CPU time from the engine",
        only=("engine", "vllm"),
    ),
    DeviceDefault(key="trainer.dtype", gpu="bfloat16", why="optimizer, masters and gradient sums stay in float32"),
    DeviceDefault(key="trainer.tf32", gpu=True, why="float32 products with 10 bits of mantissa, many times faster"),
    DeviceDefault(
        key="trainer.zero_stage", gpu=2, why="DeepSpeed's stage 1 does not sum bfloat16 gradients in float32", only=("backend", "deepspeed")
    ),
    DeviceDefault(key="eval.engine", gpu="rollout", why="an evaluator's own GPU would be idle between evaluations"),
)

COLOCATED_DEFAULTS = (("rollout", "workers", 1), ("eval", "engine", "rollout"))
"""Section, key and default if trainer and rollout worker share a device."""


def with_device_defaults(table: Mapping[str, Any], *, gpus: int) -> dict[str, Any]:
    """The table with the GPU defaults of absent keys in sections on a GPU, and with those of a shared device.

    `gpus` is this machine's number of GPUs.

    Example:
        with_device_defaults({"trainer": {"device": "cuda"}}, gpus=0)["trainer"]["dtype"]  # -> "bfloat16"
    """
    filled = deepcopy(dict(table))
    for default in DEVICE_DEFAULTS:
        name, _, key = default.key.partition(".")
        section = filled.get(name, {})
        if not isinstance(section, dict) or not on_gpu(filled.get(ON_DEVICE_OF.get(name, name), {}), gpus):
            continue
        fields = SECTIONS[name].model_fields
        if default.only is None or section.get(default.only[0], fields[default.only[0]].default) == default.only[1]:
            filled.setdefault(name, section).setdefault(key, default.gpu)
    launch = filled.get("launch")
    for name, key, value in COLOCATED_DEFAULTS if isinstance(launch, dict) and launch.get("placement") == "colocated" else ():
        if isinstance(section := filled.setdefault(name, {}), dict):
            section.setdefault(key, value)
    return filled


def as_markdown() -> str:
    """The table in docs/reference/configuration.md."""
    lines = ["| key | on a CPU | on a GPU | why |", "|---|---|---|---|"]
    for default in DEVICE_DEFAULTS:
        only = "" if default.only is None else f', with `{default.key.partition(".")[0]}.{default.only[0]} = "{default.only[1]}"`'
        lines.append(f"| `{default.key}` | `{_toml(default.cpu)}` | `{_toml(default.gpu)}`{only} | {default.why} |")
    return "\n".join(lines) + "\n"


def on_gpu(section: Any, gpus: int) -> bool:
    """True if a section's model is on a GPU."""
    device = section.get("device", "auto") if isinstance(section, Mapping) else None
    return isinstance(device, str) and (device.startswith("cuda") or (device == "auto" and gpus > 0))


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def with_cpu_defaults(table: Mapping[str, Any], *, cpu: Cpu | None, on_gpu: bool) -> dict[str, Any]:
    """The table with `trainer.dtype = "auto"` and, for a trainer on the CPU, absent `threads` resolved; `cpu` may be unknown.

    Example:
        with_cpu_defaults({"trainer": {"dtype": "auto"}}, cpu=Cpu(cores=8, bfloat16=True), on_gpu=False)
        # -> {"trainer": {"dtype": "bfloat16", "threads": 4}}
    """
    filled = deepcopy(dict(table))
    trainer = filled.setdefault("trainer", {})
    if not isinstance(trainer, dict):
        return filled  # refused by validation
    if trainer.get("dtype") == "auto":
        trainer["dtype"] = "bfloat16" if on_gpu or (cpu is not None and cpu.bfloat16) else "float32"
    if cpu is not None and not on_gpu and "threads" not in trainer:
        processes, model = trainer.get("processes"), filled.get("model")
        trainer["threads"] = trainer_threads(
            parameters=_parameters(model.get("path") if isinstance(model, Mapping) else None),
            cores=cpu.cores,
            processes=processes if isinstance(processes, int) else 1,
        )
    return filled


def trainer_threads(*, parameters: int | None, cores: int, processes: int) -> int:
    """Threads of each trainer process: one for a small model, else half of the cores in total; `parameters` may be unknown.

    Example:
        trainer_threads(parameters=135_000_000, cores=8, processes=2)  # -> 2
    """
    return 1 if parameters is not None and parameters < SMALL else max(1, cores // 2 // max(1, processes))


def _parameters(path: object) -> int | None:
    """Number of parameters; None for a model on the hub, or if its files cannot be read, which is reported when it is loaded."""
    if not isinstance(path, str) or is_hub_name(path):
        return None
    try:
        return parameters(Path(path).expanduser())
    except (PenstockError, OSError):
        return None
