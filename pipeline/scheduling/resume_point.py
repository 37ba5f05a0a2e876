"""Resume points: the position of the run in its topics, stored in each step's ledger entry.

A restarted trainer reads the ledger from it, a feeder without offset metadata continues its counts, and the tracker deletes no record
that it names.
"""

import json
from dataclasses import asdict, dataclass

from penstock.topics.ledger import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Position of the run when a step was committed."""

    below: int
    """Every group with a lower number was trained or dropped."""
    settled: tuple[int, ...]
    """Groups from `below` on that were trained or stale."""
    drops: int
    """Number of dropped groups, without those from `below` on whose outcome is read again."""
    dropped: int
    """Number of groups dropped so far."""
    positions: dict[str, int]
    """"TOPIC/PARTITION" -> offset of the first record that has to be read again."""
    checkpoints: tuple[tuple[int, int], ...]
    """Steps done at each checkpoint, and offset of the ledger entry of its last step; newest first."""
    manifests: int
    """Offset in partition 0 of `weights` of the oldest needed manifest, apart from that of version 0."""
    version: int
    """Policy version of the manifest at this offset."""
    rebased: int | None
    """Ledger offset of the newest entry about changed arithmetic."""
    rewards: tuple[float, ...] = ()
    """Lowest and highest reward seen; empty before any."""

    def to_json(self, **others: object) -> str:
        """The details of a step's ledger entry: this resume point and `others`."""
        return json.dumps({"resume": asdict(self), **others}, separators=(",", ":"))


def without_resume_point(details: str | None) -> str | None:
    """The details of a ledger entry without its resume point, whose offsets are valid on one cluster only."""
    try:
        fields = json.loads(details or "")
    except ValueError:
        return details
    if not isinstance(fields, dict) or "resume" not in fields:
        return details
    return json.dumps({name: value for name, value in fields.items() if name != "resume"}, separators=(",", ":"))


def resume_point_of(entry: Entry) -> ResumePoint | None:
    """The resume point in a step's entry; None if there is no valid one."""
    try:
        fields = json.loads(entry.details or "")["resume"]
        checkpoints = tuple((int(steps), int(offset)) for steps, offset in fields.pop("checkpoints"))
        rewards = tuple(map(float, fields.pop("rewards", ())))
        return ResumePoint(checkpoints=checkpoints, settled=tuple(fields.pop("settled")), rewards=rewards, **fields)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
