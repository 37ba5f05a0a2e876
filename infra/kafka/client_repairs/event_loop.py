"""The client library's event loop, driven by whoever waits for it instead of by a thread of its own.

The rule: one thread at a time drives a loop. Handing each request to another thread and back costs several times what the request
does, so consumers and the admin client run on their caller's thread, and nothing moves while nobody calls; the library's producers
have their own thread and drive the same loop there.
"""

import heapq
import inspect
import selectors
import time
from functools import lru_cache
from types import CoroutineType, FunctionType, GeneratorType, MethodType
from typing import Any

from kafka import errors
from kafka.consumer import fetcher
from kafka.future import Future
from kafka.net import selector, transport
from kafka.net.selector import KernelEvent, NetworkSelector, TaskState

PIPELINE_FROM = 64
"""After so many records the next ones are asked for at once; after fewer at the next poll, when more have come together."""

_DESCRIPTIONS = 4096
_COROUTINE_FLAGS = inspect.CO_GENERATOR | inspect.CO_COROUTINE
_OVER = (TaskState.DONE, TaskState.CANCELLED)


class CallersLoop(NetworkSelector):
    """An event loop without a thread; other threads may schedule work and wake the one that drives it."""

    def __init__(self, **configs: Any) -> None:
        super().__init__(**configs)
        self._selecting = self._woken = False

    def start(self) -> None:
        """Nothing: `run` and `poll` drive the loop."""

    def wakeup(self) -> None:
        """Let the thread that drives the loop go round once more; costs a system call only when that thread sleeps."""
        if not self._woken:
            self._woken = True
            if self._selecting:
                super().wakeup()

    def nap(self, seconds: float) -> None:
        """Sleep on the caller's thread, the loop's own work going on meanwhile."""
        self.run(_nap, self, seconds)

    def _poll_once(self, timeout: float | None = None) -> None:
        """One round: wait for files, timers or a wakeup, then take each task that is ready one step further."""
        if not self._poll_lock.acquire(blocking=False):
            raise RuntimeError("two threads drive one client at the same time")
        try:
            # In this order: whoever schedules work afterwards sees that it has to wake this thread.
            self._selecting = True
            if self._ready or self._woken:
                timeout = 0
            elif self._scheduled:
                first = self._scheduled[0][0] - time.monotonic()
                timeout = max(0.0, first if timeout is None else min(first, timeout))
            elif timeout is not None:
                timeout = max(0.0, timeout)
            events = self._selector.select(timeout)
            self._selecting = self._woken = False
            if events:
                self._process_events(events)
            if self._scheduled:
                now = time.monotonic()
                while self._scheduled and self._scheduled[0][0] <= now:
                    task = heapq.heappop(self._scheduled)[1]
                    task.scheduled_at = None
                    self._add_ready_task(task)
            for _ in range(len(self._ready)):
                self._step(self._ready.popleft())
        finally:
            self._selecting = False
            self._current = None
            self._poll_lock.release()

    def _step(self, task: Any) -> None:
        if task.state in _OVER:
            return
        self._current = task
        task.state = TaskState.RUNNING
        try:
            event = task()
        except StopIteration:
            self._task_done(task)
            return
        except Exception:
            selector.log.exception("unhandled exception in task %s", task)
            self._task_done(task)
            return
        except BaseException:  # the caller's own Ctrl-C, which stock would swallow on a thread that is nobody's
            self._task_done(task)
            raise
        if task.state is TaskState.CANCELLED:
            self._pending_tasks.discard(task)
            task.close()
        elif isinstance(event, KernelEvent):
            try:
                getattr(self, event.method)(*event.args)
            except Exception as error:
                task.inject_exc(error)
                self._add_ready_task(task)
        else:
            task.state = TaskState.WAIT_FUTURE
            event.add_both(lambda _: self.call_soon(task))


def _park(self: Any) -> None:
    """The running task waits for the file it is registered for."""
    self._current.state = TaskState.WAIT_IO


async def _nap(loop: CallersLoop, seconds: float) -> None:
    await loop.sleep(seconds)


