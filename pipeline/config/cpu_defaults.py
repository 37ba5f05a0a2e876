"""What the trainer does with a machine's processor where the configuration leaves it open: threads and number format.

The rule: decided where a configuration is read, as the defaults of a GPU are, so that a run's record says what was chosen. Neither the
schedule nor the number of other workers decides: last bits depend on the threads, and runs of every schedule end in the same weights.
"""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from penstock.infra.backends.processor import Cpu
from penstock.infra.errors import PenstockError
from penstock.infra.tensors.parameter_count import parameters
from penstock.pipeline.config.hub import is_hub_name

SMALL = 10_000_000
"""Parameters below which a second thread waits longer than it computes."""


def with_cpu_defaults(table: Mapping[str, Any], *, cpu: Cpu | None, on_gpu: bool) -> dict[str, Any]:
    """The table with `trainer.dtype = "auto"` resolved and, of a trainer on the CPU, absent `threads` chosen; `cpu` may be unknown.

    Example:
        with_cpu_defaults({"trainer": {"dtype": "auto"}}, cpu=Cpu(cores=8, bfloat16=True), on_gpu=False)
        # -> {"trainer": {"dtype": "bfloat16", "threads": 4}}
    """
    filled = deepcopy(dict(table))
    trainer = filled.setdefault("trainer", {})
    if not isinstance(trainer, dict):
        return filled  # refused with the rest
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
    """Threads of each process of the trainer: one for a small model, else half of the cores; `parameters` may be unknown.

    Example:
        trainer_threads(parameters=135_000_000, cores=8, processes=2)  # -> 2
    """
    return 1 if parameters is not None and parameters < SMALL else max(1, cores // 2 // max(1, processes))


def _parameters(path: object) -> int | None:
    """Parameters of a model; None for a model of the hub, or if its files cannot be read, which loading it reports."""
    if not isinstance(path, str) or is_hub_name(path):
        return None
    try:
        return parameters(Path(path).expanduser())
    except (PenstockError, OSError):
        return None
