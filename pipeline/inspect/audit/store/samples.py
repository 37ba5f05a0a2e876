"""Facts about the samples in `rollouts`: packed numbers for the first record of each, `SampleFact` for later ones.

A sample in its prompt's partition has a cell, addressed by group and number; samples in other partitions are rare and cost more.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from penstock.pipeline.inspect.audit.store.hashes import SampledTurn
from penstock.pipeline.inspect.audit.store.tables import Index, Interned
from penstock.topics.wire.record import RecordId

_CELL = struct.Struct("<qqIH8s")
"""Offset + 1, timestamp, versions, worker, hash; zeros where there is no sample."""
_NO_PARTITION = 0xFFFF


class SampleFact(NamedTuple):
    """A sample in `rollouts`."""

    where: RecordId
    group: int
    sample: int
    version_min: int
    version_max: int
    timestamp_ms: int
    worker: str
    body: bytes
    """Hash of all its fields."""


class LaterSample(NamedTuple):
    """A sample whose number has an earlier record."""

    first: SampleFact
    again: SampleFact
    started_ns: int
    """Start of the later one."""


class Samples:
    """The samples of a run; up to `started` of a group are generated."""

    def __init__(self, started: int) -> None:
        self.later: list[LaterSample] = []
        self.poison: list[SampleFact] = []
        """Dead-lettered samples that crashed their readers."""
        self.flaws: list[tuple[SampleFact, str]] = []
        """Samples with a flaw in the turns of their trajectory."""
        self.broken: dict[tuple[int, int, int], str] = {}
        """Partition, group and number of a sample -> why its environment ended it."""
        self.turns: list[tuple[SampleFact, tuple[SampledTurn, ...]]] = []
        """The policy's turns, in runs whose turns travel through the log."""
        self.most_sequences = 1
        """Largest number of trained sequences of one sample: segments of a trajectory."""
        self._started, self._low = started, 0
        self._partitions, self._cells = np.zeros(0, np.uint16).data, np.zeros(0, np.uint8).data
        self._astray: dict[tuple[int, int, int], SampleFact] = {}
        self._versions, self._workers = Interned(), Interned()
        self._count = 0

    def make_room(self, prompts: Index[Any]) -> None:
        """Allocate a cell for each sample of the admitted groups; unused pages cost no memory."""
        if not len(prompts):
            return
        groups, room = np.asarray(prompts.groups), len(prompts) * 5 // 8 + 64
        self._low = max(0, int(groups[len(prompts) // 2]) - room)  # group numbers have almost no gaps: more distant ones are foreign
        partitions = np.full(2 * room, _NO_PARTITION, np.uint16)
        near = (groups >= self._low) & (groups < self._low + len(partitions))
        partitions[groups[near] - self._low] = prompts.column("partition")[near]
        self._partitions, self._cells = partitions.data, np.zeros(len(partitions) * self._started * _CELL.size, np.uint8).data

    def add(self, fact: SampleFact, started_ns: int) -> bool:
        """Add a sample; False if it repeats one."""
        self._count += 1
        key = (fact.where.partition, fact.group, fact.sample)
        if (first := self.first(*key)) is not None:
            self.later.append(LaterSample(first, fact, started_ns))
            return False
        if (cell := self._cell(*key)) is None:
            self._astray[key] = fact
        else:
            versions = self._versions.number((fact.version_min, fact.version_max))
            worker = self._workers.number(fact.worker)
            _CELL.pack_into(self._cells, cell, fact.where.offset + 1, fact.timestamp_ms, versions, worker, fact.body)
        return True

    def first(self, partition: int, group: int, sample: int) -> SampleFact | None:
        """The first record of a sample, which is the one that counts."""
        cell = self._cell(partition, group, sample)
        return self._astray.get((partition, group, sample)) if cell is None else self._read(cell)

    def of_group(self, partition: int, group: int) -> list[SampleFact]:
        """The first record of each sample of a group, in the order of `rollouts`."""
        firsts = [self.first(partition, group, sample) for sample in range(self._started)]
        return sorted((fact for fact in firsts if fact is not None), key=lambda fact: fact.where.offset)

    def firsts(self) -> Iterator[SampleFact]:
        """The first record of every sample."""
        size = self._started * _CELL.size
        for slot, partition in enumerate(self._partitions):
            if partition != _NO_PARTITION:
                facts = (self._read(cell) for cell in range(slot * size, (slot + 1) * size, _CELL.size))
                yield from (fact for fact in facts if fact is not None)
        yield from self._astray.values()

    def __len__(self) -> int:
        """Count the samples, repeated ones too."""
        return self._count + len(self.poison)

    def __iter__(self) -> Iterator[SampleFact]:
        """All samples."""
        yield from self.firsts()
        yield from (pair.again for pair in self.later)
        yield from self.poison

    def astray(self) -> Iterator[SampleFact]:
        """Samples that may be outside their prompt's partition: those without a cell, repetitions and poison records."""
        yield from self._astray.values()
        yield from (pair.again for pair in self.later)
        yield from self.poison

    def _cell(self, partition: int, group: int, sample: int) -> int | None:
        """Offset of a sample's cell; None if it has none."""
        slot = group - self._low
        if not 0 <= slot < len(self._partitions) or self._partitions[slot] != partition or partition == _NO_PARTITION:
            return None
        return (slot * self._started + sample) * _CELL.size if sample < self._started else None

    def _read(self, cell: int) -> SampleFact | None:
        offset, timestamp_ms, versions, worker, body = _CELL.unpack_from(self._cells, cell)
        if not offset:
            return None
        slot, sample = divmod(cell // _CELL.size, self._started)
        low, high = self._versions.values[versions]
        where = RecordId("rollouts", self._partitions[slot], offset - 1)
        return SampleFact(where, slot + self._low, sample, low, high, timestamp_ms, self._workers.values[worker], body)
