"""Repairs of faults in kafka-python, each with the symptom, a repro and the title of its upstream report.

A repair replaces only the source it was written for. If the installed client has another source, `apply` refuses to start and names the
function, until a developer has run the repro (`python -m tests.support.stock_faults FAULT stock BOOTSTRAP TOPIC`) and added the new
digest: to `SOURCES` if the repair still fits, to `FIXED` if the fault is repaired upstream. When these repairs were written, no report of
any of the faults in kafka-python 3 was open.
"""

import hashlib
import importlib
import inspect
import os
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import kafka
import kafka.coordinator.base as coordinator_base
import kafka.coordinator.consumer as coordinator_consumer
from kafka import errors
from kafka.future import Future
from kafka.net import manager as net_manager
from kafka.net import transport
from kafka.producer import transaction_manager
from kafka.record import default_records
from kafka.record import util as record_util

from penstock.infra.errors import Unrecoverable

SWITCH = "PENSTOCK_KAFKA_CLIENT"
"""Environment variable: `repaired`, the default, or `stock` for the unchanged client library."""


_lock = threading.Lock()
_applied: list[str] = []


def source_digest(name: str) -> str | None:
    """Return the SHA-256 of the source of `module:Class.function`; None if there is no such function."""
    module, _, path = name.partition(":")
    try:
        target: Any = importlib.import_module(module)
        for part in path.split("."):
            target = getattr(target, part)
        return hashlib.sha256(inspect.getsource(target).encode()).hexdigest()
    except (ImportError, AttributeError, OSError):
        return None


def is_needed(repair: Callable[[], None], replaced: Sequence[str]) -> bool:
    """True if the installed client has the fault. Raises `Unrecoverable` if `repair` was written for another source."""
    for name in replaced:
        digest = source_digest(name)
        if digest in FIXED.get(repair.__name__, ()):
            return False
        if digest not in SOURCES[name]:
            raise Unrecoverable(
                f"{name.partition(':')[2]} of kafka-python {kafka.__version__} (source {str(digest)[:12]}) is not the one that the patch "
                f"{repair.__name__} was written for: install kafka-python==3.0.12, or set {SWITCH}=stock to run without patches"
            )
    return True


def apply() -> None:
    """Apply every needed repair, once. Raises `Unrecoverable` for an unknown source or without the C `crc32c`."""
    with _lock:
        if _applied:
            return
        if record_util.crc32c_c is None:
            # The pure Python checksum takes 0.12 s per MiB, at each end.
            raise Unrecoverable("the package crc32c is missing: install crc32c")
        chosen = os.environ.get(SWITCH, "repaired")
        if chosen not in ("repaired", "stock"):
            raise ValueError(f"{SWITCH}={chosen!r}: choose repaired or stock")
        needed = [repair for repair, replaced in REPAIRS.items() if is_needed(repair, replaced)] if chosen == "repaired" else []
        for repair in needed:
            repair()
        _applied.extend([chosen, *(repair.__name__ for repair in needed)])


def _idempotent_producer_gets_a_new_id() -> None:
    """Fault: after a batch timed out, the idempotent producer drops its id but never requests another: later sends time out.

    Repro: stalled_broker. Report: "reset_producer_id() leaves an idempotent producer without a producer id for good".
    """
    manager: Any = transaction_manager.TransactionManager
    states = transaction_manager.TransactionState
    stock = manager.reset_producer_id

    def reset_producer_id(self: Any) -> None:
        if self.is_transactional():
            return  # stock raises inside the I/O thread; _lost_batch_fails_its_transaction has marked the transaction
        stock(self)
        with self._lock:
            self._current_state = states.UNINITIALIZED

    manager.reset_producer_id = reset_producer_id


