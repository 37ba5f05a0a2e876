"""Handles the signals that stop a launcher, and lets it outlive its terminal."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

from penstock.infra.sandbox.signals import is_ignored, keep_ignored_here, set_in_handler

SAME_S = 1.0
"""Signals this close together are one request: a terminal that is closed sends SIGHUP more than once."""
SAME_KEY_S = 0.1
"""SIGINTs this close together are one request: two presses of Ctrl-C within half a second are two."""


@contextlib.contextmanager
def stop_requested() -> Iterator[threading.Event]:
    """In the block, the first stop signal sets this event; a second one raises KeyboardInterrupt in the main thread.

    A signal that the parent process had set to be ignored (`nohup`, `&` in a script) stays ignored.
    """
    stop = threading.Event()
    first: list[float] = []

    def handle(number: int, _frame: object) -> None:
        if first and time.monotonic() - first[0] > (SAME_KEY_S if number == signal.SIGINT else SAME_S):
            raise KeyboardInterrupt
        if not first:
            first.append(time.monotonic())
            set_in_handler(stop)

    with contextlib.ExitStack() as restored:
        if threading.current_thread() is threading.main_thread():
            keep_ignored_here()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if not is_ignored(number):
                    restored.callback(signal.signal, number, signal.signal(number, handle))
        yield stop


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """In the block, discard output instead of raising once the terminal or pipe of stdout and stderr is closed."""
    with contextlib.redirect_stdout(_Lasting(sys.stdout)), contextlib.redirect_stderr(_Lasting(sys.stderr)):  # type: ignore[type-var]
        yield


def silence(stream: TextIO) -> None:
    """Redirect a stream to the null device, because its buffered text would fail again when the interpreter exits."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)


class _Lasting:
    """A text stream that discards everything once a write has failed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, or discard it if the terminal or pipe is closed; return its length."""
        try:
            return self._stream.write(text)
        except OSError:
            silence(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            silence(self._stream)

    @property
    def rich_proxied_file(self) -> Any:
        """The stream to which a rich console writes, which lasts as well."""
        return _Lasting(getattr(self._stream, "rich_proxied_file", self._stream))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
