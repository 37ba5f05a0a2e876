"""What a checkpoint says of itself, whether that agrees with the ledger, and which checkpoints are kept.

The rule: pure functions of numbers and digests.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A run's position at a checkpoint; every other counter follows from the ledger up to here."""

    run: str
    steps: int
    """Optimizer steps done."""
    version: int
    """The newest published version."""
    digest: str
    """Digest of the weights."""
    seq: int
    """Number of the ledger's last entry when the checkpoint was begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The ledger's record of a run, with which a checkpoint has to agree."""

    run: str
    steps: int
    """Committed steps."""
    seq: int
    versions: Collection[int]
    """Published versions."""
    digests: Mapping[int, Collection[str]]
    """Steps done -> digests of the checkpoints recorded at that point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best evaluated checkpoint so far."""

    steps: int
    accuracy: float
    """Greedy accuracy on the held-out prompts."""


def objection(state: State, recorded: Recorded) -> str | None:
    """Return why a whole checkpoint does not belong to this ledger; None when it does."""
    if state.run != recorded.run:
        return f"it is of run {state.run}"
    if state.steps > recorded.steps or state.seq >= recorded.seq:
        return (
            f"it is beyond the ledger, which ends at step {recorded.steps} (entry {recorded.seq}; the checkpoint was begun at {state.seq})"
        )
    if state.steps not in recorded.digests:
        return "the ledger does not know it"
    if state.digest not in recorded.digests[state.steps]:
        return f"its weights have the digest {state.digest[:16]}…, in the ledger stands {min(recorded.digests[state.steps])[:16]}…"
    if state.version not in recorded.versions:
        return f"version {state.version} was never published"
    return None


def to_keep(steps: Collection[int], *, keep_last: int, keep_every: int | None = None, best: int | None = None) -> set[int]:
    """Return the checkpoints to keep: the newest `keep_last`, those whose number of steps is a multiple of `keep_every`, and the best.

    Example:
        to_keep({10, 20, 30, 40}, keep_last=1, keep_every=20, best=10)  # -> {10, 20, 40}
    """
    wanted = {*sorted(steps)[-keep_last:], *(number for number in steps if keep_every and number % keep_every == 0)}
    return wanted | {number for number in steps if number == best}
