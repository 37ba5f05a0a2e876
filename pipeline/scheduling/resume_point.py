"""What a step's entry carries beside its plan: where the run stood when the step was committed.

The rule: a mark only says where to look and what need not be looked at. A restarted trainer reads the end of the ledger by it, a feeder
without a note of its own counts on from it, and the tracker deletes nothing that it names.
"""

import json
from dataclasses import asdict, dataclass

from penstock.topics.ledger import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where the run stood when a step was committed."""

    below: int
    """Every group with a lower number had ended: it was trained or dropped."""
    settled: tuple[int, ...]
    """Groups from there on that were trained or found too old."""
    drops: int
    """Dropped groups, without those from `below` on that only their outcome says to be dropped."""
    dropped: int
    """All groups dropped."""
    positions: dict[str, int]
    """"TOPIC/PARTITION" -> offset of the first record that has to be read again."""
    checkpoints: tuple[tuple[int, int], ...]
    """Steps done at a checkpoint, and offset of the ledger's entry that committed the last of them; newest first."""
    manifests: int
    """Offset in partition 0 of `weights` of the oldest manifest that is needed beside that of version 0."""
    version: int
    """Its version."""
    rebased: int | None
    """Offset of the ledger's newest entry that says how the arithmetic has changed."""
    rewards: tuple[float, ...] = ()
    """Lowest and highest reward seen; empty before any."""

    def to_json(self) -> str:
        """The details of a step's entry."""
        return json.dumps({"resume": asdict(self)}, separators=(",", ":"))


def resume_point_of(entry: Entry) -> ResumePoint | None:
    """The mark in a step's entry; None without one that can be read."""
    try:
        fields = json.loads(entry.details or "")["resume"]
        checkpoints = tuple((int(steps), int(offset)) for steps, offset in fields.pop("checkpoints"))
        rewards = tuple(map(float, fields.pop("rewards", ())))
        return ResumePoint(checkpoints=checkpoints, settled=tuple(fields.pop("settled")), rewards=rewards, **fields)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
