"""The headers that our own workers give samples, made and compared for thousands of records at once.

The rule: they are compared as bytes of the record, so that nothing about them can differ.
"""

import operator
import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from penstock.infra.kafka.blocks import Block
from penstock.infra.kafka.client_repairs.record_format import varint
from penstock.pipeline.archive.arrays import Flags
from penstock.topics import rollouts

_NAMES = ("group", "sample", "policy-version-min", "policy-version-max", "outcome", "worker", "tokens")
"""Between `schema` and `crc32`, in their order."""
_KEPT = 100_000


class SampleHeaders:
    """Those of one run."""

    def __init__(self, run: str) -> None:
        first = {"run": run, "schema": rollouts.SCHEMA}
        self._begin = varint(len(first) + len(_NAMES) + 1) + b"".join(_wire(name, text) for name, text in first.items())
        self._lines = b"".join(_line(name, text) for name, text in first.items())
        self._end = varint(len("crc32")) + b"crc32" + varint(8) + b"%08x"
        self._wires = [_Said(name, _wire) for name in _NAMES]
        self._said = [_Said(name, _line) for name in _NAMES]

    def follow(self, block: Block, facts: Sequence[Sequence[Any]], values: Iterable[bytes | bytearray], sums: Iterable[int]) -> Flags:
        """Which records have the headers that these facts make, the checksum included.

        `facts` are columns: group, sample, oldest and newest version, finish, worker, tokens. `values` are the payloads from some place
        on, `sums` the checksums of what stands before it.
        """
        wires, lines = (
            [list(map(said.__getitem__, column)) for said, column in zip(kept, facts, strict=True)] for kept in (self._wires, self._said)
        )
        checks = map(zlib.crc32, map(b"".join, zip(repeat(self._lines), *lines)), map(zlib.crc32, values, sums))
        wanted = map(b"".join, zip(repeat(self._begin), *wires, map(self._end.__mod__, checks)))
        found = [block.data[begin:end] for begin, end in block.headers.T.tolist()]
        for said in (*self._wires, *self._said):
            said.trim()
        return np.fromiter(map(operator.eq, found, wanted), np.bool_, len(block))


class _Said(dict[Any, bytes]):
    """Number or text -> the header that says it, written by `write`."""

    def __init__(self, name: str, write: Callable[[str, str], bytes]) -> None:
        super().__init__()
        self._name, self._write = name, write

    def __missing__(self, value: int | str) -> bytes:
        found = self[value] = self._write(self._name, str(value))
        return found

    def trim(self) -> None:
        """Forget, once there is much to forget."""
        if len(self) > _KEPT:
            self.clear()


def _wire(name: str, text: str) -> bytes:
    """A header as it stands in a record."""
    return varint(len(name)) + name.encode() + varint(len(text)) + text.encode()


def _line(name: str, text: str) -> bytes:
    """A header as the checksum counts it."""
    return f"\n{name}={text}".encode()
