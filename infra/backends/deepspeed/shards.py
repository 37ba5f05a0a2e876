"""Loads a checkpoint of ZeRO stages 1 to 3 with any number of processes: each reads its part from the shards, bit for bit.

DeepSpeed itself rejects another number of processes, or first converts the full state to a file per parameter. Files are read without
executing code: tensors, plain values and the three classes that ZeRO stores. Files that other users own or may write are rejected.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.infra.errors import BackendError

OTHERS_WRITE = 0o022


def read(file: Path) -> Any:
    """The content of a file, mapped into memory. Raises `BackendError` if it names other classes or other users may write it."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    for path in (file.parent, file):
        _check_owner(path)
    stored = (LossScaler, ZeroStageEnum, fragment_address)
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in stored}
    if foreign := sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - names):
        raise BackendError(f"{file} is not loaded: it names {foreign[0]}, which DeepSpeed does not store")
    with torch.serialization.safe_globals(list(stored)):
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)


def check(directory: Path) -> None:
    """Raise `BackendError` unless `read` accepts each file of a checkpoint, which DeepSpeed will unpickle."""
    for file in sorted(directory.rglob("*.pt")):
        read(file)


def _check_owner(path: Path) -> None:
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0):
        raise BackendError(f"{path} belongs to another user: copy the checkpoint to a folder of your own")
    if status.st_mode & OTHERS_WRITE:
        raise BackendError(f"{path} can be written by other users: chmod -R go-w {path.parent}")


MASTER, MOMENTS = "fp32", ("exp_avg", "exp_avg_sq")
"""States of each element of a shard; AdamW's moments exist from the first step on."""


class Shards:
    """The shards of a checkpoint, addressed by parameter."""

    def __init__(self, directory: Path) -> None:
        """Map the files of `directory` into memory. Raises `BackendError` if there are none."""
        models, optimizers = sorted(directory.glob("*_model_states.pt")), list(directory.glob("*_optim_states.pt"))
        if not models or not optimizers:
            raise BackendError(f"there is no trainer state in {directory}")
        self.common = read(models[0])
        """Rank 0's file: the model, and the state of the run."""
        self.step: torch.Tensor | None = None
        """AdamW's step count; None without moments."""
        self._pieces: dict[str, list[tuple[Mapping[str, torch.Tensor], int, int]]] = defaultdict(list)
        """Parameter -> its pieces in order: flat states, start and number of elements."""
        parts = [read(file)["optimizer_state_dict"] for file in sorted(optimizers, key=_rank_of)]
        for rank, part in enumerate(parts):
            flat = part["fp32_flat_groups" if "fp32_flat_groups" in part else "single_partition_of_fp32_groups"]
            states = part["optimizer_state_dict" if "fp32_flat_groups" in part else "base_optimizer_state"]["state"]
            self.step = next(iter(states.values()))["step"] if states else self.step
            for group, ranges in enumerate(self._ranges(part, rank, len(parts))):
                tensors = {**states.get(group, {}), MASTER: flat[group]}
                for name, (start, count) in ranges.items():
                    self._pieces[name].append((tensors, start, count))

    def size(self, name: str) -> int:
        """Number of elements of a parameter; 0 if it is missing."""
        return sum(count for _, _, count in self._pieces.get(name, []))

    def copy(self, kind: str, name: str, offset: int, target: torch.Tensor) -> None:
        """Fill `target` [N] with the elements of a parameter from `offset` on."""
        first = 0
        for tensors, start, count in self._pieces[name]:
            low, high = max(offset, first), min(offset + target.numel(), first + count)
            if low < high:
                target[low - offset : high - offset] = tensors[kind][start + low - first : start + high - first]
            first += count

    def _ranges(self, part: Mapping[str, Any], rank: int, ranks: int) -> Iterator[dict[str, tuple[int, int]]]:
        """For each flat tensor of a shard: parameter -> start and number of elements of its piece."""
        if "fp32_flat_groups" not in part:
            for mapping in part["param_slice_mappings"]:
                yield {name: (address.start, address.numel) for name, address in mapping.items()}
            return
        for shapes in self.common["param_shapes"]:
            ranges, start = {}, 0
            for name, shape in shapes.items():
                share = -(-shape.numel() // ranks)
                ranges[name] = (start, max(0, min(share, shape.numel() - rank * share)))
                start += share
            yield ranges


@torch.no_grad()
def load(engine: Any, directory: Path) -> Mapping[str, Any]:
    """Restore this process's masters and moments, and all weights; returns the `client_state`.

    The optimizer keeps the settings of the current run. Raises `BackendError` if there is no state or it is of another model.
    """
    shards, optimizer = Shards(directory), engine.optimizer
    names = {name: getattr(parameter, "ds_numel", parameter.numel()) for name, parameter in _trained(engine)}
    if any(shards.size(name) != count for name, count in names.items()):
        raise BackendError(f"{directory} is the state of another model")
    partitioned = engine.zero_optimization_partition_weights()
    for master, pieces in _partitioned(optimizer) if partitioned else _whole(optimizer):
        fresh = {kind: torch.zeros_like(master) for kind in (MASTER, *(MOMENTS if shards.step is not None else ()))}
        for name, offset, start, count in pieces:
            for kind, flat in fresh.items():
                shards.copy(kind, name, offset, flat[start : start + count])
        master.copy_(fresh.pop(MASTER))
        counted = {} if shards.step is None else {"step": shards.step.to(master.device, copy=True)}
        optimizer.optimizer.state[master] = {**counted, **fresh}
    if partitioned:
        _publish(optimizer)
    else:
        engine.module.load_state_dict(shards.common["module"])
    return shards.common


def _trained(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad)


Pieces = Iterator[tuple[str, int, int, int]]
"""Pieces of a process's flat master: parameter, first element, start in the master, number of elements."""


def _whole(optimizer: Any) -> Iterator[tuple[torch.Tensor, Pieces]]:
    """Stages 1 and 2: the concatenated parameters of a group are divided into equal parts."""

    def pieces(parameters: list[Any]) -> Pieces:
        for parameter in parameters:
            if (own := parameter._hp_mapping) is not None:
                address = own.lp_fragment_address
                yield optimizer.param_names[parameter], address.start, own.hp_fragment_address.start, address.numel

    for master, parameters in zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True):
        yield master, pieces(parameters)


def _partitioned(optimizer: Any) -> Iterator[tuple[torch.Tensor, Pieces]]:
    """Stage 3: each parameter is divided into equal parts."""
    rank = torch.distributed.get_rank()

    def pieces(parameters: list[Any]) -> Pieces:
        start = 0
        for parameter in parameters:
            share = parameter.partition_numel()
            yield optimizer.param_names[parameter], rank * share, start, max(0, min(share, parameter.ds_numel - rank * share))
            start += share

    for master, parameters in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
        yield master, pieces(parameters)


def _publish(optimizer: Any) -> None:
    """Copy the masters of stage 3 to the weights, as DeepSpeed does after loading."""
    optimizer.checkpoint_event_prologue()
    for master, weights, parts in zip(
        optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat, optimizer.fp16_partitioned_groups, strict=True
    ):
        weights.copy_(master)
        for part, new in zip(parts, optimizer.unflatten(weights, parts), strict=True):
            part.data = new.data
    optimizer.checkpoint_event_epilogue()


def _rank_of(file: Path) -> int:
    return int(file.name.split("zero_pp_rank_")[1].split("_")[0])
