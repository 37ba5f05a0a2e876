"""Signal handling that child processes inherit correctly and that takes no locks.

A signal that the parent ignored (`nohup`, `&` in a script) stays ignored here, but programs started from here get its default. A handler
waits for no lock, since the interrupted code may own it.
"""

import _thread
import signal
import threading

END_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)


def keep_ignored_here() -> None:
    """Replace SIG_IGN by a handler that does nothing: programs that are started inherit SIG_IGN, but no handler. Main thread only."""
    for number in END_SIGNALS:
        if signal.getsignal(number) is signal.SIG_IGN:
            ignore(number)


def ignore(number: signal.Signals) -> None:
    """Ignore a signal in this process, not in the programs that it starts. Main thread only."""
    signal.signal(number, _nothing)


def is_ignored(number: signal.Signals) -> bool:
    """True if a signal does nothing in this process."""
    return signal.getsignal(number) in (signal.SIG_IGN, _nothing)


def restore_defaults() -> None:
    """Handle signals like a process started from a terminal. Main thread only."""
    for number in END_SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def set_in_handler(event: threading.Event) -> None:
    """Set an event from a signal handler, in a thread: the interrupted code may be in a method of the event and own its lock.

    `threading.Thread` takes locks too, which the interrupted code may own.
    """
    try:
        _thread.start_new_thread(event.set, ())
    except RuntimeError:  # no thread can be started, as at the interpreter's end
        event.set()


def _nothing(_number: int, _frame: object) -> None:
    """The handler of an ignored signal."""
