"""`replies`: the generated tokens of one call. Rollout workers -> environment workers.

Only the first reply to a call is used; logprobs are of the distribution that was sampled from."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.topics.rollouts import FINISHES, Finish
from penstock.topics.turns.calls import REQUIRED, TurnKey
from penstock.topics.wire.checked import require_names, require_whole
from penstock.topics.wire.codec import Codec, Format
from penstock.topics.wire.columns import Float32s, Int32s, Payload
from penstock.topics.wire.errors import require
from penstock.topics.wire.fields import ByValue, fields_of

SCHEMA = "replies/1"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reply(ByValue):
    """The generated turn that answers a call: T tokens under S consecutive policy versions."""

    group: int
    sample: int
    turn: int
    attempt: int
    sha256: str
    """SHA-256 (hex) of the context."""
    token_ids: Int32s
    """[T] including the stop id."""
    behaviour_logprobs: Float32s
    """[T] natural-log probabilities."""
    span_versions: Int32s
    """[S] policy version of each span, S >= 1."""
    span_starts: Int32s
    """[S] index of the first token of each span; the first is 0."""
    finish: Finish
    """"abort" if it could no longer be fresh."""
    started_ns: int
    ended_ns: int
    worker: str
    """The rollout worker."""

    @property
    def key(self) -> TurnKey:
        return TurnKey(self.group, self.sample, self.turn, self.attempt, self.sha256)


CODEC = Codec(SCHEMA, fields=fields_of(Reply))


def decode(value: Payload) -> Reply:
    """Return the reply in a payload. Raises `Unusable`."""
    (row,) = CODEC.decode(value)
    require_whole(row, "group", "sample", "turn", "attempt", "started_ns", "ended_ns")
    require_names(row, "worker")
    reply = Reply(**row)
    tokens, starts = len(reply.token_ids), reply.span_starts.tolist()
    require(tokens == len(reply.behaviour_logprobs), f"{tokens} tokens, {len(reply.behaviour_logprobs)} logprobs")
    require(np.isfinite(reply.behaviour_logprobs).all(), "a generated token has no finite logprob")
    require(not (reply.token_ids < 0).any(), "a token id is below 0")
    require(not (reply.span_versions < 0).any(), "a policy version is below 0")
    require(len(starts) == len(reply.span_versions) > 0, f"{len(starts)} span starts, {len(reply.span_versions)} span versions")
    rising = all(low <= high for low, high in pairwise(starts))
    require(starts[0] == 0 and starts[-1] <= tokens and rising, f"span starts {starts[:8]} do not divide {tokens} tokens")
    require(reply.finish in FINISHES, f"finish is {reply.finish[:60]!r}, expected one of {', '.join(FINISHES)}")
    return reply


def _facts(reply: Reply) -> dict[str, Any]:
    versions = {"policy_version_min": int(reply.span_versions.min()), "policy_version_max": int(reply.span_versions.max())}
    return {**reply.key._asdict(), **versions, "outcome": reply.finish, "worker": reply.worker, "tokens": len(reply.token_ids)}


_FORMAT = Format(CODEC, decode, _facts, (*REQUIRED, "policy-version-min", "policy-version-max"), FINISHES)
encode, headers, outgoing, check, read = _FORMAT.encode, _FORMAT.headers, _FORMAT.outgoing, _FORMAT.check, _FORMAT.read
