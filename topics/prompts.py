"""`prompts`: one prompt group to be sampled `samples_per_prompt` times. Feeder -> rollout workers, scorers."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.topics.wire.checked import json_object, json_objects, require_whole
from penstock.topics.wire.codec import Codec, Format
from penstock.topics.wire.columns import Int32s, Payload
from penstock.topics.wire.errors import require
from penstock.topics.wire.fields import ByValue, fields_of
from penstock.topics.wire.headers import Headers

SCHEMA = "prompts/1"
MAX_SAMPLES = 1 << 20
"""Largest number of samples of one prompt."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt(ByValue):
    """An admitted prompt group."""

    group: int
    slot: int
    """Groups admitted minus groups dropped before this one."""
    min_version: int
    """The oldest policy version it may be sampled from."""
    samples_per_prompt: int
    epoch: int
    row: int
    """Index of its row in the data set."""
    prompt: str
    """The text the model gets, chat template included."""
    messages: str | None
    """JSON list of chat messages; `None` for a plain text prompt."""
    token_ids: Int32s
    """[L] the prompt's tokens; no reader tokenizes it again."""
    columns: str
    """JSON object: the row's other columns, for the reward functions."""
    created_ns: int
    place: int | None = None
    """Index in the order of prompts; `None` in records of earlier releases, whose index is the group's number."""
    again: int | None = None
    """The abandoned group that this one retries."""


CODEC = Codec(SCHEMA, fields=fields_of(Prompt))


def decode(value: Payload) -> Prompt:
    """Return the prompt in a payload. Raises `Unusable`."""
    (row,) = CODEC.decode(value)
    require_whole(row, "group", "slot", "min_version", "epoch", "row", "created_ns", "place", "again")
    require_whole(row, "samples_per_prompt", most=MAX_SAMPLES)
    require(not (row["token_ids"] < 0).any(), "a token id is below 0")
    json_object(row["columns"], "columns")
    if row["messages"] is not None:
        json_objects(row["messages"], "messages")
    return Prompt(**row)


def _facts(prompt: Prompt) -> dict[str, Any]:
    return {"group": prompt.group, "policy_version_min": prompt.min_version, "attempt": None if prompt.again is None else 1}


def unread(headers: Headers, *, samples: int, created_ns: int) -> Prompt:
    """Return a prompt from checked headers alone, to write its group's outcome if its payload must not be decoded."""
    assert headers.group is not None and headers.policy_version_min is not None
    return Prompt(
        group=headers.group, slot=0, min_version=headers.policy_version_min, samples_per_prompt=samples, epoch=0, row=0, prompt="",
        messages=None, token_ids=np.empty(0, np.int32), columns="{}", created_ns=created_ns,
    )  # fmt: skip


_FORMAT = Format(CODEC, decode, _facts, ("group", "policy-version-min"))
encode, headers, outgoing, check, read = _FORMAT.encode, _FORMAT.headers, _FORMAT.outgoing, _FORMAT.check, _FORMAT.read
