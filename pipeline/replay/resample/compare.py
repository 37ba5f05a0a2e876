"""A sample that was drawn again, token by token against the recorded one.

The rule: pure. Only tokens that both have are compared, and a token that was recorded under another version than the one drawn with now
is no difference: it could not be the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.infra.engines.base import Completion
from penstock.topics.rollouts import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class ResampledCompletion:
    """One sample, recorded and drawn again."""

    group: int
    sample: int
    version: int
    """The policy version it was drawn under now."""
    recorded_versions: tuple[int, ...]
    comparable: int
    """Recorded tokens, from the first one on, that were drawn under `version`."""
    recorded: tuple[int, ...]
    """Token ids."""
    drawn: tuple[int, ...]
    first_difference: int | None
    """Place of the first token that differs, among the comparable ones; None where all are equal."""
    logprob_difference: float
    """[nats] largest difference of the behaviour logprobs before the first token that differs; 0 without one in common."""

    @property
    def same(self) -> bool:
        """True if every comparable token is the recorded one."""
        return self.first_difference is None


def compare(recorded: Rollout, drawn: Completion, *, version: int) -> ResampledCompletion:
    """The two as one finding.

    Recorded tokens count up to the first that was drawn under another version than `version`; all of them where none was drawn under it,
    as when another version was asked for on purpose.
    """
    before, now = recorded.token_ids, drawn.token_ids
    versions = recorded.token_versions
    other = np.flatnonzero(versions != version)
    comparable = int(other[0]) if len(other) and other[0] else len(before)
    common = min(comparable, len(now))
    differing = np.flatnonzero(before[:common] != now[:common])
    first = int(differing[0]) if len(differing) else None
    if first is None and len(now) != comparable and (len(now) < comparable or comparable == len(before)):
        first = common  # one of the two ended here, the other went on
    alike = common if first is None else first
    gaps = np.abs(recorded.behaviour_logprobs[:alike] - drawn.logprobs[:alike])
    return ResampledCompletion(
        group=recorded.group,
        sample=recorded.sample,
        version=version,
        recorded_versions=tuple(int(one) for one in recorded.span_versions),
        comparable=comparable,
        recorded=tuple(before.tolist()),
        drawn=tuple(now.tolist()),
        first_difference=first,
        logprob_difference=float(np.nanmax(gaps)) if len(gaps) and not np.isnan(gaps).all() else 0.0,
    )


def summary(samples: Sequence[ResampledCompletion]) -> dict[str, float | int]:
    """Counts over all samples."""
    tokens = sum(sample.comparable for sample in samples)
    equal = sum(sample.comparable if sample.first_difference is None else sample.first_difference for sample in samples)
    return {
        "samples": len(samples),
        "same_samples": sum(sample.same for sample in samples),
        "tokens": tokens,
        "tokens_before_a_difference": equal,
        "samples_of_several_versions": sum(len(set(sample.recorded_versions)) > 1 for sample in samples),
        "logprob_difference_max": max((sample.logprob_difference for sample in samples), default=0.0),
    }
