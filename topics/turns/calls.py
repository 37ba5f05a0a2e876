"""`calls`: one generation request: the full context as token ids, plus sampling parameters. Environment workers -> rollout workers.

Group, sample, turn, attempt and the SHA-256 of its context identify a call; a call with a recorded reply is never sampled again."""

import hashlib
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from penstock.topics.wire.checked import require_names, require_whole
from penstock.topics.wire.codec import Codec, Format
from penstock.topics.wire.columns import Int32s, Payload
from penstock.topics.wire.errors import require
from penstock.topics.wire.fields import ByValue, fields_of
from penstock.topics.wire.headers import Headers

SCHEMA = "calls/1"
REQUIRED = ("group", "sample", "turn", "attempt", "sha256")


class TurnKey(NamedTuple):
    """Identity of a call and its reply."""

    group: int
    sample: int
    turn: int
    attempt: int
    sha256: str
    """SHA-256 (hex) of the context."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call(ByValue):
    """A request to generate one turn of a trajectory."""

    group: int
    sample: int
    turn: int
    """Counts the model's turns of the trajectory from 0."""
    attempt: int
    """Above 0 if the turn is to be sampled again although it has a reply."""
    min_version: int
    """The oldest policy version that it may be sampled from."""
    token_ids: Int32s
    """[L] the full context."""
    stream: int
    """Seeds its random numbers, together with the run's seed."""
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    """0 if there is no limit."""
    seeded: int
    """1 if its random numbers follow from `stream`, 0 if they are not reproducible."""
    asked_ns: int
    worker: str
    """The environment worker."""

    @property
    def key(self) -> TurnKey:
        """Identity of the call; computing it hashes the context."""
        sha256 = hashlib.sha256(np.ascontiguousarray(self.token_ids, "<i4").tobytes()).hexdigest()
        return TurnKey(self.group, self.sample, self.turn, self.attempt, sha256)


CODEC = Codec(SCHEMA, fields=fields_of(Call))


def decode(value: Payload) -> Call:
    """Return the call in a payload. Raises `Unusable`."""
    (row,) = CODEC.decode(value)
    require(len(row["token_ids"]) > 0, "the context is empty")
    require(not (row["token_ids"] < 0).any(), "a token id is below 0")
    require_whole(row, "group", "sample", "turn", "attempt", "min_version", "max_new_tokens", "top_k", "seeded", "asked_ns")
    require_names(row, "worker")
    sound = 0.0 <= row["temperature"] < math.inf and 0.0 <= row["top_p"] <= 1.0
    require(sound, f"temperature is {row['temperature']}, top_p {row['top_p']}")
    return Call(**row)


def _facts(call: Call) -> dict[str, Any]:
    return {**call.key._asdict(), "policy_version_min": call.min_version, "worker": call.worker, "tokens": len(call.token_ids)}


def key_of(claims: Headers) -> TurnKey:
    """Return the identity of a call or reply from its checked headers."""
    group, sample, turn, attempt, sha256 = claims.group, claims.sample, claims.turn, claims.attempt, claims.sha256
    assert group is not None and sample is not None and turn is not None and attempt is not None and sha256 is not None
    return TurnKey(group, sample, turn, attempt, sha256)


_FORMAT = Format(CODEC, decode, _facts, (*REQUIRED, "policy-version-min"))
encode, headers, outgoing, check, read = _FORMAT.encode, _FORMAT.headers, _FORMAT.outgoing, _FORMAT.check, _FORMAT.read
