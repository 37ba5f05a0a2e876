"""Weights with low-rank adapters, while they are apart: the frozen weights below them, and a copy of the adapters.

The rule: merged weights are made by `topics.versions` alone, so that a trainer and whoever reads its adapters hold the same bits.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.infra.tensors.stream import Hash, TensorBytes, expected_nbytes
from penstock.topics.versions import weight_adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The adapter of one tensor [rows, columns], which counts `scale` times: A is [rank, columns], B [rows, rank]."""

    a: npt.NDArray[np.float32]
    b: npt.NDArray[np.float32]
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """The weights of a model at one moment: they stay what they are while training changes the model's adapters."""

    below: Callable[[], Iterator[TensorBytes]]
    """Goes through the frozen weights, in any order; one tensor at a time need be on the host."""
    below_digest: Callable[[Hash], str]
    """That of the frozen weights."""
    adapters: Mapping[str, Adapter]
    """By the names of the tensors that they change."""

    def merged(self) -> list[TensorBytes]:
        """A copy of the weights as they are with their adapters."""
        return [self._merged(tensor) for tensor in self.below()]

    def blocks(self, layout: Iterable[tuple[str, str, Sequence[int]]]) -> Iterator[Any]:
        """What `weight_adapter.apply` makes the merged weights of, as buffers to be joined; `layout`: (name, dtype, shape)."""
        start = 0
        for name, dtype, shape in sorted(layout):
            if (one := self.adapters.get(name)) is not None:
                yield from weight_adapter.encode(one.a, one.b, start=start, dtype=dtype, scale=one.scale)
            start += expected_nbytes(dtype, shape)

    def _merged(self, tensor: TensorBytes) -> TensorBytes:
        data, one = memoryview(bytearray(tensor.nbytes)), self.adapters.get(tensor.name)
        if one is None:
            data[:] = memoryview(tensor.data).cast("B")
        else:
            assert tensor.shape == (len(one.b), one.a.shape[1]), f"{tensor.name} is {tensor.shape}, not as its adapter"
            weight_adapter.merge(tensor.data, data, one.a, one.b, dtype=tensor.dtype, scale=one.scale)
        return TensorBytes(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, data=data)
