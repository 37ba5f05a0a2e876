"""Rewrites offsets and the run id in records that are imported to new topics. Valid checksums are recomputed, invalid ones copied."""

import re
import zlib
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from penstock.pipeline.archive.layout import Kind, kind_of
from penstock.pipeline.scheduling.resume_point import without_resume_point
from penstock.topics import dead_letters, ledger, runs, weights
from penstock.topics.catalogue import TOPICS
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.headers import CHECKSUM, Headers
from penstock.topics.wire.record import RawHeaders, Record

GONE = -1
"""New offset of a record that is not in the archive. Readers treat such a record as deleted by retention."""

_RECORD_ID = re.compile(rb"(.+)/(\d{1,9})/(\d{1,18})")
"""Key of a dead letter: topic, partition and offset of its record."""
_COVERED = frozenset(name.replace("_", "-") for name in Headers.__dataclass_fields__)


def checksum(headers: RawHeaders, value: bytes) -> bytes:
    """Return the value of a record's header `crc32`: 8 hexadecimal digits."""
    lines = b"".join(b"\n%b=%b" % (name.encode(), text or b"") for name, text in headers if name in _COVERED)
    return b"%08x" % zlib.crc32(lines, zlib.crc32(value))


def signed(headers: RawHeaders, value: bytes) -> RawHeaders:
    recomputed = checksum(headers, value)
    return tuple((name, recomputed if name == CHECKSUM else text) for name, text in headers)


class Relocation:
    """Rewrites the records of run `run` for the topics of run `becomes`, where each partition starts at offset 0."""

    def __init__(self, run: str, becomes: str) -> None:
        self.run, self.becomes = run, becomes
        self._offsets: defaultdict[tuple[str, int], array[int]] = defaultdict(lambda: array("q"))
        """(topic, partition) -> ascending old offsets; the index of an old offset is the new offset."""
        self._digests: dict[str | None, str] = {}
        """Digest of a ledger entry -> digest of the rewritten entry."""
        self._rewrites: dict[str, Callable[[bytes], bytes]] = {
            **dict.fromkeys(("runs", "run"), lambda value: runs.encode(replace(runs.decode(value), run=becomes))),
            "weights": self._manifest,
            "ledger": self._entry,
            "dead-letters": self._dead_letter,
        }

    def note(self, kind: Kind, record: Record) -> None:
        """Assign the next new offset of the record's partition. Call this for each record in offset order."""
        self._offsets[kind.topic, record.partition].append(record.offset)

    def offset(self, topic: str, partition: int, old: int) -> int:
        """Return the new offset of the record at offset `old`; `GONE` if `note` was not called for it."""
        offsets = self._offsets.get((topic, partition), ())
        index = bisect_left(offsets, old)
        return index if index < len(offsets) and offsets[index] == old else GONE

    def apply(self, kind: Kind, record: Record) -> Record:
        """Return the record as rewritten for the new topics. Call `note` for all records that it refers to first."""
        value, headers = self._payload(kind, record.value), self._headers(record.headers)
        if (CHECKSUM, checksum(record.headers, record.value)) in record.headers:
            headers = signed(headers, value)
        return replace(record, topic=self._topic(record.topic), key=self._key(kind, record.key), headers=headers, value=value)

    def _topic(self, name: str) -> str:
        return f"{self.becomes}{name.removeprefix(self.run)}" if name.startswith(f"{self.run}.") else name

    def _headers(self, headers: RawHeaders) -> RawHeaders:
        ours = ("run", self.run.encode())
        return tuple((name, self.becomes.encode() if (name, text) == ours else text) for name, text in headers)

    def _key(self, kind: Kind, key: bytes | None) -> bytes | None:
        if kind.name in ("runs", "run"):
            return self.becomes.encode()
        if kind.name == "dead-letters" and (match := _RECORD_ID.fullmatch(key or b"")):
            topic, partition, old = match[1].decode("latin-1"), int(match[2]), int(match[3])
            offset = self.offset(topic.removeprefix(f"{self.run}."), partition, old)
            return f"{self._topic(topic)}/{partition}/{offset}".encode("latin-1")
        return key

    def _payload(self, kind: Kind, value: bytes) -> bytes:
        rewrite = self._rewrites.get(kind.name)
        try:
            return value if rewrite is None else rewrite(value)
        except Unusable:
            return value  # unreadable, so without references

    def _manifest(self, value: bytes) -> bytes:
        manifest = weights.decode(value)
        chunks = zip(manifest.chunk_partitions, manifest.chunk_offsets, strict=True)
        offsets = tuple(self.offset("weights", partition, old) for partition, old in chunks)
        return weights.encode(replace(manifest, chunk_offsets=offsets))

    def _entry(self, value: bytes) -> bytes:
        """Rewrite a ledger entry: new offsets and chained digests, no resume point. A digest that matches no earlier entry is copied."""
        entry = ledger.decode(value)
        details = without_resume_point(entry.details)
        plan = tuple(replace(planned, offset=self.offset("groups", planned.partition, planned.offset)) for planned in entry.plan)
        previous = self._digests.get(entry.previous, entry.previous)
        new = replace(entry, plan=plan, previous=previous, details=details)
        relocated = value if new == entry else ledger.encode(new)
        self._digests[ledger.digest(value)] = ledger.digest(relocated)
        return relocated

    def _dead_letter(self, value: bytes) -> bytes:
        """Rewrite a dead letter, including the record that it contains."""
        dead_letter = dead_letters.decode(value)
        topic = dead_letter.topic.removeprefix(f"{self.run}.")
        record = dead_letters.to_record(dead_letter)
        if topic in TOPICS:
            record = self.apply(kind_of(topic, dead_letter.partition), record)
        offset = self.offset(topic, dead_letter.partition, dead_letter.offset)
        return dead_letters.encode(
            replace(dead_letter, topic=record.topic, offset=offset, key=record.key, headers=record.headers, value=record.value)
        )
