"""What absent keys stand for where the device is a GPU, or is shared.

The rule: they are decided where a configuration is read and stand in the run's record, so that a record means the same on every machine.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from penstock.pipeline.config.fields import Section
from penstock.pipeline.config.schema import EvalSection, RolloutSection, TrainerSection

SECTIONS: Mapping[str, type[Section]] = {"rollout": RolloutSection, "trainer": TrainerSection, "eval": EvalSection}
ON_DEVICE_OF = {"eval": "rollout"}
"""Section -> the one whose device its engine is on, where it names none itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDefault:
    """One key whose default on a GPU is another one."""

    key: str
    gpu: Any
    why: str
    only: tuple[str, str] | None = None
    """A key of the same section and the value for which it holds."""

    @property
    def cpu(self) -> Any:
        """The default without a GPU: that of the schema."""
        section, _, name = self.key.partition(".")
        return SECTIONS[section].model_fields[name].default


DEVICE_DEFAULTS = (
    DeviceDefault(key="rollout.dtype", gpu="bfloat16", why="half the memory and the bytes of a version, twice the speed"),
    DeviceDefault(
        key="rollout.engine_process",
        gpu=True,
        why="fetching and hashing a version takes the core from an engine that shares its process",
        only=("engine", "vllm"),
    ),
    DeviceDefault(key="trainer.dtype", gpu="bfloat16", why="optimizer, masters and gradient sums stay in float32"),
    DeviceDefault(key="trainer.tf32", gpu=True, why="what is computed in float32 keeps 10 bits of its mantissa, at many times the speed"),
    DeviceDefault(
        key="trainer.zero_stage", gpu=2, why="DeepSpeed's stage 1 does not sum bfloat16 gradients in float32", only=("backend", "deepspeed")
    ),
    DeviceDefault(key="eval.engine", gpu="rollout", why="an evaluator would have a GPU of its own, idle between two evaluations"),
)


COLOCATED_DEFAULTS = (("rollout", "workers", 1), ("eval", "engine", "rollout"))
"""Section, key and value of absent keys where trainer and rollout worker share a device."""


def with_device_defaults(table: Mapping[str, Any], *, gpus: int) -> dict[str, Any]:
    """The table with the GPU's defaults where keys are absent and the section's device is one, and with those of a shared device.

    `gpus` is how many this machine has.

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
    """The table of the documentation."""
    lines = ["| key | on a CPU | on a GPU | why |", "|---|---|---|---|"]
    for default in DEVICE_DEFAULTS:
        only = "" if default.only is None else f', with `{default.key.partition(".")[0]}.{default.only[0]} = "{default.only[1]}"`'
        lines.append(f"| `{default.key}` | `{_toml(default.cpu)}` | `{_toml(default.gpu)}`{only} | {default.why} |")
    return "\n".join(lines) + "\n"


def on_gpu(section: Any, gpus: int) -> bool:
    """Whether a section's model is on a GPU."""
    device = section.get("device", "auto") if isinstance(section, Mapping) else None
    return isinstance(device, str) and (device.startswith("cuda") or (device == "auto" and gpus > 0))


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
