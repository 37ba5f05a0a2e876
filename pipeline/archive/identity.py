"""A run's records under another run id: headers, keys, and the payloads that name the run.

The rule: a checksum that held holds afterwards, one that did not is left as it is.
"""

import zlib
from dataclasses import dataclass, replace

from penstock.pipeline.archive.layout import Kind
from penstock.topics import dead_letters, runs
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.headers import CHECKSUM, Headers
from penstock.topics.wire.record import RawHeaders, Record

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
    found = checksum(headers, value)
    return tuple((name, found if name == CHECKSUM else text) for name, text in headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose records they were and whose they become."""

    run: str
    becomes: str

    def apply(self, kind: Kind, record: Record) -> Record:
        """A record under the new id."""
        if self.run == self.becomes:
            return record
        value, key = self._payload(kind, record.value), self._key(kind, record.key)
        headers = self._headers(record.headers)
        if (CHECKSUM, checksum(record.headers, record.value)) in record.headers:
            headers = signed(headers, value)
        return replace(record, topic=self._topic(record.topic), key=key, headers=headers, value=value)

    def _topic(self, name: str) -> str:
        return f"{self.becomes}{name.removeprefix(self.run)}" if name.startswith(f"{self.run}.") else name

    def _headers(self, headers: RawHeaders) -> RawHeaders:
        ours = ("run", self.run.encode())
        return tuple((name, self.becomes.encode() if (name, text) == ours else text) for name, text in headers)

    def _key(self, kind: Kind, key: bytes | None) -> bytes | None:
        if kind.name == "runs":
            return self.becomes.encode()
        if kind.name == "dead-letters" and key is not None:
            return self._topic(key.decode("latin-1")).encode("latin-1")
        return key

    def _payload(self, kind: Kind, value: bytes) -> bytes:
        try:
            if kind.name == "runs":
                return runs.encode(replace(runs.decode(value), run=self.becomes))
            if kind.name == "dead-letters":
                letter = dead_letters.decode(value)
                headers = self._headers(letter.headers)
                if (CHECKSUM, checksum(letter.headers, letter.value)) in letter.headers:
                    headers = signed(headers, letter.value)
                return dead_letters.encode(replace(letter, topic=self._topic(letter.topic), headers=headers))
        except Unusable:
            pass  # nobody can read it: nobody is told of a run by it
        return value
