"""What a worker leaves to its successor beside a committed offset: one JSON object with the fields of one class below.

The rule: a note that is missing, torn or of another shape counts as none; the successor then reads from the beginning and loses nothing.

| consumer group | topic with the note | class |
|---|---|---|
| `<run>.rollout` | `prompts` | `RolloutOffsetMetadata` |
| `<run>.rollout`, with `environment.carrier = "log"` | `calls` | `CallNote` |
| `<run>.environment` | `prompts` | `RolloutOffsetMetadata` |
| `<run>.scorer` | `prompts` | `ScorerNote` |
| `<run>.feeder` | `prompts` and `groups` | `FeederNote`, the same in every partition |
"""

import json
from typing import NamedTuple, TypeVar


class RolloutOffsetMetadata(NamedTuple):
    """What a worker that takes prompts knows of the partition's samples."""

    rollouts: int
    """Offset in `rollouts` from which the samples of the prompts above the committed one are found."""


class CallOffsetMetadata(NamedTuple):
    """What a rollout worker knows of the partition's replies."""

    replies: int
    """Offset in `replies` from which the replies to the calls above the committed one are found."""


class ScorerOffsetMetadata(NamedTuple):
    """What a scorer knows of the partition's finished groups."""

    below: int
    """Groups below this number have ended."""
    groups: int
    """Offset in `groups` from which the outcomes of the others are found."""


class FeederOffsetMetadata(NamedTuple):
    """What the feeder has counted of the groups before the committed offsets."""

    ended: int
    """Groups below this number have ended."""
    dropped: int
    """How many of them a scorer dropped."""
    place: int
    """Where in the order of prompts the next one stands, as far as those groups tell."""


Note = TypeVar("Note", RolloutOffsetMetadata, CallOffsetMetadata, ScorerOffsetMetadata, FeederOffsetMetadata)


def encode(note: RolloutOffsetMetadata | CallOffsetMetadata | ScorerOffsetMetadata | FeederOffsetMetadata) -> str:
    """The note as commit metadata.

    Example:
        encode(RolloutOffsetMetadata(rollouts=7))  # -> '{"rollouts": 7}'
    """
    return json.dumps(note._asdict())


def decode(kind: type[Note], text: str) -> Note | None:
    """The note in commit metadata; None where there is none that can be used."""
    try:
        fields = json.loads(text)
        numbers = [fields[name] for name in kind._fields]
    except (ValueError, TypeError, KeyError):
        return None
    return kind(*numbers) if all(type(number) is int and number >= 0 for number in numbers) else None