def _one_bad_record_is_not_the_end() -> None:
    """Fault: one record that the broker refuses (too large, no key on a compacted topic) makes an idempotent producer fail for ever.

    Repro: refused_record. Report: "classify_batch_error() makes MESSAGE_TOO_LARGE fatal to an idempotent producer".
    """
    manager: Any = transaction_manager.TransactionManager
    stock = manager.classify_batch_error

    def classify_batch_error(self: Any, error: Any, batch: Any, log_start_offset: int = -1) -> Any:
        outcome = stock(self, error, batch, log_start_offset=log_start_offset)
        kind = error if isinstance(error, type) else type(error)
        if self.is_transactional() or outcome != self.ERROR_CLASS_FATAL or kind in self._FATAL_ERRORS:
            return outcome
        return self.ERROR_CLASS_NEEDS_EPOCH_BUMP if self._supports_epoch_bump() else self.ERROR_CLASS_NEEDS_PRODUCER_ID_RESET

    manager.classify_batch_error = classify_batch_error


def _running_join_is_remembered() -> None:
    """Fault: a join caused by changed metadata clears its own cause; a poll() that times out inside it forgets the join and hangs.

    Repro: late_second_join. Report: "need_rejoin() ignores a join in flight" (kafka-python 1.4 checked for one since pull request 1695).
    """
    consumer: Any = coordinator_consumer.ConsumerCoordinator
    stock = consumer.need_rejoin

    def need_rejoin(self: Any) -> bool:
        needed: bool = stock(self)
        if needed:
            self.rejoin_needed = True  # only a completed join resets it
        return needed

    consumer.need_rejoin = need_rejoin


def _finished_join_is_used() -> None:
    """Fault: a join that ends between two polls is discarded and restarted, so short polls never join and the group keeps rebalancing.

    Repro: short_polls. Report: "join_group_async() discards a join that succeeded between two polls".
    """
    base: Any = coordinator_base.BaseCoordinator
    stock_join, stock_sync = base.join_group_async, base._do_join_and_sync_async

    async def _do_join_and_sync_async(self: Any) -> Any:
        assignment = await stock_sync(self)
        self._penstock_synced = time.monotonic()
        return assignment

    async def join_group_async(self: Any, timeout_ms: float | None = None) -> Any:
        task = self._join_task
        if (
            task is not None
            and task.succeeded()
            and self.state is coordinator_base.MemberState.REBALANCING
            # No heartbeats have been sent since then: an older result is void.
            and time.monotonic() - self._penstock_synced < self.config["session_timeout_ms"] / 1000
        ):
            self._join_task = None
            with self._lock:
                self.rejoining = self.rejoin_needed = False
                self.state = coordinator_base.MemberState.STABLE
                self._enable_heartbeat()
            generation = self._generation
            await self._on_join_complete_async(generation.generation_id, generation.member_id, generation.protocol, task.value)
        return await stock_join(self, timeout_ms)

    base._do_join_and_sync_async, base.join_group_async = _do_join_and_sync_async, join_group_async


def _lost_batch_fails_its_transaction() -> None:
    """Fault: a transaction commits although one of its records was lost: an expired batch counts as retriable, no state changes.

    Every lost batch makes the transaction abortable, so that the commit raises; the abort takes a new epoch as well,
    because the old sequence numbers are unusable after a loss.

    Repro: commit_without_its_record. Report: "commit_transaction() succeeds although a batch expired or was refused".
    """
    manager: Any = transaction_manager.TransactionManager
    states = transaction_manager.TransactionState
    open_states = (states.IN_TRANSACTION, states.COMMITTING_TRANSACTION, states.ABORTING_TRANSACTION, states.ABORTABLE_ERROR)
    classify, end = manager.classify_batch_error, transaction_manager.EndTxnHandler.handle_response
    manager._penstock_new_epoch = False

    def classify_batch_error(self: Any, error: Any, batch: Any, log_start_offset: int = -1) -> Any:
        outcome = classify(self, error, batch, log_start_offset=log_start_offset)
        if self.is_transactional() and outcome != self.ERROR_CLASS_FATAL and self._current_state in open_states:
            self._penstock_new_epoch = True
            return self.ERROR_CLASS_ABORTABLE
        return outcome

    def handle_response(self: Any, response: Any) -> None:
        owner = self.transaction_manager
        if response.error_code or not owner._penstock_new_epoch:
            end(self, response)
            return
        owner._complete_transaction()
        owner._penstock_new_epoch, owner._current_state = False, states.INITIALIZING
        owner._sequence_numbers.clear()
        owner._last_acked_offset.clear()
        handler = transaction_manager.InitProducerIdHandler(owner, owner.transaction_timeout_ms)
        handler._result = self._result  # abort_transaction() returns when the new epoch is there
        owner._enqueue_request(handler)

    manager.classify_batch_error = classify_batch_error
    transaction_manager.EndTxnHandler.handle_response = handle_response


