"""The hashes by which the audit compares what it does not keep."""

import hashlib
from typing import Any

import numpy as np

from penstock.topics import groups, prompts
from penstock.topics.samples import Rollout
from penstock.topics.wire.record import RawHeaders

GROUP_BYTES = 8
"""Size of the hashes that are kept of every prompt and sample: two that differ are alike once in 2^64 comparisons."""


def body_of(key: bytes | None, headers: RawHeaders, value: bytes) -> bytes:
    """Hash of a record's bytes; an absent header and one without a value differ."""
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
