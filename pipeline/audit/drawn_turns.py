"""The turns of a trajectory that the policy drew, as hashes: what stood before each, and what was drawn.

The rule: what stood before a turn follows from the record alone: all of its segment before the turn, behind the group's prompt where the
segment begins with it.
"""

import hashlib
from typing import Any, NamedTuple

import numpy as np

from penstock.topics.samples import Rollout


class DrawnTurn(NamedTuple):
    """A turn by the digests of its context and of its tokens."""

    context: str
    """SHA-256, as calls and replies name it."""
    tokens: bytes


def drawn_turns(rollout: Rollout, prompt_ids: Any) -> tuple[DrawnTurn, ...]:
    """The policy's turns of a trajectory; none of a single completion."""
    found = []
    bounds = [(start, end, prompt) for start, end, prompt in rollout.segments or ()]
    for turn in rollout.turns or ():
        if turn.source == "model":
            begin, prompt = next((start, prompt) for start, end, prompt in bounds if start <= turn.start < end)
            context = hashlib.sha256(b"" if prompt else _bytes(prompt_ids))
            context.update(_bytes(rollout.token_ids[begin : turn.start]))
            found.append(DrawnTurn(context.hexdigest(), tokens_hash(rollout.token_ids[turn.start : turn.end])))
    return tuple(found)


def tokens_hash(token_ids: Any) -> bytes:
    """Hash of drawn tokens."""
    return hashlib.blake2b(_bytes(token_ids), digest_size=16).digest()


def _bytes(token_ids: Any) -> bytes:
    return np.ascontiguousarray(token_ids, "<i4").tobytes()