def _foreign_header_name_is_read() -> None:
    """Fault: a record whose header name is not UTF-8 stops its reader for good: poll() raises once, and the next one never returns.

    Repro: foreign_header_name. Report: "poll() spins for ever behind a record with a header name that is not UTF-8".
    """
    batch: Any = default_records.DefaultRecordBatch
    stock = batch._read_msg

    def _read_msg(self: Any, *arguments: Any) -> Any:
        try:
            return stock(self, *arguments)
        except UnicodeDecodeError:
            _mask_header_names(self._buffer, self._pos)
            return stock(self, *arguments)

    batch._read_msg = _read_msg


def _mask_header_names(buffer: bytearray, position: int) -> None:
    """Overwrite non-ASCII bytes in the header names of the record at `position` with question marks."""
    varint = record_util.decode_varint
    for _ in range(4):  # length, attributes, time, offset
        _, position = varint(buffer, position)
    for _ in range(2):  # key, value
        size, position = varint(buffer, position)
        position += max(size, 0)
    headers, position = varint(buffer, position)
    for _ in range(headers):
        size, position = varint(buffer, position)
        name = buffer[position : position + size]
        buffer[position : position + size] = bytes(byte if byte < 0x80 else ord("?") for byte in name)
        size, position = varint(buffer, position + size)
        position += max(size, 0)


_INFLATED_AT_MOST = 64 << 20
_RECEIVED_AT_ONCE = 1 << 20


def responses_are_read_in_large_pieces() -> None:
    """Fault: a response is read 4 KiB at a time: with samples of 2,000 tokens a run loses a tenth of its speed.

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
    """Fault: over TLS each 16 KiB sent copy the rest of the request: 8 MiB copy 2 GiB, and a producer reaches about 20 MB/s.

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
    """Fault: a compressed batch of 16 MiB may inflate to 16 GiB in its reader's memory before the first record is returned.

    Our own records are never compressed. Repro: inflated_batch. Report: "_maybe_uncompress() has no limit on the size of its result".
    """

    def gzip_decode(data: Any) -> bytes:
        inflating = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        inflated = inflating.decompress(data, _INFLATED_AT_MOST)
        if not inflating.eof:
            raise errors.CorruptRecordError(f"a gzip batch is truncated, or decompresses to more than {_INFLATED_AT_MOST} bytes")
        return inflated

    default_records.gzip_decode = gzip_decode


