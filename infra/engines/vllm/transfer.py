"""Weight-transfer backend in the processes that hold vLLM's model.

A version is loaded with all its parameters, or the update raises and the engine is never resumed. vLLM imports this module, which has its
worker extension, in every process with a part of the model.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from penstock.infra.engines.vllm.process import BACKEND, STAGED_OF_FREE, end_with_owner
from penstock.infra.tensors.host_memory import Mappings, shared_table
from penstock.infra.tensors.stream import TensorBytes, expected_nbytes
from penstock.infra.tensors.torch_copy import Staged, from_bytes

_registered: dict[int, Sequence[TensorBytes]] = {}
"""Transfer id -> tensors for an engine in this process, which reads them without a copy."""
_mappings = Mappings()
"""The worker's memory, in this process of its engine."""


class Extension:
    """Methods added to vLLM's worker."""

    def stage_version(self: Any, update_info: dict[str, Any]) -> bool:
        """Copy a version to the device while generation continues; return False until that is done, True if it is or cannot be."""
        transfer = self.weight_transfer_engine
        return bool(transfer.stage(transfer.parse_update_info(update_info)))

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
        """No effect: the transfer needs no initialisation."""

    _staged: tuple[UpdateInfo, Staged] | None = None

    def stage(self, update_info: UpdateInfo) -> bool:
        """Start to copy a version to a GPU; return True once that is done, or if it has no GPU or too little free memory."""
        if self._staged is None or self._staged[0] != update_info:
            self._staged = None
            device = next(self.model.parameters()).device
            if device.type != "cuda":
                return True
            tensors = self._located(update_info)
            if sum(tensor.nbytes for tensor in tensors) > STAGED_OF_FREE * torch.cuda.mem_get_info(device)[0]:
                return True
            self._staged = update_info, Staged(tensors, device)
        return self._staged[1].done

    def _located(self, update_info: UpdateInfo) -> Sequence[TensorBytes]:
        """Return the tensors of a version without a copy, from this process or from mapped shared memory."""
        if update_info.registered is not None:
            return _registered[update_info.registered]
        assert update_info.path is not None
        on_gpu = torch.cuda.is_available()
        file = os.open(update_info.path, (os.O_RDWR if on_gpu else os.O_RDONLY) | os.O_CLOEXEC)
        memory = _mappings.of(file, writable=on_gpu)  # drivers refuse to register memory that cannot be written
        if on_gpu:
            memory.page_lock()
        view = memoryview(memory)
        return [
            TensorBytes(name=name, dtype=dtype, shape=tuple(shape), data=view[offset : offset + expected_nbytes(dtype, shape)])
            for name, dtype, shape, offset in update_info.table
        ]

    def start_weight_update(self) -> None:
        """Prepare every layer for new weights."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load all tensors. Raises `ValueError` if a parameter got no weights."""
        staged, self._staged = self._staged, None
        if staged is not None and staged[0] == update_info:
            tensors = staged[1].tensors()
        else:
            tensors = ((tensor.name, from_bytes(tensor)) for tensor in self._located(update_info))
        expected = {name for name, _ in self.model.named_parameters() if not (_tied(self.model) and name == "lm_head.weight")}
        loaded = self.model.load_weights(tensors)
        if loaded is not None and (missed := expected - loaded):
            raise ValueError(f"vLLM did not load {len(missed)} of its parameters from the published weights, the first is {min(missed)}")

    def finish_weight_update(self) -> None:
        """Convert all layers to the form used in forward passes."""
        finalize_layerwise_reload(self.model, self.model_config)
        pack_tied_head(self.model)

    def shutdown(self) -> None:
        """No effect: the transfer has no resources."""


def pack_tied_head(model: Any) -> None:
    """Pack a tied output layer again: on a CPU it uses a packed copy of the embedding and never receives weights itself."""
    head: Any = getattr(model, "lm_head", None)
    if _tied(model) and hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def _tied(model: Any) -> bool:
    return bool(getattr(model.config, "tie_word_embeddings", False))


def register(number: int, tensors: Sequence[TensorBytes]) -> dict[str, Any]:
    """Offer tensors to an engine in this process; return its update info. Call `unregister(number)` afterwards."""
    _registered[number] = tensors
    return {"registered": number}


def unregister(number: int) -> None:
    _registered.pop(number, None)


def in_shared_memory(tensors: Sequence[TensorBytes]) -> dict[str, Any] | None:
    """Return update info for engines in other processes, which map the tensors' memory; None if it cannot be mapped."""
    table = shared_table(tensors)
    if table is None:
        return None
    memory, offsets = table
    entries = [(tensor.name, tensor.dtype, list(tensor.shape), offset) for tensor, offset in zip(tensors, offsets, strict=True)]
    return {"path": f"/proc/{os.getpid()}/fd/{memory.file}", "table": entries}


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, Transfer)
end_with_owner()
