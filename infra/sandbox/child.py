"""The child's side of `pool` and `sessions`: serves JSON lines `[number, payload]` until the parent ends.

Handlers are called in the main thread while no event loop runs, so they may use signals and `asyncio.run`. Output of user code never
reaches the two pipes.
"""

import importlib
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from penstock.infra.sandbox.signals import restore_defaults
from penstock.topics.wire.visible import well_formed_json

LINE_BYTES = 64 << 20
"""[bytes] Longest request to a concurrent handler, and longest result."""

_notes: list[Callable[[str], None]] = []


def doing(what: str) -> None:
    """Tell the parent what this child works on, for its error message if the child hangs or crashes; no effect outside a child."""
    for note in _notes:
        note(what)


def main() -> None:
    """Serve `sys.argv[1]`, a `module:function`."""
    restore_defaults()
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    # Output of user code goes to stderr and its input() reads nothing: only our messages use the pipes.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    try:
        module, _, name = sys.argv[1].partition(":")
        handler = getattr(importlib.import_module(module), name)(json.loads(requests.readline()))
    # The edge of this process: the parent gets the reason.
    except BaseException as error:
        _reply(replies, {"broken": reason(error)})
        return
    can_cancel = hasattr(handler, "at_once")
    _reply(replies, {"ready": True, "at_once": getattr(handler, "at_once", 1), "can_cancel": can_cancel})
    _notes.append(lambda what: _reply(replies, {"doing": what}))
    if can_cancel:
        _serve_at_once(handler, requests, replies)
        return
    for line in requests:
        number, payload = json.loads(line)
        _reply(replies, {"call": number, **_outcome(handler, payload)})


def _outcome(handler: Callable[[Any], Any], payload: Any) -> dict[str, Any]:
    """Return the result or the error of one call; cancels an alarm that the handler has set."""
    try:
        return {"result": handler(payload)}
    # The edge of this process: a user's function may raise anything, including KeyboardInterrupt and SystemExit.
    except BaseException as error:
        return {"error": reason(error)}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _serve_at_once(handler: Callable[[Any], Any], requests: Any, replies: Any) -> None:
    """Run calls concurrently and send each reply when its awaitable ends; a line `[number]` cancels that call.

    The event loop runs between calls of the handler, never during one.
    """
    import asyncio  # most children do not need it

    calls = dict[int, asyncio.Task[dict[str, Any]]]()

    async def outcome(awaitable: Awaitable[Any]) -> dict[str, Any]:
        try:
            return {"result": await awaitable}
        # Also the edge of this process: only calls that the parent cancels are cancelled.
        except BaseException as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return {"error": reason(error)}

    def ended(call: asyncio.Task[dict[str, Any]], number: int) -> None:
        calls.pop(number, None)
        _reply(replies, {"call": number, **({"error": "was cancelled"} if call.cancelled() else call.result())})

    with asyncio.Runner() as runner:
        loop, lines = runner.get_loop(), asyncio.StreamReader(limit=LINE_BYTES, loop=runner.get_loop())
        loop.run_until_complete(loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines, loop=loop), requests))
        while line := _awaited(loop, loop.create_task(lines.readline())):
            number, *payload = json.loads(line)
            if not payload:
                if number in calls:
                    calls[number].cancel()
                continue
            reply = _outcome(handler, payload[0])
            if inspect.isawaitable(reply.get("result")):
                calls[number] = loop.create_task(outcome(reply["result"]))
                calls[number].add_done_callback(partial(ended, number=number))
            else:
                _reply(replies, {"call": number, **reply})


def _awaited(loop: Any, task: Any) -> Any:
    """Run the loop until the task is done, even if another task's KeyboardInterrupt or SystemExit stops the loop."""
    while True:
        try:
            return loop.run_until_complete(task)
        except (KeyboardInterrupt, SystemExit):  # the awaiter of that task gets it too
            if task.done():
                raise


def reason(error: BaseException) -> str:
    """Format an exception in one line, with file and line unless it is one of Penstock's own."""
    text = text_of(error, characters=600)
    if type(error).__module__.partition(".")[0] == "penstock":
        return text
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{where}"


def text_of(error: BaseException, *, characters: int) -> str:
    """Return the text of an exception in one line of at most `characters`; a user's `__str__` may raise."""
    try:
        return " ".join(str(error).split())[:characters]
    except Exception:
        return "an error whose text cannot be read"


def _reply(replies: Any, reply: Mapping[str, Any]) -> None:
    """Write a reply as one JSON line; a result that is not JSON or too long becomes an error."""
    try:
        text = json.dumps(reply)
        if "\\ud" in text:  # a surrogate, perhaps without its other half
            reply, replaced = well_formed_json(reply)
            text = json.dumps({**reply, "replaced": replaced})
        line = text.encode() + b"\n"
        if len(line) > LINE_BYTES:
            raise ValueError(f"the result has {len(line)} bytes as JSON, limit {LINE_BYTES}; return less data")
    except (TypeError, ValueError, RecursionError) as error:
        line = json.dumps({"call": reply.get("call"), "error": f"the result cannot be returned as JSON: {error}"}).encode() + b"\n"
    sent = 0
    while sent < len(line):
        sent += replies.write(line[sent:])
