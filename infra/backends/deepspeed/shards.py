"""Reads a checkpoint of ZeRO stages 1 to 3 with any number of processes: each takes its share from the shards of those who wrote it.

The rule: every number comes back bit for bit, and only what a process needs is read. DeepSpeed itself refuses another number of
processes, or first writes the whole state anew, a file for each parameter.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.infra.backends.deepspeed import stored
from penstock.infra.errors import BackendError

MASTER, MOMENTS = "fp32", ("exp_avg", "exp_avg_sq")
"""What a shard holds of each of its elements; AdamW's moments from the first step on."""


class Shards:
    """The shards that a checkpoint's processes wrote, as parameters."""

    def __init__(self, directory: Path) -> None:
        """Map the files of `directory` into memory. Raises `BackendError` when there are none."""
        models, optimizers = sorted(directory.glob("*_model_states.pt")), list(directory.glob("*_optim_states.pt"))
        if not models or not optimizers:
            raise BackendError(f"there is no trainer state in {directory}")
        self.common = stored.read(models[0])
        """What rank 0 wrote of the model and of the run."""
        self.step: torch.Tensor | None = None
        """AdamW's count of steps; None where there are no moments."""
        self._pieces: dict[str, list[tuple[Mapping[str, torch.Tensor], int, int]]] = defaultdict(list)
        """Parameter -> its pieces in order: the flat states that it lies in, where, and how long it is."""
        parts = [stored.read(file)["optimizer_state_dict"] for file in sorted(optimizers, key=_rank_of)]
        for rank, part in enumerate(parts):
            flat = part["fp32_flat_groups" if "fp32_flat_groups" in part else "single_partition_of_fp32_groups"]
            states = part["optimizer_state_dict" if "fp32_flat_groups" in part else "base_optimizer_state"]["state"]
            self.step = next(iter(states.values()))["step"] if states else self.step
            for group, places in enumerate(self._places(part, rank, len(parts))):
                tensors = {**states.get(group, {}), MASTER: flat[group]}
                for name, (start, count) in places.items():
                    self._pieces[name].append((tensors, start, count))

    def size(self, name: str) -> int:
        """Elements of a parameter; 0 of one that is not there."""
        return sum(count for _, _, count in self._pieces.get(name, []))

    def copy(self, kind: str, name: str, begin: int, target: torch.Tensor) -> None:
        """Fill `target` [N] with the elements of a parameter from `begin` on."""
        first = 0
        for tensors, start, count in self._pieces[name]:
            low, high = max(begin, first), min(begin + target.numel(), first + count)
            if low < high:
                target[low - begin : high - begin] = tensors[kind][start + low - first : start + high - first]
            first += count

    def _places(self, part: Mapping[str, Any], rank: int, ranks: int) -> Iterator[dict[str, tuple[int, int]]]:
        """For each flat tensor of a shard: parameter -> where its piece begins and how long it is."""
        if "fp32_flat_groups" not in part:
            for mapping in part["param_slice_mappings"]:
                yield {name: (address.start, address.numel) for name, address in mapping.items()}
            return
        for shapes in self.common["param_shapes"]:
            places, start = {}, 0
            for name, shape in shapes.items():
                share = -(-shape.numel() // ranks)
                places[name] = (start, max(0, min(share, shape.numel() - rank * share)))
                start += share
            yield places


@torch.no_grad()
def load(engine: Any, directory: Path) -> Mapping[str, Any]:
    """Restore this process's masters and moments, and all weights; returns what `client_state` held.

    The optimizer's settings stay those of the current run. Raises `BackendError` for no state, or that of another model.
    """
    shards, optimizer = Shards(directory), engine.optimizer
    names = {name: getattr(parameter, "ds_numel", parameter.numel()) for name, parameter in _trained(engine)}
    if any(shards.size(name) != count for name, count in names.items()):
        raise BackendError(f"{directory} is the state of another model")
    partitioned = engine.zero_optimization_partition_weights()
    for master, pieces in _partitioned(optimizer) if partitioned else _whole(optimizer):
        fresh = {kind: torch.zeros_like(master) for kind in (MASTER, *(MOMENTS if shards.step is not None else ()))}
        for name, begin, start, count in pieces:
            for kind, flat in fresh.items():
                shards.copy(kind, name, begin, flat[start : start + count])
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
"""Of a process's flat master: parameter, the first of its elements, where it lies, how many."""


def _whole(optimizer: Any) -> Iterator[tuple[torch.Tensor, Pieces]]:
    """Stages 1 and 2: a group of parameters lies in one line, which is cut into equal parts."""

    def pieces(parameters: list[Any]) -> Pieces:
        for parameter in parameters:
            if (own := parameter._hp_mapping) is not None:
                address = own.lp_fragment_address
                yield optimizer.param_names[parameter], address.start, own.hp_fragment_address.start, address.numel

    for master, parameters in zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True):
        yield master, pieces(parameters)


def _partitioned(optimizer: Any) -> Iterator[tuple[torch.Tensor, Pieces]]:
    """Stage 3: each parameter is cut into equal parts by itself."""
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
    """Make the weights of stage 3 those of the masters, as DeepSpeed does when it has loaded them."""
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
