"""Converts between torch tensors and `TensorBytes`."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from penstock.infra.tensors.host_memory import HostBuffers, located, tensors_in
from penstock.infra.tensors.stream import TensorBytes, expected_nbytes


class HostCopy(Sequence[TensorBytes]):
    """Tensors on the host that a device may still be writing; reading one waits until all are written."""

    def __init__(self, tensors: Sequence[TensorBytes], written: torch.cuda.Event) -> None:
        self._tensors, self._written = tensors, written

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: Any) -> Any:
        self._written.synchronize()
        return self._tensors[index]


class CopyStream:
    """Copies weights to the host; a GPU copies on a separate stream while it computes."""

    def __init__(self, device: torch.device, buffers: HostBuffers) -> None:
        self._buffers = buffers
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._written: torch.cuda.Event | None = None

    @torch.no_grad()
    def copy(self, named: Iterable[tuple[str, torch.Tensor]]) -> Sequence[TensorBytes]:
        """Return a copy of tensors on the device, joined in name order in one buffer; call `wait` before they change."""
        parameters = dict(named)
        if self._stream is None and not self._buffers.shared:
            return to_bytes(parameters.items())
        tensors = self.take({name: (dtype_name(tensor.dtype), tensor.shape) for name, tensor in parameters.items()})
        if self._stream is None:
            for tensor in tensors:
                from_bytes(tensor).copy_(parameters[tensor.name])
            return tensors
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for tensor in tensors:
                from_bytes(tensor).copy_(parameters[tensor.name], non_blocking=True)
            self._written = torch.cuda.Event(blocking=True)
            self._written.record(self._stream)
        return HostCopy(tensors, self._written)

    def take(self, described: Mapping[str, tuple[str, Sequence[int]]]) -> list[TensorBytes]:
        """Return tensors with these dtypes and shapes and any content, in one buffer in name order, listed in the order of `described`."""
        layout = sorted((name, dtype, shape) for name, (dtype, shape) in described.items())
        data = self._buffers.take(sum(expected_nbytes(dtype, shape) for _, dtype, shape in layout))
        if self._stream is not None:
            page_lock(data)
        tensors = {tensor.name: tensor for tensor in tensors_in(layout, data)}
        return [tensors[name] for name in described]

    def wait(self) -> None:
        """Let the device finish the last copy before its next work; this process does not wait."""
        if self._stream is not None and self._written is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._written)


class Staged:
    """A version that a GPU copies to its memory on a separate stream while it computes."""

    def __init__(self, tensors: Sequence[TensorBytes], device: torch.device) -> None:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            self._tensors = []
            for tensor in tensors:
                page_lock(tensor.data)
                self._tensors.append((tensor.name, from_bytes(tensor).to(device, non_blocking=True)))
            self._copied = torch.cuda.Event()
            self._copied.record(stream)
        self._source = tensors  # stays mapped until it is copied

    @property
    def done(self) -> bool:
        return bool(self._copied.query())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor on the device; the device's current stream waits for the copies."""
        current = torch.cuda.current_stream()
        current.wait_event(self._copied)
        for name, tensor in self._tensors:
            tensor.record_stream(current)
            yield name, tensor


def page_lock(data: memoryview | bytes) -> None:
    """Register the memory of these bytes with CUDA if it is a `HostMemory`; no effect on other memory."""
    memory, _ = located(data)
    if memory is not None:
        memory.page_lock()


def to_bytes(named: Iterable[tuple[str, torch.Tensor]]) -> list[TensorBytes]:
    """Copy tensors out as row-major bytes; `model.named_parameters()` names tied weights once."""
    return [tensor_bytes(name, tensor) for name, tensor in named]


def tensor_bytes(name: str, tensor: torch.Tensor) -> TensorBytes:
    """Copy one tensor out, so that later changes of `tensor` do not change the result."""
    return _as_bytes(name, tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format))


def seen_bytes(name: str, tensor: torch.Tensor) -> TensorBytes:
    """Return the bytes of one tensor, without a copy if it is on the host and row-major."""
    return _as_bytes(name, tensor.detach().cpu().contiguous())


def _as_bytes(name: str, host: torch.Tensor) -> TensorBytes:
    raw = host.reshape(-1).view(torch.uint8).numpy() if host.numel() else b""
    return TensorBytes(name=name, dtype=dtype_name(host.dtype), shape=tuple(host.shape), data=memoryview(raw).cast("B"))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in `TensorBytes`, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def from_bytes(tensor: TensorBytes) -> torch.Tensor:
    """Return the tensor on the CPU in its own dtype, over the same bytes; not to be written if they are read-only."""
    kind, count = getattr(torch, tensor.dtype), math.prod(tensor.shape)
    if not count:
        return torch.empty(tensor.shape, dtype=kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of read-only bytes
        return torch.frombuffer(tensor.data, dtype=kind, count=count).reshape(tensor.shape)


@torch.no_grad()
def copy_all(pairs: Iterable[tuple[torch.Tensor, TensorBytes]]) -> None:
    """Overwrite each tensor, casting to its dtype and device; a GPU is waited for once."""
    devices = set()
    for target, tensor in pairs:
        if target.device.type == "cuda":
            page_lock(tensor.data)
            devices.add(target.device)
        target.copy_(from_bytes(tensor), non_blocking=True)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def copy_into(model: torch.nn.Module, tensors: Iterable[TensorBytes]) -> None:
    """Overwrite all of a model's parameters, casting to their dtype and device.

    Raises `ValueError` before any change if names or shapes differ.
    """
    parameters = dict(model.named_parameters())
    weights = fitting(tensors, shapes={name: tuple(parameter.shape) for name, parameter in parameters.items()})
    copy_all((parameter, weights[name]) for name, parameter in parameters.items())


def fitting(tensors: Iterable[TensorBytes], *, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorBytes]:
    """Return the tensors by name. Raises `ValueError` unless they are exactly those in `shapes`."""
    weights = {tensor.name: tensor for tensor in tensors}
    if weights.keys() != shapes.keys():
        odd = sorted(weights.keys() ^ shapes.keys())
        raise ValueError(f"the weights do not match the model: {len(odd)} parameter names differ, the first is {odd[0]!r}")
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise ValueError(f"the weights do not match the model: {name} has shape {weights[name].shape}, expected {shape}")
    return weights
