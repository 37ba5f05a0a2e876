"""What the trainer does with a machine's processor where the configuration leaves it open: threads and number format.

The rule: decided where a configuration is read, as the defaults of a GPU are, so that a run's record says what was chosen. The other
roles' cores are counted first: threads that wait for a core make every step slower.
"""

import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.pipeline.config.schema import RolloutSection, ScheduleSection, TrainerSection

BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})
"""What Linux calls instructions that multiply bfloat16: AVX512-BF16, AMX, AVX-NE-CONVERT; on ARM bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """A machine's processor."""

    cores: int
    """That this process may use."""
    bfloat16: bool
    """Whether it multiplies bfloat16 by instructions of its own; without them bfloat16 is slower than float32."""


def this_cpu() -> Cpu:
    """The processor of this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    return Cpu(cores=cores, bfloat16=multiplies_bfloat16(text))


def multiplies_bfloat16(cpuinfo: str) -> bool:
    """Whether Linux's description of the processors names such instructions.

    Example:
        multiplies_bfloat16("flags : fpu avx512f avx512_bf16")  # -> True
    """
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return any(BFLOAT16_FLAGS & set(value.split()) for name, _, value in lines if name.strip() in ("flags", "Features"))


def with_cpu_defaults(table: Mapping[str, Any], *, cpu: Cpu | None, on_gpu: bool) -> dict[str, Any]:
    """The table with `trainer.dtype = "auto"` resolved and, of a trainer on the CPU, absent `threads` chosen; `cpu` may be unknown.

    Example:
        with_cpu_defaults({"trainer": {"dtype": "auto"}}, cpu=Cpu(cores=8, bfloat16=True), on_gpu=False)
        # -> {"trainer": {"dtype": "bfloat16", "threads": 6}}
    """
    filled = deepcopy(dict(table))
    trainer = filled.setdefault("trainer", {})
    if not isinstance(trainer, dict):
        return filled  # refused with the rest
    if trainer.get("dtype") == "auto":
        trainer["dtype"] = "bfloat16" if on_gpu or (cpu is not None and cpu.bfloat16) else "float32"
    if cpu is not None and not on_gpu:
        trainer.setdefault("threads", trainer_threads(filled, cores=cpu.cores))
    return filled


def trainer_threads(table: Mapping[str, Any], *, cores: int) -> int:
    """Threads of each process of the trainer: the cores that rollout workers leave, or, where those wait while it computes, all."""
    rollout, schedule, trainer = (_section(table, name) for name in ("rollout", "schedule", "trainer"))
    drawing = _number(rollout, "workers", RolloutSection) * _number(rollout, "threads", RolloutSection)
    alternating = schedule.get("mode", ScheduleSection.model_fields["mode"].default) == "synchronous"
    return max(1, (cores - (0 if alternating else drawing)) // _number(trainer, "processes", TrainerSection))


def _section(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = table.get(name, {})
    return section if isinstance(section, Mapping) else {}


def _number(section: Mapping[str, Any], key: str, schema: type[Any]) -> int:
    value = section.get(key, schema.model_fields[key].default)
    return value if isinstance(value, int) and value > 0 else 1
