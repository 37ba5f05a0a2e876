"""What is kept of the samples in `rollouts`: of the first record of each a few packed numbers, of later ones the facts.

The rule: a sample that stands where its prompt does has a cell of its own, found by group and number alone; what came astray is rare
and may cost more.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from penstock.pipeline.audit.kept.sampled_turns import SampledTurn
from penstock.pipeline.audit.kept.tables import Index, Names
from penstock.topics.wire.record import RecordId

_CELL = struct.Struct("<qqIH8s")
"""Offset + 1, timestamp, versions, worker, hash; zeros where there is no sample."""
_NOWHERE = 0xFFFF


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
    """When the later one was begun."""


class Samples:
    """The samples of a run, of which up to `begun` are drawn for a group."""

    def __init__(self, begun: int) -> None:
        self.later: list[LaterSample] = []
        self.killers: list[SampleFact] = []
        """Samples that were set aside, and used by no worker."""
        self.flaws: list[tuple[SampleFact, str]] = []
        """Samples with what is wrong with the turns of their trajectory."""
        self.broken: dict[tuple[int, int, int], str] = {}
        """Partition, group and number of a sample -> why its environment ended it."""
        self.turns: list[tuple[SampleFact, tuple[SampledTurn, ...]]] = []
        """The policy's turns, in runs whose turns travel through the log."""
        self.most_sequences = 1
        """The most that are trained of one sample: the segments of a trajectory."""
        self._begun, self._low = begun, 0
        self._homes, self._cells = np.zeros(0, np.uint16).data, np.zeros(0, np.uint8).data
        self._astray: dict[tuple[int, int, int], SampleFact] = {}
        self._versions, self._workers = Names(), Names()
        self._count = 0

    def make_room(self, prompts: Index[Any]) -> None:
        """Lay out a cell for each sample of the admitted groups; memory that no sample touches costs nothing."""
        if not len(prompts):
            return
        groups, room = np.asarray(prompts.groups), len(prompts) * 5 // 8 + 64
        self._low = max(0, int(groups[len(prompts) // 2]) - room)  # their numbers have next to no gaps: what is further off is foreign
        homes = np.full(2 * room, _NOWHERE, np.uint16)
        near = (groups >= self._low) & (groups < self._low + len(homes))
        homes[groups[near] - self._low] = prompts.column("partition")[near]
        self._homes, self._cells = homes.data, np.zeros(len(homes) * self._begun * _CELL.size, np.uint8).data

    def add(self, fact: SampleFact, started_ns: int) -> bool:
        """Note a sample; False if it repeats one."""
        self._count += 1
        key = (fact.where.partition, fact.group, fact.sample)
        if (first := self.first(*key)) is not None:
            self.later.append(LaterSample(first, fact, started_ns))
            return False
        if (place := self._place(*key)) is None:
            self._astray[key] = fact
        else:
            versions = self._versions.number((fact.version_min, fact.version_max))
            worker = self._workers.number(fact.worker)
            _CELL.pack_into(self._cells, place, fact.where.offset + 1, fact.timestamp_ms, versions, worker, fact.body)
        return True

    def first(self, partition: int, group: int, sample: int) -> SampleFact | None:
        """The first record of a sample: the one that counts."""
        place = self._place(partition, group, sample)
        return self._astray.get((partition, group, sample)) if place is None else self._at(place)

    def of_group(self, partition: int, group: int) -> list[SampleFact]:
        """The first record of each sample of a group, in the order of `rollouts`."""
        found = [self.first(partition, group, sample) for sample in range(self._begun)]
        return sorted((fact for fact in found if fact is not None), key=lambda fact: fact.where.offset)

    def firsts(self) -> Iterator[SampleFact]:
        """The first record of every sample."""
        size = self._begun * _CELL.size
        for slot, home in enumerate(self._homes):
            if home != _NOWHERE:
                found = (self._at(place) for place in range(slot * size, (slot + 1) * size, _CELL.size))
                yield from (fact for fact in found if fact is not None)
        yield from self._astray.values()

    def __len__(self) -> int:
        """Count the samples, repeated ones too."""
        return self._count + len(self.killers)

    def __iter__(self) -> Iterator[SampleFact]:
        """All samples."""
        yield from self.firsts()
        yield from (pair.again for pair in self.later)
        yield from self.killers

    def astray(self) -> Iterator[SampleFact]:
        """Samples in a partition where no prompt of their group stands, among others."""
        yield from self._astray.values()
        yield from (pair.again for pair in self.later)
        yield from self.killers

    def _place(self, partition: int, group: int, sample: int) -> int | None:
        """RecordId in the cells a sample belongs; None for one that has no cell."""
        slot = group - self._low
        if not 0 <= slot < len(self._homes) or self._homes[slot] != partition or partition == _NOWHERE:
            return None
        return (slot * self._begun + sample) * _CELL.size if sample < self._begun else None

    def _at(self, place: int) -> SampleFact | None:
        offset, timestamp_ms, versions, worker, body = _CELL.unpack_from(self._cells, place)
        if not offset:
            return None
        slot, sample = divmod(place // _CELL.size, self._begun)
        low, high = self._versions.values[versions]
        where = RecordId("rollouts", self._homes[slot], offset - 1)
        return SampleFact(where, slot + self._low, sample, low, high, timestamp_ms, self._workers.values[worker], body)