def a_request_to_an_unlisted_broker_fails() -> None:
    """Fault: a fetch from a leader that the metadata do not list raises after it counts as in flight: that broker is never read again.

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


def a_silent_broker_leaves_time_for_the_others() -> None:
    """Fault: bootstrap gives one address the whole timeout: a broker that accepts connections and sends nothing uses it up.

    With one of three brokers frozen, every third client fails to open. Repro: silent_broker. Report: "_do_bootstrap() spends
    bootstrap_timeout_ms on the first address it picks"; issue 2284 is the same fault of version 2.
    """
    manager: Any = net_manager.KafkaConnectionManager
    stock = manager.get_connection

    def get_connection(self: Any, node_id: Any, timeout_ms: float | None = None, **options: Any) -> Any:
        if timeout_ms is not None and self.cluster.is_bootstrap(node_id):
            timeout_ms /= len(self.cluster.bootstrap_brokers())
        return stock(self, node_id, timeout_ms=timeout_ms, **options)

    manager.get_connection = get_connection


_MANAGER = "kafka.producer.transaction_manager:TransactionManager"
_END = "kafka.producer.transaction_manager:EndTxnHandler.handle_response"
_COORDINATOR = "kafka.coordinator.base:BaseCoordinator"
_REJOIN = "kafka.coordinator.consumer:ConsumerCoordinator.need_rejoin"
_TCP = "kafka.net.transport:KafkaTCPTransport"
_TLS = "kafka.net.transport:KafkaSSLTransport"
_INFLATE = "kafka.record.default_records:DefaultRecordBatch._maybe_uncompress"
_SEND = "kafka.net.manager:KafkaConnectionManager.send"
_BOOTSTRAP = "kafka.net.manager:KafkaConnectionManager._do_bootstrap"
_CONNECT = "kafka.net.manager:KafkaConnectionManager.get_connection"
_READ = "kafka.record.default_records:DefaultRecordBatch._read_msg"

SOURCES = {
    f"{_MANAGER}.reset_producer_id": ("2fb0d988b47cf8f12f4eb3ee4570aa138693e5951469074395c7cc95d7b87587",),
    f"{_MANAGER}.classify_batch_error": ("b1983067f0741c9df71a184ef830ad3197e5bd93d37a405a47b1954f5aa6a341",),
    _END: ("bd0e415cb1e10a7d083de901ddbb3aa200edb70bc28d8557096a4a2162416638",),
    _REJOIN: ("7f90bc6c6f09cb6e21b84a53b0733ecd3d793a9d9dfe90d2129d78fb5a3493a4",),
    f"{_COORDINATOR}.join_group_async": ("f9b7d8038dabf04d5e43becb43a0c5e24627431d2395c06e12c6c2a805fdf8b5",),
    f"{_COORDINATOR}._do_join_and_sync_async": ("3e4f55d945a361a115f4bd3b08ddbd14dba985f711a9c4302fdc1b7ebbee699b",),
    _READ: ("b203a6ee5e4f423b6e746cbb4310b123b980a27b6e84d0e1314289a400e2d89b",),
    f"{_TCP}._sock_recv": ("2594a6a62ec5a3e56355033514d33265dcd9513bc5c24342c1b91c90641589ff",),
    f"{_TLS}._sock_recv": ("0a592f230c5c4455245fa50057926170680e0f950c003a2186b10e578f10a481",),
    _INFLATE: ("35e0360528daf8bd286d00078d8bfd154fd44bb6440e2a9e06e6ea53bf06138a",),
    _SEND: ("c6bc4e3773c3bfd261cb872fa7e65e262dff21d36bc5f240282eedc97a3d43be",),
    _BOOTSTRAP: ("2c76a7a97d90325767d6d159d16a08413409f889d205f51ea3ef47c6f637777c",),
    _CONNECT: ("e18f019d1fbdfbf81bf8161df9e266519d637d76298befd5254f604f3ef4e1a3",),
    f"{_TLS}._sock_send": ("833f88549f9bee7438a99821ddd8cf1aca57c240ac10621f5ed45900bcd658c2",),
}
"""SHA-256 digests of the sources that the repairs were written for, by `module:Class.function`."""

FIXED: dict[str, tuple[str, ...]] = {}
"""Repair -> digests of the sources without its fault."""

REPAIRS: dict[Callable[[], None], tuple[str, ...]] = {
    _idempotent_producer_gets_a_new_id: (f"{_MANAGER}.reset_producer_id",),
    _one_bad_record_is_not_the_end: (f"{_MANAGER}.classify_batch_error",),
    _running_join_is_remembered: (_REJOIN,),
    _finished_join_is_used: (f"{_COORDINATOR}.join_group_async", f"{_COORDINATOR}._do_join_and_sync_async"),
    _lost_batch_fails_its_transaction: (f"{_MANAGER}.classify_batch_error", _END),
    _foreign_header_name_is_read: (_READ,),
    responses_are_read_in_large_pieces: (f"{_TCP}._sock_recv", f"{_TLS}._sock_recv"),
    sending_over_tls_copies_nothing: (f"{_TLS}._sock_send",),
    inflating_has_a_limit: (_INFLATE,),
    a_request_to_an_unlisted_broker_fails: (_SEND,),
    a_silent_broker_leaves_time_for_the_others: (_BOOTSTRAP, _CONNECT),
}
"""Repair -> the functions it replaces or depends on. Two wrap `classify_batch_error`, the later one around the earlier."""
