"""Versions of a tiny model in several chunks: a worker process cuts them small."""

from typing import Any

from penstock.workers.trainer import weight_publisher

CHUNK_BYTES = 22_000
"""A version of the model that tests train takes five of these, whole or as a delta: in float32 a step changes every element."""
_send = weight_publisher.send_version


def cut_small() -> None:
    """Send versions in small chunks from now on: in a worker process, before its work begins."""
    weight_publisher.send_version = sent_small


def sent_small(*arguments: Any, **named: Any) -> Any:
    return _send(*arguments, **{**named, "max_bytes": CHUNK_BYTES})
