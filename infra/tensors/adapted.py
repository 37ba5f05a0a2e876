"""Weights as a frozen base and a copy of low-rank adapters."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.infra.tensors.host_memory import allocated, copy_bytes
from penstock.infra.tensors.stream import Hash, TensorBytes, expected_nbytes
from penstock.topics.versions import weight_adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The adapter of one tensor [rows, columns], multiplied by `scale`: A is [rank, columns], B [rows, rank]."""

    a: npt.NDArray[np.float32]
    b: npt.NDArray[np.float32]
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """The weights of a model at one time, unchanged while training changes the model's adapters."""

    below: Callable[[], Iterator[TensorBytes]]
    """Iterates over the frozen base weights in any order, with one tensor at a time on the host."""
    below_digest: Callable[[Hash], str]
    """Digest of the base weights."""
    adapters: Mapping[str, Adapter]
    """Tensor name -> adapter."""

    def merged(self) -> list[TensorBytes]:
        """Return a copy of the weights with adapters merged."""
        return [self._merged(tensor) for tensor in self.below()]

    def blocks(self, layout: Iterable[tuple[str, str, Sequence[int]]]) -> Iterator[Any]:
        """Yield the adapters as encoded for `weight_adapter.apply`, in buffers to be joined; `layout` has (name, dtype, shape)."""
        start = 0
        for name, dtype, shape in sorted(layout):
            if (adapter := self.adapters.get(name)) is not None:
                yield from weight_adapter.encode(adapter.a, adapter.b, start=start, dtype=dtype, scale=adapter.scale)
            start += expected_nbytes(dtype, shape)

    def _merged(self, tensor: TensorBytes) -> TensorBytes:
        """Return a copy of a base tensor, with its adapter added if it has one."""
        data, adapter = allocated(tensor.nbytes), self.adapters.get(tensor.name)
        if adapter is None:
            copy_bytes(data, tensor.data)
        else:
            assert tensor.shape == (len(adapter.b), adapter.a.shape[1]), f"{tensor.name} is {tensor.shape}, unlike its adapter"
            weight_adapter.merge(tensor.data, data, adapter.a, adapter.b, dtype=tensor.dtype, scale=adapter.scale)
        return TensorBytes(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, data=data)
