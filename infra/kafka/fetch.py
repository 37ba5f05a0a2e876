"""Reading a partition from one offset to another as fast as the broker sends it: answers are received whole, none is made objects of.

The rule: committed records only, in order, between two offsets; the next answer is asked for while this one is worked on.
"""

import socket
import struct
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from kafka import KafkaConsumer, errors
from kafka.record.default_records import DefaultRecordBatch

from penstock.infra.errors import LogError, LogUnreachable
from penstock.infra.kafka import errors as edge
from penstock.infra.kafka import settings
from penstock.infra.kafka.blocks import Batch, Block, parse
from penstock.infra.kafka.client_repairs import private_api
from penstock.infra.kafka.settings import Connection

ANSWER_BYTES = 8 << 20
"""Of records in an answer, unless one batch alone is larger."""
ANSWER_S = 15.0
SILENT_S = 60.0
"""A broker that sends nothing for so long, although there is more to read, is given up."""
AGAIN_S = 0.2
_WAIT_MS = 500
_AROUND = 64 << 10
"""[bytes] room for what an answer says beside its records."""

_FETCH, _VERSION = 1, 11
"""The request, and its last version that names topics; Kafka 2.3 and later know it."""
_HEAD = struct.Struct(">iihii")
_PARTITION = struct.Struct(">iihqqqi")
_ABORTED = struct.Struct(">qq")
_BATCH = DefaultRecordBatch.HEADER_STRUCT
_UNCOUNTED = DefaultRecordBatch.AFTER_LEN_OFFSET
"""Bytes of a batch that its own length does not count."""


class _Answer(NamedTuple):
    """Where the batches stand in it, and the aborted transactions they may be of, as (first offset, producer)."""

    begin: int
    end: int
    aborted: list[tuple[int, int]]


class BlockReader:
    """A connection of its own, made at the first read; one partition at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._client: Any = None
        self._socket: socket.socket | None = None
        self._asked = False
        self._buffer = bytearray(ANSWER_BYTES + _AROUND)

    def read(self, topic: str, partition: int, *, first: int, end: int) -> Iterator[Block]:
        """The records from `first` on and below `end`, in blocks that are each valid until the next one is asked for.

        Raises `LogError` where the broker refuses, or sends nothing for `SILENT_S`.
        """
        place, position, heard = f"{topic}/{partition}", first, time.monotonic()
        self._let_go()
        while position < end:
            began = position
            try:
                if self._socket is None:
                    self._call(topic, partition)
                if not self._asked:
                    self._ask(topic, partition, position)
                size = self._receive()
                answer = _answer(self._buffer, size)
            except (*edge.AWAY, errors.RetriableError, LogUnreachable, OSError) as error:
                self.close()
                _wait(heard, place, position, edge.one_line(error))
                continue
            except errors.KafkaError as error:
                raise edge.translate(error, f"{place} cannot be read at offset {position}") from error
            batches, position = _committed(self._buffer, answer, place, position)
            if position == began:
                _wait(heard, place, position, "is the broker running?")
                continue
            if position < end:
                self._ask_ahead(topic, partition, position)
            if batches:
                block = parse(topic, partition, *_uncompressed(self._buffer, batches, place)).between(began, end)
                if len(block):
                    yield block
            heard = time.monotonic()

    def close(self) -> None:
        """Hang up."""
        client, self._client, self._socket, self._asked = self._client, None, None, False
        if client is not None:
            client._client.close()

    def _let_go(self) -> None:
        """Give the connection back to the client: the next partition may have another leader."""
        if self._asked:  # a reader before did not go to its end
            self.close()
        if self._socket is not None:
            self._socket.setblocking(False)
            self._socket = None

    def _call(self, topic: str, partition: int) -> None:
        if self._client is None:
            self._client = edge.make(KafkaConsumer, self._connection, settings.consumer(self._connection, group=None, committed=True))
        self._socket = private_api.leader_socket(self._client, topic, partition, ANSWER_S)

    def _ask(self, topic: str, partition: int, offset: int) -> None:
        name, client_id = topic.encode(), self._connection.client_id.encode()
        head = struct.pack(f">hhih{len(client_id)}s", _FETCH, _VERSION, 0, len(client_id), client_id)
        # No replica, no session, no epochs, no rack; isolation level 1 is that of committed records.
        limits = struct.pack(">iiiibii", -1, _WAIT_MS, 1, ANSWER_BYTES, 1, 0, -1)
        what = struct.pack(f">ih{len(name)}siiiqqi", 1, len(name), name, 1, partition, -1, offset, -1, ANSWER_BYTES)
        request = head + limits + what + struct.pack(">ih", 0, 0)
        assert self._socket is not None
        self._asked = True
        self._socket.sendall(struct.pack(">i", len(request)) + request)

    def _ask_ahead(self, topic: str, partition: int, offset: int) -> None:
        try:
            self._ask(topic, partition, offset)
        except OSError:  # what has come is good, and the next turn calls again
            self.close()

    def _receive(self) -> int:
        """The size of the answer, which stands at the beginning of the buffer."""
        self._fill(4)
        (size,) = struct.unpack_from(">i", self._buffer)
        if size > len(self._buffer):
            self._buffer = bytearray(size)  # a block may still hold the old one
        self._fill(size)
        self._asked = False
        return int(size)

    def _fill(self, size: int) -> None:
        assert self._socket is not None
        view, have = memoryview(self._buffer), 0
        while have < size:
            if not (got := self._socket.recv_into(view[have:], size - have)):
                raise errors.KafkaConnectionError("the broker has hung up")
            have += got


def _wait(since: float, place: str, offset: int, reason: str) -> None:
    if time.monotonic() - since > SILENT_S:
        raise LogError(f"{place}: nothing came for {SILENT_S:g} s from offset {offset} on: {reason}")
    time.sleep(AGAIN_S)


def _answer(buffer: bytearray, size: int) -> _Answer:
    """What stands in an answer to a request for one partition; raises the client library's errors."""
    _, _, error, _, topics = _HEAD.unpack_from(buffer)
    if error or not topics:
        raise errors.for_code(error or -1)
    (name,) = struct.unpack_from(">h", buffer, _HEAD.size)
    at = _HEAD.size + 2 + name
    _, _, error, _, _, _, count = _PARTITION.unpack_from(buffer, at)
    if error:
        raise errors.for_code(error)
    at += _PARTITION.size
    aborted = [_ABORTED.unpack_from(buffer, at + index * _ABORTED.size) for index in range(count)]
    at += max(count, 0) * _ABORTED.size
    _, length = struct.unpack_from(">ii", buffer, at)
    assert at + 8 + max(length, 0) <= size, "an answer is shorter than it says"
    return _Answer(at + 8, at + 8 + length, sorted((first, producer) for producer, first in aborted))


