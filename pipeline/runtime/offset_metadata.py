"""Typed metadata stored with committed consumer offsets: one JSON object with the fields of one class below.

Malformed metadata are treated as missing; the successor then reads from the start and loses nothing.

| consumer group | topic | class |
|---|---|---|
| `<run>.rollout` | `prompts` | `RolloutOffsetMetadata` |
| `<run>.rollout`, with `environment.carrier = "log"` | `calls` | `CallOffsetMetadata` |
| `<run>.environment` | `prompts` | `RolloutOffsetMetadata` |
| `<run>.scorer` | `prompts` | `ScorerOffsetMetadata` |
| `<run>.feeder` | `prompts` and `groups` | `FeederOffsetMetadata`, the same in every partition |
"""

import json
from typing import NamedTuple, TypeVar


class RolloutOffsetMetadata(NamedTuple):
    """Offset at which the samples of a partition's unfinished prompts start."""

    rollouts: int
    """Offset in `rollouts` of the first sample of the prompts above the committed offset."""


class CallOffsetMetadata(NamedTuple):
    """Offset at which the replies to a partition's unfinished calls start."""

    replies: int
    """Offset in `replies` of the first reply to the calls above the committed offset."""


class ScorerOffsetMetadata(NamedTuple):
    """Finished groups of a partition."""

    below: int
    """Groups below this number have ended."""
    groups: int
    """Offset in `groups` of the first outcome of the other groups."""


class FeederOffsetMetadata(NamedTuple):
    """Counts of the groups before the committed offsets."""

    ended: int
    """Groups below this number have ended."""
    dropped: int
    """Number of them that a scorer dropped."""
    place: int
    """Next position in the order of prompts after those groups."""


Metadata = TypeVar("Metadata", RolloutOffsetMetadata, CallOffsetMetadata, ScorerOffsetMetadata, FeederOffsetMetadata)


def encode(metadata: RolloutOffsetMetadata | CallOffsetMetadata | ScorerOffsetMetadata | FeederOffsetMetadata) -> str:
    return json.dumps(metadata._asdict())


def decode(kind: type[Metadata], text: str) -> Metadata | None:
    """Parse the metadata of a committed offset as an object of class `kind`; None if they are missing or malformed."""
    try:
        fields = json.loads(text)
        numbers = [fields[name] for name in kind._fields]
    except (ValueError, TypeError, KeyError):
        return None
    return kind(*numbers) if all(type(number) is int and number >= 0 for number in numbers) else None