def install() -> None:
    """Make the library's parts fit such a loop."""
    selector._initialize_coro = _coroutine
    NetworkSelector._penstock_park = _park
    transport.KafkaTCPTransport._read_from_sock = _read_from_sock
    transport.KafkaTCPTransport.write = _write(transport.KafkaTCPTransport.write)
    fetcher.Fetcher.fetch_records = _fetch_records
    # Each fetch describes every partition anew to see which have moved: the same description is the same object now.
    fetcher._FetchPartition.__eq__, fetcher._FetchPartition.__hash__ = object.__eq__, object.__hash__
    fetcher._FetchPartition = lru_cache(_DESCRIPTIONS)(fetcher._FetchPartition)


def _coroutine(task: Any) -> Any:
    """What a task runs; as in the library, which asks `inspect` five questions for each timer."""
    if isinstance(task, CoroutineType | GeneratorType):
        return task
    function = task.__func__ if isinstance(task, MethodType) else task
    if not isinstance(function, FunctionType):
        raise TypeError(f"no generator, coroutine or function: {type(task)}")
    return task if function.__code__.co_flags & _COROUTINE_FLAGS else selector.yield_callback(task)


async def _read_from_sock(self: Any) -> None:
    """The library's reader, registered once for the life of the connection instead of anew for each piece."""
    loop, sock = self._net, self._sock
    loop.register_event(sock, selectors.EVENT_READ, loop._current)
    try:
        while self._read and not self._closed:
            await KernelEvent("_penstock_park")
            data, error = self._sock_recv()
            if error:
                self.abort(error=error)
                return
            self.last_read = time.monotonic()
            try:
                self._protocol.data_received(data)
            except errors.KafkaProtocolError as damage:
                self.abort(error=damage)
                return
    finally:
        loop.unregister_event(sock, selectors.EVENT_READ)


def _write(stock: Any) -> Any:
    def write(self: Any, data: Any) -> None:
        """Send at once; stock first waits until the socket can be written, which it nearly always can."""
        if type(self) is transport.KafkaTCPTransport and data and self._write and not (self._closed or self._writing):
            try:
                sent = self._sock.send(data)
            except OSError:
                sent = 0  # a full socket, or a broken one: stock waits, or meets the same error where it can handle it
            if sent == len(data):
                self.last_write = time.monotonic()
                return
            data = memoryview(data)[sent:]
        stock(self, data)

    return write


def _fetch_records(
    self: Any, max_records: int | None = None, update_offsets: bool = True, timeout_ms: float | None = None
) -> tuple[dict[Any, list[Any]], bool]:
    """What has been fetched, or what comes within `timeout_ms`; asks and waits in one turn of the loop, stock in two."""
    records, partial = self.fetched_records(max_records, update_offsets=update_offsets)
    if records:
        if not partial and sum(map(len, records.values())) >= PIPELINE_FROM:
            self.send_fetches()
        return records, False
    self._net.run(_ask_and_wait, self, timeout_ms)
    return self.fetched_records(max_records, update_offsets=update_offsets)[0], False


async def _ask_and_wait(self: Any, timeout_ms: float | None) -> None:
    if len(self._nodes_with_pending_fetch_requests) < len(self._manager.cluster.brokers()):
        await self._send_fetches_async()
    else:
        await self._clean_done_fetch_futures()
    pending = [*self._fetch_futures]
    if self._reset_task is not None and not self._reset_task.is_done:
        pending.append(self._reset_task)
    if not pending:  # nothing to be read, or nobody to ask: connections and metadata go on being looked after
        backoff_ms = self.config["retry_backoff_ms"]
        await self._net.sleep((backoff_ms if timeout_ms is None else min(backoff_ms, timeout_ms)) / 1000)
        return
    woken = Future()

    def wake(_: Any) -> None:
        if not woken.is_done:
            woken.success(None)

    for future in pending:
        future.add_both(wake)
    try:
        await self._manager.wait_for(woken, timeout_ms)
    except errors.KafkaTimeoutError:
        return
