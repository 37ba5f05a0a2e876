"""Repairs of faults in kafka-python 3.0.12, each with its reason.

The rule: they apply at exactly the version they were read in; at any other `apply` refuses, so that each reason is looked at again.
"""

import threading
import time
from typing import Any

import kafka
import kafka.coordinator.base as coordinator_base
import kafka.coordinator.consumer as coordinator_consumer
from kafka import errors
from kafka.net import transport
from kafka.producer import transaction_manager
from kafka.record import util as record_util

from penstock.infra.kafka.client_repairs import event_loop, record_format

VERSION = "3.0.12"

_lock = threading.Lock()
_applied: list[str] = []


def apply() -> None:
    """Apply every repair once; raises RuntimeError at another version of the client or without the C `crc32c`."""
    with _lock:
        if _applied:
            return
        if kafka.__version__ != VERSION:
            raise RuntimeError(f"kafka-python is {kafka.__version__}, its repairs are for {VERSION}: install kafka-python=={VERSION}")
        if record_util.crc32c_c is None:
            # The pure Python checksum takes 0.12 s per MiB, at each end.
            raise RuntimeError("the package crc32c is missing: install crc32c")
        for repair in (
            _idempotent_producer_gets_a_new_id,
            _one_bad_record_is_not_the_end,
            _read_in_large_pieces,
            _running_join_is_remembered,
            _finished_join_is_used,
            _lost_batch_fails_its_transaction,
            record_format.install,
            event_loop.install,
        ):
            repair()
            _applied.append(repair.__qualname__)


def _idempotent_producer_gets_a_new_id() -> None:
    """After a batch timed out the idempotent producer drops its id but never asks for another: every later send times out."""
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
    """One record the broker refuses (too large, no key on a compacted topic) makes an idempotent producer fail for ever."""
    manager: Any = transaction_manager.TransactionManager
    stock = manager.classify_batch_error

    def classify_batch_error(self: Any, error: Any, batch: Any, log_start_offset: int = -1) -> Any:
        outcome = stock(self, error, batch, log_start_offset=log_start_offset)
        kind = error if isinstance(error, type) else type(error)
        if self.is_transactional() or outcome != self.ERROR_CLASS_FATAL or kind in self._FATAL_ERRORS:
            return outcome
        return self.ERROR_CLASS_NEEDS_EPOCH_BUMP if self._supports_epoch_bump() else self.ERROR_CLASS_NEEDS_PRODUCER_ID_RESET

    manager.classify_batch_error = classify_batch_error


def _read_in_large_pieces() -> None:
    """Stock reads 4 KiB a call; 1 MiB a call takes a quarter of a reader's CPU time away."""

    def _sock_recv(self: Any) -> tuple[bytes, Exception | None]:
        pieces: list[bytes] = []
        failure: Exception | None = None
        while True:
            try:
                piece = self._sock.recv(1 << 20)
            except (BlockingIOError, InterruptedError):
                break
            except BaseException as error:
                failure = errors.KafkaConnectionError(error)
                break
            if not piece:
                failure = errors.KafkaConnectionError("socket disconnected")
                break
            pieces.append(piece)
            if len(piece) < 1 << 16:
                break
        return (pieces[0] if len(pieces) == 1 else b"".join(pieces)), failure

    transport.KafkaTCPTransport._sock_recv = _sock_recv


def _running_join_is_remembered() -> None:
    """A join caused by changed metadata clears its own cause; when poll() times out inside it it is forgotten: the member hangs."""
    consumer: Any = coordinator_consumer.ConsumerCoordinator
    stock = consumer.need_rejoin

    def need_rejoin(self: Any) -> bool:
        needed: bool = stock(self)
        if needed:
            self.rejoin_needed = True  # only a completed join sets it back
        return needed

    consumer.need_rejoin = need_rejoin


def _finished_join_is_used() -> None:
    """A join that ends between two polls is thrown away and begun again, so short polls never join and keep the whole group rebalancing."""
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
            # No heartbeats are sent since then: an older result is void.
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
    """A transaction commits although a record of it was lost: a batch out of time counts as retriable and changes no state.

    Every lost batch makes the transaction abortable, so that the commit raises; the abort takes a new epoch as well,
    because the old sequence numbers are unusable after a loss.
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
