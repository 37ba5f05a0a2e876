"""State of a checkpoint, its comparison with the ledger, and the choice of checkpoints to keep."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A run's position at a checkpoint; all other counters follow from the ledger up to there."""

    run: str
    steps: int
    """Optimizer steps done."""
    version: int
    """The newest published version."""
    digest: str
    """Digest of the weights."""
    seq: int
    """Number of the ledger's last entry when the checkpoint was started."""


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
    """Reason why a complete checkpoint does not belong to this ledger, or None."""
    if state.run != recorded.run:
        return f"it is of run {state.run}"
    if state.steps > recorded.steps or state.seq >= recorded.seq:
        return f"it is beyond the ledger, which ends at step {recorded.steps} (entry {recorded.seq}; the checkpoint has entry {state.seq})"
    if state.steps not in recorded.digests:
        return "the ledger does not record it"
    if state.digest not in recorded.digests[state.steps]:
        return f"its weights have the digest {state.digest[:16]}…, recorded is {min(recorded.digests[state.steps])[:16]}…"
    if state.version not in recorded.versions:
        return f"version {state.version} was never published"
    return None


def to_keep(steps: Collection[int], *, keep_last: int, keep_every: int | None = None, best: int | None = None) -> set[int]:
    """The checkpoints to keep: the newest `keep_last`, those at multiples of `keep_every` steps, and the best.

    Example:
        to_keep({10, 20, 30, 40}, keep_last=1, keep_every=20, best=10)  # -> {10, 20, 40}
    """
    selected = {*sorted(steps)[-keep_last:], *(number for number in steps if keep_every and number % keep_every == 0)}
    return selected | {number for number in steps if number == best}
