"""The short ASCII headers that decide the routing, before any payload is decoded.

Values that the payload repeats must match the headers. No header but `run` and `schema` is used before the checksum is verified: a number
with one flipped bit would look valid."""

import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.topics.wire.checked import is_name
from penstock.topics.wire.columns import Payload
from penstock.topics.wire.errors import Kind, NewerSchema, Unusable
from penstock.topics.wire.record import RawHeaders

CHECKSUM = "crc32"
"""Name of the header with the CRC-32, in 8 lower-case hex digits, of the payload followed by the other headers as `\\nname=value`."""

MAX_HEADER_BYTES = 1024
"""Limit of one header's value; longer values belong in a payload."""

_INT64_MAX = 2**63 - 1
_NUMBER = re.compile("0|[1-9][0-9]{0,18}")
_PAIR = re.compile("(0|[1-9][0-9]{0,17}):(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"-?(?:[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?|inf|nan)")
_SHOWN = 60
Fact = str | int | float | tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Headers:
    """The headers of a record; `None` means that a header is absent."""

    run: str
    """Run id."""
    schema: str
    """Schema of the payload, such as `rollouts/1`."""
    group: int | None = None
    """Group number."""
    sample: int | None = None
    """Number of the sample in its group."""
    policy_version_min: int | None = None
    """Oldest policy version of the trained tokens; of a prompt or call, the oldest it may be sampled from."""
    policy_version_max: int | None = None
    """Newest policy version of any token."""
    outcome: str | None = None
    """Outcome of a group, finish of a sample or reply, kind of an entry or measurement, status of a run."""
    worker: str | None = None
    """The writer; of an owner, the id of the single writer."""
    attempt: int | None = None
    """1 for a prompt whose row is retried; for a call, the number of earlier attempts."""
    part: int | None = None
    """Index of the part of a group, or of the chunk of a version."""
    parts: int | None = None
    """Number of parts of the group."""
    samples: int | None = None
    """Number of samples."""
    tokens: int | None = None
    """Tokens that the policy generated; of a call, its context."""
    reward_mean: float | None = None
    """Mean over the samples that have a reward."""
    sha256: str | None = None
    """SHA-256 (hex) of the payloads of a group's parts, or of the context of a call or reply: its ids as little-endian int32."""
    sample_tokens: tuple[tuple[int, int], ...] | None = None
    """`NUMBER:TOKENS` of each sample of a `rollouts/2` record, such as `0:512,3:498`."""
    turn: int | None = None
    """Index of the policy's turn in its trajectory, from 0."""
    no_reward: int | None = None
    """Number of samples of a group without a reward."""

    def encode(self, value: Payload) -> RawHeaders:
        """Return names and ASCII values as sent, with the checksum of headers and `value`; absent headers are omitted.

        Example:
            Headers(run="r", schema="rollouts/1", group=3).encode(b"")
            # -> (("run", b"r"), ("schema", b"rollouts/1"), ("group", b"3"), ("crc32", b"76398ec4"))
        """
        facts = [(name, getattr(self, field)) for field, name in _WIRE]
        texts = [(name, _spelled(fact)) for name, fact in facts if fact is not None]
        lines = [part for name, text in texts for part in (_LINE[name], text)]
        return (*texts, (CHECKSUM, _checksum(lines, value)))


_FIELDS = tuple(Headers.__dataclass_fields__)
_WIRE = tuple((field, field.replace("_", "-")) for field in _FIELDS)
_LINE = {name: b"\n%b=" % name.encode() for _, name in _WIRE}
_PUT = tuple((name, getattr(Headers, field).__set__) for field, name in _WIRE)


_VERSIONED = re.compile(rb"([a-z-]+)/([0-9]{1,4})")


def read_headers(raw: RawHeaders, value: Payload, *, run: str, schema: str, required: Iterable[str] = ()) -> Headers:
    """Check the headers of a record against `run`, `schema` and its payload, and return them; `required` lists further wire names.

    Unknown headers are ignored. Raises `Unusable`, kinds missing-header, bad-header, foreign-run, schema-version, checksum; a record of
    another run or version is refused before its other headers are read. Raises `NewerSchema` for a valid record of a newer version.
    """
    values: dict[str, bytes] = {}
    lines: list[bytes] = []
    checksum: bytes | None = None
    for name, text in raw:
        line = _LINE.get(name)
        if line is not None and name not in values:
            values[name] = text
            lines += (line, text)
        elif line is not None or (name == CHECKSUM and checksum is not None):
            raise Unusable(f"header {name!r} occurs twice", kind="bad-header")
        elif name == CHECKSUM:
            checksum = text
    _identify(values, "run", expected=run, kind="foreign-run")
    if newer := _is_newer(values.get("schema") or b"", than=schema):
        _verify(checksum, lines, value)  # a damaged header may name any version
        raise NewerSchema(f"a record has schema {newer}, and this release reads up to {schema}: install the newer release here too")
    _identify(values, "schema", expected=schema, kind="schema-version")
    _verify(checksum, lines, value)
    for name in required:
        if name not in values:
            raise Unusable(f"header {name!r} is missing", kind="missing-header")
    facts = {name: _PARSERS.get(name, _number)(name, text) for name, text in values.items()}
    headers = object.__new__(Headers)  # a frozen dataclass's constructor takes as long as everything above
    for name, put in _PUT:
        put(headers, facts.get(name))
    return headers


def match(headers: Headers, **facts: Fact | None) -> None:
    """Raise `Unusable(kind="mismatch")` unless each present header equals the value in `facts`, by field, that the payload has for it."""
    for field, truth in facts.items():
        claim = getattr(headers, field)
        if claim is not None and claim != truth and repr(claim) != repr(truth):  # NaN differs from itself, its text does not
            raise Unusable(f"header {field.replace('_', '-')!r} is {claim!r}, the payload has {truth!r}", kind="mismatch")


def one_of(headers: Headers, *, outcomes: Iterable[str]) -> Headers:
    """Return the headers. Raises `Unusable(kind="bad-header")` if the header `outcome` is not in `outcomes`."""
    if headers.outcome is not None and headers.outcome not in outcomes:
        raise Unusable(f"header 'outcome' is {headers.outcome[:_SHOWN]!r}, expected one of {', '.join(outcomes)}", kind="bad-header")
    return headers


def _is_newer(schema: bytes, *, than: str) -> str:
    """Return the schema as text if it is a newer version of `than`, such as "rollouts/3" of "rollouts/2"; else ""."""
    topic, _, number = than.rpartition("/")
    match = _VERSIONED.fullmatch(schema)
    return schema.decode() if match and match[1] == topic.encode() and int(match[2]) > int(number) else ""


def _identify(values: dict[str, bytes], name: str, *, expected: str, kind: Kind) -> None:
    """Raise `Unusable` if the header `name` is missing, or, with `kind`, if its value is not `expected`."""
    if name not in values:
        raise Unusable(f"header {name!r} is missing", kind="missing-header")
    if values[name] == expected.encode():
        return
    if (text := _text(name, values[name])) != expected:
        raise Unusable(f"header {name!r} is {text[:_SHOWN]!r}, expected {expected!r}", kind=kind)


def _verify(checksum: bytes | None, lines: list[bytes], value: Payload) -> None:
    """Raise `Unusable` unless the checksum matches headers and payload."""
    if checksum is None:
        raise Unusable(f"header {CHECKSUM!r} is missing", kind="missing-header")
    try:
        computed = _checksum(lines, value)
    except TypeError as error:
        raise Unusable("a header has no value", kind="bad-header") from error
    if checksum != computed:
        raise Unusable(f"header {CHECKSUM!r} is {checksum[:_SHOWN]!r}, headers and payload have checksum {computed!r}", kind="checksum")


def _checksum(lines: list[bytes], value: Payload) -> bytes:
    return b"%08x" % zlib.crc32(b"".join(lines), zlib.crc32(value))


def _spelled(fact: Fact) -> bytes:
    """Return a header's value as ASCII bytes; a float as its shortest exact text."""
    text = ",".join(f"{number}:{tokens}" for number, tokens in fact) if isinstance(fact, tuple) else str(fact)
    return text.encode("ascii")


def _number(name: str, value: bytes) -> int:
    text = _text(name, value)
    if _NUMBER.fullmatch(text) and (number := int(text)) <= _INT64_MAX:
        return number
    raise Unusable(f"header {name!r} is not a number: {text[:_SHOWN]!r}", kind="bad-header")


def _float(name: str, value: bytes) -> float:
    text = _text(name, value)
    if _FLOAT.fullmatch(text):
        return float(text)
    raise Unusable(f"header {name!r} is not a number: {text[:_SHOWN]!r}", kind="bad-header")


def _name(name: str, value: bytes) -> str:
    text = _text(name, value)
    if not is_name(text):
        raise Unusable(f"header {name!r} is not a valid name: {text[:_SHOWN]!r}", kind="bad-header")
    return text


def _pairs(name: str, value: bytes) -> tuple[tuple[int, int], ...]:
    pairs = [_PAIR.fullmatch(pair) for pair in _text(name, value).split(",")]
    if not all(pairs):
        raise Unusable(f"header {name!r} is not a list of NUMBER:TOKENS: {value[:_SHOWN]!r}", kind="bad-header")
    return tuple((int(pair[1]), int(pair[2])) for pair in pairs if pair)


def _text(name: str, value: bytes) -> str:
    """Return a header's value as text. Raises `Unusable` if it is null, too long or not ASCII."""
    if not isinstance(value, bytes):
        raise Unusable(f"header {name!r} has no value", kind="bad-header")
    if len(value) > MAX_HEADER_BYTES:
        raise Unusable(f"header {name!r} has {len(value)} bytes, limit {MAX_HEADER_BYTES}", kind="bad-header")
    if not value.isascii():
        raise Unusable(f"header {name!r} is not ASCII: {value[:_SHOWN]!r}", kind="bad-header")
    return value.decode("ascii")


_PARSERS: dict[str, Callable[[str, bytes], Fact]] = {
    **dict.fromkeys(("run", "schema", "outcome", "sha256"), _text),
    "worker": _name,
    "reward-mean": _float,
    "sample-tokens": _pairs,
}
"""Parsers of header values by header name; all other headers are integers."""
