"""What the trainer does with a machine's processor where the configuration leaves it open: threads and number format.

The rule: decided where a configuration is read, as the defaults of a GPU are, so that a run's record says what was chosen. The other
roles' cores are counted first: threads that wait for a core make every step slower.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from penstock.infra.backends.processor import Cpu
from penstock.pipeline.config.schema import RolloutSection, ScheduleSection, TrainerSection


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
