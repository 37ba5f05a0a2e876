"""The turns of a trajectory: whether they follow each other, and as hashes what stood before each that the policy drew, and what it drew.

The rule: what stood before a turn follows from the record alone: all of its segment before the turn, behind the group's prompt where the
segment begins with it.
"""

import hashlib
from typing import Any, NamedTuple

import numpy as np

from penstock.topics.samples import Rollout


class SampledTurn(NamedTuple):
    """A turn by the digests of its context and of its tokens."""

    context: str
    """SHA-256, as calls and replies name it."""
    tokens: bytes


def sampled_turns(rollout: Rollout, prompt_ids: Any) -> tuple[SampledTurn, ...]:
    """The policy's turns of a trajectory; none of a single completion."""
    found = []
    bounds = [(start, end, prompt) for start, end, prompt in rollout.segments or ()]
    for turn in rollout.turns or ():
        if turn.source == "model":
            begin, prompt = next((start, prompt) for start, end, prompt in bounds if start <= turn.start < end)
            context = hashlib.sha256(b"" if prompt else _bytes(prompt_ids))
            context.update(_bytes(rollout.token_ids[begin : turn.start]))
            found.append(SampledTurn(context.hexdigest(), tokens_hash(rollout.token_ids[turn.start : turn.end])))
    return tuple(found)


def tokens_hash(token_ids: Any) -> bytes:
    """Hash of drawn tokens."""
    return hashlib.blake2b(_bytes(token_ids), digest_size=16).digest()


def _bytes(token_ids: Any) -> bytes:
    return np.ascontiguousarray(token_ids, "<i4").tobytes()


def trajectory_flaw(rollout: Rollout) -> str | None:
    """What is wrong with a trajectory's turns, or None: they follow each other, and the policy's own tokens alone have mask and logprob."""
    if rollout.turns is None:
        return None
    end, drawn = 0, np.zeros(len(rollout.token_ids), np.bool_)
    for turn in rollout.turns:
        if turn.start != end:
            return f"a turn begins at token {turn.start}, the one before it ends at {end}"
        end = turn.end
        drawn[turn.start : end] = turn.source == "model"
        if turn.reward is not None and turn.source != "model":
            return f"a turn of {turn.source} has a reward"
    if end != len(drawn):
        return f"its turns end at token {end} of {len(drawn)}"
    for what, has in (("in the loss mask", rollout.loss_mask), ("with a logprob", ~np.isnan(rollout.behaviour_logprobs))):
        if (wrong := np.flatnonzero(np.asarray(has) != drawn)).size:
            return f"token {wrong[0]} is {'not ' * bool(drawn[wrong[0]])}{what}, {'and' if drawn[wrong[0]] else 'but not'} the policy's"
    starts = {start: prompt for start, _, prompt in rollout.segments or ()}
    if starts and any(drawn[start : start + prompt].any() for start, prompt in starts.items()):
        return "a segment's prompt holds tokens that were drawn"
    return None
