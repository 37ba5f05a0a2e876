"""Weight-transfer backend in the processes that hold vLLM's model.

A version is loaded with all its parameters, or the update raises and the engine is never resumed. vLLM imports this module, which has its
worker extension, in every process with a part of the model.
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from penstock.infra.engines.vllm.process import BACKEND, end_with_owner
from penstock.infra.tensors.stream import TensorBytes
from penstock.infra.tensors.torch_copy import over

ALIGNMENT = 64
"""Alignment in bytes of each tensor in a shared buffer."""

_registered: dict[int, Sequence[TensorBytes]] = {}
"""Transfer id -> tensors for an engine in this process, which reads them without a copy."""


class Extension:
    """Methods added to vLLM's worker."""

    def load_version(self: Any, update_info: dict[str, Any]) -> None:
        """Load a version in one call, because each call to another process is a round trip during which nothing is generated."""
        self.start_weight_update()
        self.update_weights(update_info)
        self.finish_weight_update()


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty: the transfer needs no initialisation."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Location of one version's tensors: in this process under the id `registered`, or in the file `path` by `table`."""

    registered: int | None = None
    path: str | None = None
    table: list[tuple[str, str, list[int], int]] = field(default_factory=list)
    """(name, dtype, shape, offset in bytes) of each tensor in `path`."""


class Transfer(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Loads a version by vLLM's layerwise reload, which packs and fuses each layer with new weights again."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Prepare every layer for new weights."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load all tensors. Raises `ValueError` if a parameter got no weights."""
        tensors: Iterator[tuple[str, torch.Tensor]]
        if update_info.registered is not None:
            weights = _registered[update_info.registered]
            tensors = ((tensor.name, over(tensor.data, tensor.dtype, tensor.shape)) for tensor in weights)
        else:
            assert update_info.path is not None
            tensors = _in_file(update_info.path, update_info.table)
        expected = {name for name, _ in self.model.named_parameters() if not (_tied(self.model) and name == "lm_head.weight")}
        loaded = self.model.load_weights(tensors)
        if loaded is not None and self.model_config.quantization is None and (missed := expected - loaded):
            raise ValueError(f"vLLM took no weights for {len(missed)} of its parameters, first {min(missed)}")

    def finish_weight_update(self) -> None:
        """Convert all layers to the form used in forward passes."""
        finalize_layerwise_reload(self.model, self.model_config)
        pack_tied_head(self.model)

    def shutdown(self) -> None:
        """Nothing to release."""


def pack_tied_head(model: Any) -> None:
    """Pack a tied output layer again: on a CPU it uses a packed copy of the embedding and never receives weights itself."""
    head: Any = getattr(model, "lm_head", None)
    if _tied(model) and hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def _tied(model: Any) -> bool:
    return bool(getattr(model.config, "tie_word_embeddings", False))


def register(number: int, tensors: Sequence[TensorBytes]) -> dict[str, Any]:
    """Update info for an engine in this process; call `unregister(number)` afterwards."""
    _registered[number] = tensors
    return {"registered": number}


def unregister(number: int) -> None:
    """Release registered tensors."""
    _registered.pop(number, None)


def write_shared(file: int, tensors: Sequence[TensorBytes]) -> dict[str, Any]:
    """Update info for engines in other processes, which open the file through this process's /proc entry; writes the tensors to `file`."""
    table, end = [], 0
    for tensor in tensors:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        data, written = memoryview(tensor.data).cast("B"), 0
        while written < len(data):
            written += os.pwrite(file, data[written:], start + written)
        table.append((tensor.name, tensor.dtype, list(tensor.shape), start))
        end = start + len(data)
    return {"path": f"/proc/{os.getpid()}/fd/{file}", "table": table}


def _in_file(path: str, table: Sequence[tuple[str, str, Sequence[int], int]]) -> Iterator[tuple[str, torch.Tensor]]:
    file = os.open(path, os.O_RDONLY)
    try:
        mapping = mmap.mmap(file, 0, prot=mmap.PROT_READ)  # exists as long as a tensor over it
    finally:
        os.close(file)
    for name, dtype, shape, offset in table:
        yield name, over(mapping, dtype, shape, offset)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, Transfer)
end_with_owner()
