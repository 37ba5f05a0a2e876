"""Assigns this machine's GPUs and cores to workers.

A GPU belongs to one worker, or under `launch.placement = "colocated"` to trainer and rollout worker alternately; without a placement
every worker sees all GPUs. Under `launch.pin` rollout workers have cores of their own, then the trainer; the others share the remaining
cores, or run on any idle one.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.infra.backends.hardware import VISIBLE, visible_gpus
from penstock.infra.backends.registry import BACKENDS
from penstock.pipeline.config.load import Config, ConfigError
from penstock.pipeline.runtime.roles import ROLES


@dataclass(frozen=True, slots=True)
class Placement:
    """GPUs of each worker by name, as numbers or identifiers as in CUDA_VISIBLE_DEVICES; None if GPUs are not assigned."""

    gpus: Mapping[str, tuple[str, ...]] | None
    time_shared: bool = False
    """True if the workers with GPUs share one of them alternately."""

    def environment(self, worker: str) -> dict[str, str]:
        """Environment variables for a worker's process; a worker without assigned GPUs sees none."""
        return {} if self.gpus is None else {VISIBLE: ",".join(self.gpus.get(worker, ()))}

    def __str__(self) -> str:
        if self.gpus is None and self.time_shared:
            return "trainer and rollout worker time-share the CPU"
        if self.gpus is None:
            return "GPUs are not assigned: every worker sees all GPUs"
        if self.time_shared:
            return f"{', '.join(self.gpus)}: GPU {next(iter(self.gpus.values()))[0]}, time-shared; the other workers: none"
        placed = [f"{worker}: GPU {', '.join(numbers)}" for worker, numbers in self.gpus.items() if numbers]
        return "; ".join([*placed, "the others: none"])


NOT_PLACED = Placement(None)


def place(config: Config, available: Sequence[str]) -> Placement:
    """Assign GPUs to the trainer first, then to rollout workers, then to the evaluator. Raises `ConfigError` if there are too few."""
    trainer, rollout = config.trainer, config.rollout
    if config.colocated:
        return _by_turns(config, available)
    if not trainer.gpus and not rollout.gpus_per_worker:
        return NOT_PLACED
    if trainer.gpus not in (0, trainer.processes):
        raise ConfigError(f"trainer.gpus: {trainer.gpus}, but each of trainer.processes = {trainer.processes} needs a GPU; make them equal")
    for section, gpus, device in (("trainer", trainer.gpus, trainer.device), ("rollout", rollout.gpus_per_worker, rollout.device)):
        key = "trainer.gpus" if section == "trainer" else "rollout.gpus_per_worker"
        if gpus and device == "cpu":
            raise ConfigError(f"{key}: {gpus} GPUs, but {section}.device = 'cpu'; set {key} = 0 or remove {section}.device")
        if not gpus and device.startswith("cuda"):
            raise ConfigError(f"{key}: 0 for {section}.device = {device!r} would share other workers' GPUs; set {key} to at least 1")
    _check_parallel(config)
    computing = sorted(ROLES.values(), key=lambda role: role.name != "trainer")
    requested = {role.worker(slot): role.gpus(config) for role in computing for slot in range(role.workers(config)) if role.gpus(config)}
    if (needed := sum(requested.values())) > len(available):
        parts = " + ".join(f"{worker} {count}" for worker, count in requested.items() if count)
        raise ConfigError(
            f"rollout.gpus_per_worker: {needed} GPUs are required ({parts}), {len(available)} are visible here; lower rollout.workers, "
            f"rollout.gpus_per_worker or trainer.gpus{_or_by_turns(config) if len(available) == 1 else ''}"
        )
    left = list(available)
    return Placement({worker: tuple(left.pop(0) for _ in range(count)) for worker, count in requested.items()})


def _by_turns(config: Config, available: Sequence[str]) -> Placement:
    """Assign the first GPU to trainer and rollout worker together. Raises `ConfigError` if they request more than one."""
    requested = {"trainer.gpus": config.trainer.gpus, "rollout.gpus_per_worker": config.rollout.gpus_per_worker}
    if config.engine.gpus_key is not None:
        requested[config.engine.gpus_key] = config.engine.gpus(config.rollout.vllm)
    for key, count in requested.items():
        if count > 1:
            raise ConfigError(f"{key}: {count}, but launch.placement = 'colocated' shares a single GPU; set {key} = 1")
    workers = ("trainer", ROLES["rollout"].worker(0))
    return Placement(dict.fromkeys(workers, (available[0],)) if available else None, time_shared=True)


def _or_by_turns(config: Config) -> str:
    """Text that suggests time-sharing, for a machine with one GPU."""
    backend = "" if BACKENDS[config.trainer.backend].sleeps else " and trainer.backend = 'torch'"
    return f"; or set launch.placement = 'colocated'{backend}: trainer and rollout worker time-share the GPU"


def _check_parallel(config: Config) -> None:
    """Raise `ConfigError` unless an engine uses as many GPUs as its worker has."""
    rollout, spread = config.rollout, config.engine.gpus(config.rollout.vllm)
    if rollout.gpus_per_worker and spread != rollout.gpus_per_worker:
        gpus, key = rollout.gpus_per_worker, config.engine.gpus_key
        does = f"spreads over {spread}; set {key} = {gpus}" if key else "computes on one GPU; set rollout.workers"
        raise ConfigError(f"rollout.gpus_per_worker: {gpus}, but the {rollout.engine} engine {does}")


def cores_of(cores: Sequence[int], *, rollout_workers: int, rollout_threads: int, trainer_threads: int) -> Mapping[str, tuple[int, ...]]:
    """Worker name or role -> CPU cores; "" for all other workers. Empty if no core would remain for training.

    Example:
        cores_of([0, 1], rollout_workers=1, rollout_threads=1, trainer_threads=1)  # -> {"rollout-0": (0,), "trainer": (1,), "": (0, 1)}
    """
    for_rollout = rollout_workers * rollout_threads
    if len(cores) <= for_rollout:
        return {}
    left = cores[for_rollout:]
    rollout = {
        f"rollout-{number}": tuple(cores[number * rollout_threads : (number + 1) * rollout_threads]) for number in range(rollout_workers)
    }
    return {**rollout, "trainer": tuple(left[:trainer_threads]), "": tuple(left[trainer_threads:] or cores)}


def pinning_of(config: Config) -> Mapping[str, tuple[int, ...]]:
    """CPU cores of each worker on this machine; empty unless they are pinned, as with GPUs or too few cores."""
    on_gpus = config.trainer.gpus or config.rollout.gpus_per_worker or (config.colocated and visible_gpus())
    if config.launch.pin == "off" or on_gpus or not hasattr(os, "sched_getaffinity"):
        return {}
    return cores_of(
        sorted(os.sched_getaffinity(0)),
        rollout_workers=config.rollout.workers,
        rollout_threads=config.rollout.threads,
        trainer_threads=config.trainer.threads * config.trainer.processes,
    )


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """In the block, processes that this thread starts run on these cores only; an empty list changes nothing.

    They inherit the cores: a launcher of root has dropped the capability to set those of another process.
    """
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
