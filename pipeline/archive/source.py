"""A run's topics as rows of an archive, block by block.

The rule: committed records only, in order, between two offsets; memory holds one block, however many records there are.
"""

from collections.abc import Iterator

import pyarrow as pa

from penstock.infra.kafka.blocks import Block
from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline.archive.layout import Kind
from penstock.pipeline.archive.rollouts_rows import RolloutRows
from penstock.pipeline.archive.rows import to_table


class TopicRows:
    """A reader with a connection of its own, which `close` ends."""

    def __init__(self, log: KafkaLog, run: str) -> None:
        self._run = run
        self._blocks, self._samples = log.blocks(), RolloutRows(run)

    def read(self, kind: Kind, partition: int, *, first: int, end: int) -> Iterator[tuple[pa.Table, int]]:
        """(rows, the offset after them) from `first` on and below `end`; raises `LogError` when the broker refuses or falls silent."""
        for block in self._blocks.read(kind.kafka_name(self._run), partition, first=first, end=end):
            yield self._rows(kind, block), int(block.offsets[-1]) + 1

    def _rows(self, kind: Kind, block: Block) -> pa.Table:
        if kind.name == "rollouts":
            return self._samples.table(block)
        records = block.records()
        if kind.name == "runs":  # the register of all runs; a record without a value only removes one
            records = [record for record in records if record.key == self._run.encode() and record.value]
        return to_table(kind, records, run=self._run)

    def close(self) -> None:
        """Hang up."""
        self._blocks.close()
