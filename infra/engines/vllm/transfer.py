"""The weight-transfer backend that runs in the process that owns vLLM's model, and what else of Penstock has to live there.

The rule: a version is loaded whole, every parameter of it, or the update raises and the engine is never resumed.
vLLM imports this module, as the place of its worker's extension, in every process that holds a part of the model.
"""

import mmap
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from penstock.infra.engines.vllm.arguments import BACKEND
from penstock.infra.engines.vllm.watch import end_with_owner
from penstock.infra.tensors.stream import TensorBytes

ALIGNMENT = 64
"""Bytes to which a tensor's start is aligned in a shared buffer."""

_handed: dict[int, Sequence[TensorBytes]] = {}
"""Tensors on their way to an engine in this very process, by hand-over number: they are read where they lie."""


class Extension:
    """Part of vLLM's worker, by whose name this module is imported where the model is."""

    def load_version(self: Any, update_info: dict[str, Any]) -> None:
        """Load a version in one call: between processes each one is a round trip in which nothing is drawn."""
        self.start_weight_update()
        self.update_weights(update_info)
        self.finish_weight_update()


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed on beforehand."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Location of one version's tensors: in this process under `handed`, or in the file `path` by `table`."""

    handed: int | None = None
    path: str | None = None
    table: list[tuple[str, str, list[int], int]] = field(default_factory=list)
    """(name, dtype, shape, offset in bytes) of each tensor in `path`."""


class Transfer(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Loads a version by vLLM's layerwise reload, which packs and fuses every layer anew that received weights."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Make every layer wait for its weights."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load all tensors. Raises `ValueError` when a parameter got none of them."""
        tensors: Iterator[tuple[str, torch.Tensor]]
        if update_info.handed is not None:
            tensors = ((tensor.name, as_torch(tensor.data, tensor.dtype, tensor.shape)) for tensor in _handed[update_info.handed])
        else:
            assert update_info.path is not None
            tensors = _in_file(update_info.path, update_info.table)
        expected = {name for name, _ in self.model.named_parameters() if not (_tied(self.model) and name == "lm_head.weight")}
        loaded = self.model.load_weights(tensors)
        if loaded is not None and self.model_config.quantization is None and (missed := expected - loaded):
            raise ValueError(f"vLLM took no weights for {len(missed)} of its parameters, first {min(missed)}")

    def finish_weight_update(self) -> None:
        """Bring all layers into the form that computes."""
        finalize_layerwise_reload(self.model, self.model_config)
        pack_tied_head(self.model)

    def shutdown(self) -> None:
        """Nothing is held."""


def pack_tied_head(model: Any) -> None:
    """Pack a tied output layer anew: on a CPU it computes with a packed copy of the embedding and never receives weights itself."""
    head: Any = getattr(model, "lm_head", None)
    if _tied(model) and hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def _tied(model: Any) -> bool:
    return bool(getattr(model.config, "tie_word_embeddings", False))


def hand_over(number: int, tensors: Sequence[TensorBytes]) -> dict[str, Any]:
    """Update info for an engine in this process; `taken_back(number)` when it is done."""
    _handed[number] = tensors
    return {"handed": number}


def taken_back(number: int) -> None:
    """Let go of tensors that were handed over."""
    _handed.pop(number, None)


def write_shared(file: int, tensors: Sequence[TensorBytes]) -> dict[str, Any]:
    """Update info for engines in other processes: the tensors go into the open file `file`, which they find by this process's id."""
    table, end = [], 0
    for tensor in tensors:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        data, written = memoryview(tensor.data).cast("B"), 0
        while written < len(data):
            written += os.pwrite(file, data[written:], start + written)
        table.append((tensor.name, tensor.dtype, list(tensor.shape), start))
        end = start + len(data)
    return {"path": f"/proc/{os.getpid()}/fd/{file}", "table": table}


def as_torch(buffer: Any, dtype: str, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
    """A tensor over the buffer's own bytes, only to be read."""
    kind, count = getattr(torch, dtype), 1
    for size in shape:
        count *= size
    if not count:
        return torch.empty(tuple(shape), dtype=kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the bytes are read-only, and are only read
        return torch.frombuffer(buffer, dtype=kind, count=count, offset=offset).reshape(tuple(shape))


def _in_file(path: str, table: Sequence[tuple[str, str, Sequence[int], int]]) -> Iterator[tuple[str, torch.Tensor]]:
    file = os.open(path, os.O_RDONLY)
    try:
        mapping = mmap.mmap(file, 0, prot=mmap.PROT_READ)  # lives as long as a tensor over it
    finally:
        os.close(file)
    for name, dtype, shape, offset in table:
        yield name, as_torch(mapping, dtype, shape, offset)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, Transfer)
end_with_owner()
