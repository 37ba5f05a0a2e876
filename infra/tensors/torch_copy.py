"""Converts between torch tensors and `TensorBytes`."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from penstock.infra.tensors.stream import TensorBytes


def to_bytes(named: Iterable[tuple[str, torch.Tensor]]) -> list[TensorBytes]:
    """Copy tensors out as row-major bytes; `model.named_parameters()` names tied weights once."""
    return [tensor_bytes(name, tensor) for name, tensor in named]


def tensor_bytes(name: str, tensor: torch.Tensor) -> TensorBytes:
    """Copy one tensor out, so that later changes of `tensor` do not change the result."""
    return _as_bytes(name, tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format))


def seen_bytes(name: str, tensor: torch.Tensor) -> TensorBytes:
    """The bytes of one tensor without a copy if it is on the host and row-major; else a copy."""
    return _as_bytes(name, tensor.detach().cpu().contiguous())


def _as_bytes(name: str, host: torch.Tensor) -> TensorBytes:
    raw = host.reshape(-1).view(torch.uint8).numpy() if host.numel() else b""
    return TensorBytes(name=name, dtype=str(host.dtype).removeprefix("torch."), shape=tuple(host.shape), data=memoryview(raw).cast("B"))


def from_bytes(tensor: TensorBytes) -> torch.Tensor:
    """A copy of the tensor on the CPU in its own dtype."""
    return over(bytearray(tensor.data), tensor.dtype, tensor.shape)


def over(buffer: Any, dtype: str, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
    """A tensor over the bytes of a buffer from `offset` on, without a copy; not to be written if they are read-only."""
    kind, count = getattr(torch, dtype), math.prod(shape)
    if not count:
        return torch.empty(tuple(shape), dtype=kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of read-only bytes
        return torch.frombuffer(buffer, dtype=kind, count=count, offset=offset).reshape(tuple(shape))


@torch.no_grad()
def copy_into(model: torch.nn.Module, tensors: Iterable[TensorBytes]) -> None:
    """Overwrite all of a model's parameters, casting to their dtype and device. Raises `ValueError` before any change if names or shapes
    differ."""
    parameters = dict(model.named_parameters())
    weights = fitting(tensors, shapes={name: tuple(parameter.shape) for name, parameter in parameters.items()})
    for name, parameter in parameters.items():
        parameter.copy_(from_bytes(weights[name]))


def fitting(tensors: Iterable[TensorBytes], *, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorBytes]:
    """The tensors by name. Raises `ValueError` unless they are exactly those of `shapes`."""
    weights = {tensor.name: tensor for tensor in tensors}
    if weights.keys() != shapes.keys():
        odd = sorted(weights.keys() ^ shapes.keys())
        raise ValueError(f"these weights are of another model: {len(odd)} names differ, the first is {odd[0]!r}")
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise ValueError(f"these weights are of another model: {name} is {weights[name].shape}, not {shape}")
    return weights
