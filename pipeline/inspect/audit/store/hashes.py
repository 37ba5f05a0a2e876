"""Hashes for comparing records without storing them, and checks of a trajectory's turns."""

import hashlib
from typing import Any, NamedTuple

import numpy as np

from penstock.topics import groups, prompts
from penstock.topics.samples import Rollout
from penstock.topics.wire.record import RawHeaders

GROUP_BYTES = 8
"""Bytes of the hash of a prompt or sample: two different ones are equal once in 2^64 comparisons."""


def body_of(key: bytes | None, headers: RawHeaders, value: bytes) -> bytes:
    """Hash of a record's key, headers and value; an absent header and one without a value differ."""
    digest = hashlib.blake2b(digest_size=16)
    for name, text in (("", key), *headers):
        digest.update(f"{len(name)}:{name};{-1 if text is None else len(text)}:".encode("utf-8", "surrogatepass"))
        digest.update(text or b"")
    digest.update(value)
    return digest.digest()


def sample_hash(rollout: Rollout) -> bytes:
    """Hash of all of a sample's fields."""
    logprobs = np.array(rollout.behaviour_logprobs, np.float32)
    logprobs[np.isnan(logprobs)] = np.nan  # one bit pattern for every NaN
    arrays = (
        np.asarray(rollout.token_ids, np.int32),
        logprobs,
        np.asarray(rollout.loss_mask, np.bool_),
        np.asarray(rollout.span_versions, np.int32),
        np.asarray(rollout.span_starts, np.int32),
        *([] if rollout.support is None else [np.asarray(rollout.support, np.int32)]),
    )
    fields = (rollout.group, rollout.sample, rollout.finish, rollout.temperature, rollout.top_p, rollout.top_k)
    episode = (rollout.segments, rollout.turns, rollout.messages)
    seeded = (rollout.environment, rollout.environment_version, rollout.environment_seed)
    digest = hashlib.blake2b(
        repr((*fields, rollout.started_ns, rollout.ended_ns, rollout.worker, episode, seeded)).encode(), digest_size=GROUP_BYTES
    )
    for array in arrays:
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(array.tobytes())
    return digest.digest()


def prompt_hash(of: prompts.Prompt | groups.Group, token_ids: Any) -> bytes:
    """Hash of the fields that a group's outcome repeats of its prompt."""
    numbers = (of.group, of.slot, of.min_version, of.samples_per_prompt, of.epoch, of.row, of.created_ns)
    return hash_of(repr((numbers, of.prompt, of.columns)).encode() + np.asarray(token_ids, np.int32).tobytes())


def hash_of(value: bytes | memoryview) -> bytes:
    """Hash of a payload."""
    return hashlib.blake2b(value, digest_size=GROUP_BYTES).digest()


class SampledTurn(NamedTuple):
    """Digests of a turn's context and tokens."""

    context: str
    """SHA-256, as calls and replies name it."""
    tokens: bytes


def sampled_turns(rollout: Rollout, prompt_ids: Any) -> tuple[SampledTurn, ...]:
    """The policy's turns of a trajectory; empty for a single completion.

    The context of a turn is its segment before it, after the group's prompt if the segment starts with that.
    """
    sampled = []
    bounds = [(start, end, prompt) for start, end, prompt in rollout.segments or ()]
    for turn in rollout.turns or ():
        if turn.source == "model":
            segment_start, prompt = next((start, prompt) for start, end, prompt in bounds if start <= turn.start < end)
            context = hashlib.sha256(b"" if prompt else _bytes(prompt_ids))
            context.update(_bytes(rollout.token_ids[segment_start : turn.start]))
            sampled.append(SampledTurn(context.hexdigest(), tokens_hash(rollout.token_ids[turn.start : turn.end])))
    return tuple(sampled)


def tokens_hash(token_ids: Any) -> bytes:
    """Hash of generated tokens."""
    return hashlib.blake2b(_bytes(token_ids), digest_size=16).digest()


def _bytes(token_ids: Any) -> bytes:
    return np.ascontiguousarray(token_ids, "<i4").tobytes()


def trajectory_flaw(rollout: Rollout) -> str | None:
    """Flaw of a trajectory's turns, or None: turns are contiguous, and only the policy's tokens have mask and logprob."""
    if rollout.turns is None:
        return None
    end, generated = 0, np.zeros(len(rollout.token_ids), np.bool_)
    for turn in rollout.turns:
        if turn.start != end:
            return f"a turn starts at token {turn.start}, the one before it ends at {end}"
        end = turn.end
        generated[turn.start : end] = turn.source == "model"
        if turn.reward is not None and turn.source != "model":
            return f"a turn of {turn.source} has a reward"
    if end != len(generated):
        return f"its turns end at token {end} of {len(generated)}"
    for name, has in (("in the loss mask", rollout.loss_mask), ("with a logprob", ~np.isnan(rollout.behaviour_logprobs))):
        if (wrong := np.flatnonzero(np.asarray(has) != generated)).size:
            ours = generated[wrong[0]]
            return f"token {wrong[0]} is {'not ' * bool(ours)}{name}, {'and' if ours else 'but not'} the policy's"
    starts = {start: prompt for start, _, prompt in rollout.segments or ()}
    if starts and any(generated[start : start + prompt].any() for start, prompt in starts.items()):
        return "a segment's prompt holds generated tokens"
    return None
