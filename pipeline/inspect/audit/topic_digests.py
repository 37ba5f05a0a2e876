"""Digests of a run's topics, partition by partition, for a statement that names them."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from penstock.topics.catalogue import TOPICS
from penstock.topics.wire.record import Record, RecordId


class TopicDigests:
    """SHA-256 over the records of each archived partition: offset, timestamp, key, headers and payload.

    A partition is named TOPIC/NUMBER. With `spans`, first and end offset by partition, only the records in these are digested.
    """

    def __init__(self, spans: Mapping[str, tuple[int, int]] | None = None) -> None:
        self._spans = spans
        self._hashes: dict[str, Any] = {}
        self._seen: dict[str, tuple[int, int, int]] = {}
        """Partition -> its first offset, the offset after its last, and the number of records."""
        self.later = Counter[str]()
        """Partition -> number of records after its span."""

    def add(self, where: RecordId, record: Record) -> None:
        """Digest the next record of its partition."""
        name, offset = f"{where.topic}/{where.partition}", where.offset
        first, end = (0, offset + 1) if self._spans is None else self._spans.get(name, (0, 0))
        if where.topic not in TOPICS or offset < first:
            return
        if offset >= end:
            self.later[name] += 1
            return
        hasher = self._hashes.setdefault(name, hashlib.sha256())
        for label, data in ((f"{offset}@{record.timestamp_ms}", record.key), *record.headers, ("", record.value)):
            hasher.update(f"{len(label)}:{label};{-1 if data is None else len(data)}:".encode("utf-8", "surrogatepass"))
            hasher.update(data or b"")
        start, _, count = self._seen.get(name, (offset, 0, 0))
        self._seen[name] = start, offset + 1, count + 1

    @property
    def ends(self) -> dict[str, int]:
        """Partition -> the offset after its last record."""
        return {name: end for name, (_, end, _) in self._seen.items()}

    def as_table(self) -> dict[str, dict[str, int | str]]:
        """Partition -> `first` and `end` offset, number of `records`, and their `sha256`; without empty partitions."""
        return {
            name: {"first": first, "end": end, "records": count, "sha256": self._hashes[name].hexdigest()}
            for name, (first, end, count) in sorted(self._seen.items())
        }
