"""The child's side of `pool` and `sessions`: answers each JSON line `[number, payload]` with one of that number until the parent ends.

The rule: nothing that the code prints reaches the two pipes, and nothing it starts outlives the parent.
"""

import fcntl
import importlib
import inspect
import json
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from penstock.infra.sandbox.signals import restore_defaults
from penstock.topics.wire.well_formed import well_formed_json

F_SETSIG = 10
"""Linux: the signal that O_ASYNC sends. Not in Python 3.11's fcntl."""
LINE_BYTES = 64 << 20
"""Of the longest request to a handler that serves several at once."""


def main() -> None:
    """Serve `sys.argv[1]` (`module:function`), with the lifeline's descriptor in `sys.argv[2]`."""
    restore_defaults()
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    # A user's print goes to stderr and a user's input() reads nothing: only our messages use the pipes.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    _die_with_parent(int(sys.argv[2]))
    try:
        module, _, name = sys.argv[1].partition(":")
        handler = getattr(importlib.import_module(module), name)(json.loads(requests.readline()))
    # The edge of this process: the reason goes to the parent.
    except (Exception, SystemExit) as error:
        _reply(replies, {"broken": reason(error)})
        return
    gives_up = inspect.iscoroutinefunction(handler)
    _reply(replies, {"ready": True, "at_once": getattr(handler, "at_once", 1), "gives_up": gives_up})
    if gives_up:
        import asyncio  # which most children have no use for

        asyncio.run(_serve_at_once(handler, requests, replies))
        return
    for line in requests:
        number, payload = json.loads(line)
        answer: dict[str, Any] = {"call": number}
        try:
            answer["result"] = handler(payload)
        # The edge of this process: a user's function may raise anything, and exit().
        except (Exception, SystemExit) as error:
            answer["error"] = reason(error)
        _reply(replies, answer)


async def _serve_at_once(handler: Callable[[Any], Any], requests: Any, replies: Any) -> None:
    """Answer lines `[number, payload]` by that number, as the handler gets done with them; a line `[number]` gives that call up."""
    import asyncio

    lines = asyncio.StreamReader(limit=LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), requests)
    calls = dict[int, asyncio.Task[dict[str, Any]]]()

    async def answer(payload: Any) -> dict[str, Any]:
        try:
            return {"result": await handler(payload)}
        # The edge of this process: a user's function may raise anything, and exit().
        except (Exception, SystemExit) as error:
            return {"error": reason(error)}

    def ended(call: asyncio.Task[dict[str, Any]], number: int) -> None:
        calls.pop(number, None)
        _reply(replies, {"call": number, **({"error": "was given up"} if call.cancelled() else call.result())})

    while line := await lines.readline():
        number, *payload = json.loads(line)
        if payload:
            calls[number] = asyncio.create_task(answer(payload[0]))
            calls[number].add_done_callback(partial(ended, number=number))
        elif number in calls:
            calls[number].cancel()


def reason(error: BaseException) -> str:
    """An exception in one line, with the place it was raised at; our own errors already are one line."""
    text = " ".join(str(error).split())[:600]
    if type(error).__module__.partition(".")[0] == "penstock":
        return text
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{where}"


def _reply(replies: Any, answer: Mapping[str, Any]) -> None:
    try:
        text = json.dumps(answer)
        if "\\ud" in text:  # a surrogate, perhaps without its other half
            answer, replaced = well_formed_json(answer)
            text = json.dumps({**answer, "replaced": replaced})
        line = text.encode() + b"\n"
    except (TypeError, ValueError) as error:
        line = json.dumps({"call": answer.get("call"), "error": f"the result is no JSON value: {error}"}).encode() + b"\n"
    sent = 0
    while sent < len(line):
        sent += replies.write(line[sent:])


def _die_with_parent(lifeline: int) -> None:
    """Arrange that this process group is killed when the other end of `lifeline` closes, as it does however the parent ends."""
    if sys.platform == "linux":
        # A signal from the kernel: a watching thread would never run under a regular expression that holds the interpreter for hours,
        # and PR_SET_PDEATHSIG fires already when the parent's *thread* that started us ends.
        fcntl.fcntl(lifeline, F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        poller = select.poll()
        poller.register(lifeline, select.POLLHUP)
        if poller.poll(0):
            _end_group()
    else:
        threading.Thread(target=lambda: (os.read(lifeline, 1), _end_group()), daemon=True).start()


def _end_group() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)
