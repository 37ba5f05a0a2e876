"""A run's records at other offsets, and under another run id: what they say of offsets and of the run is rewritten.

The rule: a checksum that held holds afterwards, one that did not is left as it is.
"""

import re
import zlib
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from penstock.pipeline.archive.layout import Kind, kind_of
from penstock.topics import dead_letters, ledger, runs, weights
from penstock.topics.catalogue import TOPICS
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.headers import CHECKSUM, Headers
from penstock.topics.wire.record import RawHeaders, Record

GONE = -1
"""Stands for the offset of a record that the archive does not hold; readers take it for one that retention has deleted."""

_PLACE = re.compile(rb"(.+)/(\d{1,9})/(\d{1,18})")
"""The key of a dead letter: where the record stood."""
_COVERED = frozenset(name.replace("_", "-") for name in Headers.__dataclass_fields__)


def checksum(headers: RawHeaders, value: bytes) -> bytes:
    """What the header `crc32` of a record has to say.

    Example:
        checksum((("run", b"r"), ("schema", b"rollouts/1"), ("group", b"3")), b"")  # -> b"76398ec4"
    """
    lines = b"".join(b"\n%b=%b" % (name.encode(), text or b"") for name, text in headers if name in _COVERED)
    return b"%08x" % zlib.crc32(lines, zlib.crc32(value))


def signed(headers: RawHeaders, value: bytes) -> RawHeaders:
    """The same headers with the checksum that fits them and the payload."""
    fitting = checksum(headers, value)
    return tuple((name, fitting if name == CHECKSUM else text) for name, text in headers)


class Relocation:
    """Rewrites the records of one run for new topics, each of which gets its records in order from offset 0."""

    def __init__(self, run: str, becomes: str) -> None:
        self.run, self.becomes = run, becomes
        self._offsets: defaultdict[tuple[str, int], array[int]] = defaultdict(lambda: array("q"))
        """(plain topic, partition) -> the old offsets, ascending; the index of each is its new offset."""
        self._rewrites: dict[str, Callable[[bytes], bytes]] = {
            **dict.fromkeys(("runs", "run"), lambda value: runs.encode(replace(runs.decode(value), run=becomes))),
            "weights": self._manifest,
            "ledger": self._entry,
            "dead-letters": self._letter,
        }

    def note(self, kind: Kind, record: Record) -> None:
        """The record is the next one of its partition."""
        self._offsets[kind.topic, record.partition].append(record.offset)

    def offset(self, topic: str, partition: int, old: int) -> int:
        """The new offset of a record that was noted; `GONE` for any other."""
        offsets = self._offsets.get((topic, partition), ())
        index = bisect_left(offsets, old)
        return index if index < len(offsets) and offsets[index] == old else GONE

    def apply(self, kind: Kind, record: Record) -> Record:
        """The record as it has to be in the new topics; what it refers to was noted before."""
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
        if kind.name == "dead-letters" and (place := _PLACE.fullmatch(key or b"")):
            topic, partition, old = place[1].decode("latin-1"), int(place[2]), int(place[3])
            offset = self.offset(topic.removeprefix(f"{self.run}."), partition, old)
            return f"{self._topic(topic)}/{partition}/{offset}".encode("latin-1")
        return key

    def _payload(self, kind: Kind, value: bytes) -> bytes:
        rewrite = self._rewrites.get(kind.name)
        try:
            return value if rewrite is None else rewrite(value)
        except Unusable:
            return value  # nobody can read it, so it refers to nothing

    def _manifest(self, value: bytes) -> bytes:
        manifest = weights.decode(value)
        places = zip(manifest.chunk_partitions, manifest.chunk_offsets, strict=True)
        offsets = tuple(self.offset("weights", partition, old) for partition, old in places)
        return weights.encode(replace(manifest, chunk_offsets=offsets))

    def _entry(self, value: bytes) -> bytes:
        entry = ledger.decode(value)
        plan = tuple(replace(planned, offset=self.offset("groups", planned.partition, planned.offset)) for planned in entry.plan)
        return ledger.encode(replace(entry, plan=plan)) if plan else value

    def _letter(self, value: bytes) -> bytes:
        """The record it carries is rewritten as that record itself was."""
        letter = dead_letters.decode(value)
        topic = letter.topic.removeprefix(f"{self.run}.")
        record = Record(
            topic=letter.topic,
            partition=letter.partition,
            offset=letter.offset,
            timestamp_ms=letter.timestamp_ms,
            key=letter.key,
            headers=letter.headers,
            value=letter.value,
        )
        if topic in TOPICS:
            record = self.apply(kind_of(topic, letter.partition), record)
        offset = self.offset(topic, letter.partition, letter.offset)
        return dead_letters.encode(
            replace(letter, topic=record.topic, offset=offset, key=record.key, headers=record.headers, value=record.value)
        )
