"""Ways in which a record may come damaged, each made from a genuine one.

What is `signed` again has a checksum that fits, so that it gets past the check and meets the decoder; the others are as a broken disk,
memory, network or program leaves them.
"""

import random
import zlib
from collections.abc import Callable
from dataclasses import replace

from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import RawHeaders, Record

HUGE = [value.to_bytes(8, "little", signed=True) for value in (-1, 2**31 - 1, 2**40, 2**62, -(2**63), 0)]
SMALL_HUGE = [value.to_bytes(4, "little", signed=True) for value in (-1, 2**31 - 1, 2**30, -(2**31))]
KNOWN = frozenset(name for name, _ in Headers(**dict.fromkeys(Headers.__dataclass_fields__, "0")).encode(b"")) - {"crc32"}  # type: ignore[arg-type]
Mutation = Callable[[Record, Record, random.Random], Record]
"""Of a record and another one; gives the damaged one."""


def flipped(data: bytes, rng: random.Random, *, times: int = 1) -> bytes:
    """`data` with so many bits turned; never as it was."""
    spoiled = bytearray(data)
    for place in rng.sample(range(8 * len(data)), min(times, 8 * len(data))):
        spoiled[place >> 3] ^= 1 << (place & 7)
    return bytes(spoiled)


def signed(record: Record) -> Record:
    """The record with the checksum that its headers and payload ask for, as `docs/reference/topics.md` describes it."""
    plain = tuple((name, text) for name, text in record.headers if name != "crc32")
    lines = b"".join(b"\n" + name.encode() + b"=" + text for name, text in dict(plain).items() if name in KNOWN)
    return replace(record, headers=(*plain, ("crc32", b"%08x" % zlib.crc32(record.value + lines))))


def payload_bits(record: Record, _: Record, rng: random.Random) -> Record:
    return replace(record, value=flipped(record.value, rng, times=rng.choice((1, 1, 2, 8))))


def header_bit(record: Record, _: Record, rng: random.Random) -> Record:
    place = rng.randrange(len(record.headers))
    name, text = record.headers[place]
    return _with(record, place, (name, flipped(text, rng)))


def header_name_bit(record: Record, _: Record, rng: random.Random) -> Record:
    place = rng.randrange(len(record.headers))
    name, text = record.headers[place]
    letter, bit = rng.randrange(len(name)), 1 << rng.randrange(7)
    return _with(record, place, (name[:letter] + chr(ord(name[letter]) ^ bit) + name[letter + 1 :], text))


def header_lost(record: Record, _: Record, rng: random.Random) -> Record:
    place = rng.randrange(len(record.headers))
    return replace(record, headers=record.headers[:place] + record.headers[place + 1 :])


def header_twice(record: Record, other: Record, rng: random.Random) -> Record:
    again = rng.choice(rng.choice((record, other)).headers)
    place = rng.randrange(len(record.headers) + 1)
    names = {name for name, _ in record.headers}
    again = again if again[0] in names else record.headers[0]
    return replace(record, headers=(*record.headers[:place], again, *record.headers[place:]))


def truncated(record: Record, _: Record, rng: random.Random) -> Record:
    return replace(record, value=record.value[: rng.randrange(len(record.value))])


def garbage_behind(record: Record, _: Record, rng: random.Random) -> Record:
    return replace(record, value=record.value + rng.randbytes(rng.choice((1, 8, 100, 5000))))


def garbage_within(record: Record, _: Record, rng: random.Random) -> Record:
    place = rng.randrange(len(record.value))
    return replace(record, value=record.value[:place] + rng.randbytes(rng.randint(1, 16)) + record.value[place:])


def huge_length(record: Record, _: Record, rng: random.Random) -> Record:
    """Lengths, offsets and counts of Arrow's structures lie at multiples of four."""
    size = rng.choice((4, 8))
    place = 4 * rng.randrange(len(record.value) // 4 - 1)
    there = record.value[place : place + size]
    number = rng.choice([one for one in (HUGE if size == 8 else SMALL_HUGE) if one != there])
    return replace(record, value=record.value[:place] + number + record.value[place + size :])


def headers_of_another(record: Record, other: Record, _: random.Random) -> Record:
    return replace(record, headers=other.headers)


def payload_of_another(record: Record, other: Record, _: random.Random) -> Record:
    return replace(record, value=other.value)


def zeros(record: Record, _: Record, rng: random.Random) -> Record:
    return replace(record, value=bytes(rng.choice((0, len(record.value), 100_000))))


DAMAGE: dict[str, Mutation] = {
    "payload bits": payload_bits,
    "header bit": header_bit,
    "header name bit": header_name_bit,
    "header lost": header_lost,
    "header twice": header_twice,
    "payload cut off": truncated,
    "garbage behind": garbage_behind,
    "garbage within": garbage_within,
    "huge length": huge_length,
    "headers of another": headers_of_another,
    "payload of another": payload_of_another,
    "zeros": zeros,
}
"""No reader may believe a record that went through one of these."""


def exact_copy(record: Record, _: Record, __: random.Random) -> Record:
    return record


def other_key(record: Record, _: Record, rng: random.Random) -> Record:
    return replace(record, key=rng.randbytes(6))


def foreign_header(record: Record, _: Record, rng: random.Random) -> Record:
    return replace(record, headers=(("traceparent", rng.randbytes(8)), *record.headers))


HARMLESS: dict[str, Mutation] = {"exact copy": exact_copy, "another key": other_key, "foreign header": foreign_header}
"""These say what the genuine record says."""


def _with(record: Record, place: int, header: tuple[str, bytes]) -> Record:
    headers: RawHeaders = (*record.headers[:place], header, *record.headers[place + 1 :])
    return replace(record, headers=headers)
