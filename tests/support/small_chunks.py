"""Versions of a tiny model in several chunks."""

from typing import Any

from penstock.workers.trainer import weight_publisher

CHUNK_BYTES = 22_000
"""A version of the model that tests train takes five of these, whole or as a delta: in float32 a step changes every element."""
_send = weight_publisher.send_version


def sent_small(*arguments: Any, **named: Any) -> Any:
    return _send(*arguments, **{**named, "max_bytes": CHUNK_BYTES})
