"""Repairs of faults in kafka-python's connections and in the decoding of responses; `faults.py` applies them."""

import ssl
import zlib
from typing import Any

from kafka import errors
from kafka.future import Future
from kafka.net import manager as net_manager
from kafka.net import transport
from kafka.record import default_records

_INFLATED_AT_MOST = 64 << 20
_RECEIVED_AT_ONCE = 1 << 20


def responses_are_read_in_large_pieces() -> None:
    """A response is read 4 KiB at a time: with samples of 2,000 tokens a run loses a tenth of its speed.

    Data that arrive together with the end of the connection are lost, such as the reason why a broker refuses a password.
    Repro: small_reads. Report: "Receiving 4 KiB per recv() makes large fetches slow".
    """

    def receive(self: Any) -> tuple[bytes, Exception | None]:
        pieces = []
        error = None
        while True:
            try:
                piece = self._sock.recv(_RECEIVED_AT_ONCE)
            except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            except Exception as cause:
                error = errors.KafkaConnectionError(cause)
                break
            if not piece:
                error = errors.KafkaConnectionError("socket disconnected")
                break
            pieces.append(piece)
        # Return the data first: the next call meets the end of the connection again.
        return b"".join(pieces), None if pieces else error

    transport.KafkaTCPTransport._sock_recv = receive
    transport.KafkaSSLTransport._sock_recv = receive


def sending_over_tls_copies_nothing() -> None:
    """Over TLS each 16 KiB sent copy the rest of the request: 8 MiB copy 2 GiB, and a producer reaches about 20 MB/s.

    Repro: tls_copies. Report: "KafkaSSLTransport._sock_send slices bytes, KafkaTCPTransport._sock_send a memoryview".
    """
    secure: Any = transport.KafkaSSLTransport
    stock = secure._sock_send

    def _sock_send(self: Any) -> Any:
        waiting = self._write_buffer
        for index, data in enumerate(waiting):
            waiting[index] = memoryview(data)
        return stock(self)

    secure._sock_send = _sock_send


def inflating_has_a_limit() -> None:
    """A compressed batch of 16 MiB may inflate to 16 GiB in its reader's memory before the first record is returned.

    Our own records are never compressed. Repro: inflated_batch. Report: "_maybe_uncompress() has no limit on the size of its result".
    """

    def gzip_decode(data: Any) -> bytes:
        inflating = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        inflated = inflating.decompress(data, _INFLATED_AT_MOST)
        if not inflating.eof:
            raise errors.CorruptRecordError(f"a batch inflates to more than {_INFLATED_AT_MOST} bytes, or is cut off")
        return inflated

    default_records.gzip_decode = gzip_decode


def a_request_to_an_unlisted_broker_fails() -> None:
    """A fetch from a leader that the metadata do not list raises after it was marked as in flight: the reader skips that broker for good.

    Metadata name a leader without its address while a broker joins or leaves. Repro: unlisted_leader. Report: "send() raises
    UnknownBrokerIdError instead of failing its future, and the fetcher skips that node for good".
    """
    manager: Any = net_manager.KafkaConnectionManager
    stock = manager.send

    def send(self: Any, request: Any, node_id: Any = None, request_timeout_ms: float | None = None) -> Any:
        try:
            return stock(self, request, node_id, request_timeout_ms)
        except errors.UnknownBrokerIdError as error:
            self.cluster.request_update()
            return Future().failure(error)

    manager.send = send