def _committed(buffer: bytearray, answer: _Answer, place: str, offset: int) -> tuple[list[Batch], int]:
    """The batches that are neither marks nor of aborted transactions, compressed ones as they are, and the offset after all of them."""
    found: list[Batch] = []
    at, aborted, skipped = answer.begin, list(answer.aborted), set[int]()
    while at + _BATCH.size <= answer.end:
        base, length, _, magic, _, kind, last, first_ms, newest_ms, producer, _, _, count = _BATCH.unpack_from(buffer, at)
        end = at + _UNCOUNTED + length
        if end > answer.end:  # cut off by the limit of an answer
            break
        if magic != 2:
            raise LogError(f"{place} has records in message format {magic}, older than Kafka 0.11")
        if kind & DefaultRecordBatch.TRANSACTIONAL_MASK:
            while aborted and aborted[0][0] <= base + last:
                skipped.add(aborted.pop(0)[1])
        if kind & DefaultRecordBatch.CONTROL_MASK:
            skipped.discard(producer)  # the mark ends its transaction
        elif not (kind & DefaultRecordBatch.TRANSACTIONAL_MASK and producer in skipped):
            time_ms = newest_ms if kind & DefaultRecordBatch.TIMESTAMP_TYPE_MASK else None
            compressed = bool(kind & DefaultRecordBatch.CODEC_MASK)
            found.append(Batch(at + _BATCH.size, end, count, base, first_ms, time_ms, compressed))
        at, offset = end, max(offset, base + last + 1)
    return found, offset


def _uncompressed(buffer: bytearray, batches: list[Batch], place: str) -> tuple[bytes | bytearray, list[Batch]]:
    """Data with the same batches, none of them compressed; as a rule that is so already."""
    if not any(batch.compressed for batch in batches):
        return buffer, batches
    data, found = bytearray(), []
    for batch in batches:
        start, whole = len(data), bytes(memoryview(buffer)[batch.start - _BATCH.size : batch.end])
        try:
            data += private_api.uncompressed(whole)
        except errors.KafkaError as error:
            raise edge.translate(error, f"{place} cannot be read at offset {batch.base_offset}") from error
        found.append(batch._replace(start=start, end=len(data), compressed=False))
    return data, found
