"""The losses by name, and which of a policy's three logprobs a run uses, from what its configuration says and leaves out.

The rule: what deviates from the behaviour policy is corrected exactly once; settings that would correct twice are refused.
"""

from collections.abc import Mapping
from typing import Any

from penstock.pipeline.algorithms.advantages import ADVANTAGES
from penstock.pipeline.config.plugins import nearest
from penstock.pipeline.config.schema import AlgorithmSection
from penstock.pipeline.scheduling.schedule import Schedule

LOSSES: Mapping[str, Mapping[str, Any]] = {
    # One function, other arguments: GRPO (arXiv 2402.03300), Dr. GRPO (arXiv 2503.20783), DAPO (arXiv 2503.14476).
    "grpo": {"surrogate": "clip", "advantage": "grpo", "aggregate": "sequence_mean", "clip_low": 0.2, "clip_high": 0.2},
    "dr_grpo": {"surrogate": "clip", "advantage": "dr_grpo", "aggregate": "constant", "clip_low": 0.2, "clip_high": 0.2},
    "dapo": {"surrogate": "clip", "advantage": "grpo", "aggregate": "token_mean", "clip_low": 0.2, "clip_high": 0.28},
    # GSPO (arXiv 2507.18071) clips a sequence's mean ratio, which is far closer to 1 than a token's.
    "gspo": {"surrogate": "gspo", "advantage": "grpo", "aggregate": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
    # CISPO (arXiv 2506.13585) has no lower bound; weights are cut at 1 + 4 = 5 (arXiv 2509.19128).
    "cispo": {"surrogate": "cispo", "advantage": "grpo", "aggregate": "token_mean", "clip_low": 1.0, "clip_high": 4.0},
}


def proximal_of(algorithm: AlgorithmSection, rules: Schedule) -> str:
    """Which logprobs the ratio is taken against: what is configured, else what fits.

    `behaviour` corrects a lag by the ratio itself. `current`, or at S > 1 `snapshot`, holds where there is no lag within a step, where a
    correction is asked for, and for GSPO under a lag, whose narrow clip range would cut off whatever has moved since it was sampled.
    """
    if algorithm.proximal is not None:
        return algorithm.proximal
    corrected = algorithm.correction not in (None, "none") or (algorithm.loss == "gspo" and rules.max_lag > 0)
    if rules.steps_per_version == 1:
        return "current" if corrected or rules.max_lag == 0 else "behaviour"
    return "snapshot" if corrected else "behaviour"


def correction_of(algorithm: AlgorithmSection, rules: Schedule) -> str:
    """What bounds the weight proximal / behaviour: what is configured, else truncation where there is a lag that no ratio corrects."""
    if algorithm.correction is not None:
        return algorithm.correction
    if proximal_of(algorithm, rules) == "behaviour" or rules.max_lag == 0:
        return "none"
    return "sequence_tis" if algorithm.loss == "gspo" else "tis"


def check(algorithm: AlgorithmSection, rules: Schedule) -> None:
    """Raise `ValueError`, one line that says what to set, for names that are unknown and settings that make no sense together."""
    for key, known in (("loss", LOSSES), ("advantage", ADVANTAGES)):
        name = getattr(algorithm, key)
        if name is not None and name not in known and ":" not in name:
            raise ValueError(f"algorithm.{key}: {name!r} is none of {', '.join(known)} and no package:function{nearest(name, known)}")
    per_version, correction = rules.steps_per_version, correction_of(algorithm, rules)
    if algorithm.proximal == "current" and per_version != 1:
        raise ValueError(f"algorithm.proximal: 'current' needs schedule.steps_per_version = 1, not {per_version}; use 'snapshot'")
    if algorithm.proximal == "snapshot" and per_version == 1:
        raise ValueError("algorithm.proximal: 'snapshot' is the current policy at schedule.steps_per_version = 1; use 'current'")
    if algorithm.proximal == "behaviour" and correction != "none":
        instead = "current" if per_version == 1 else "snapshot"
        raise ValueError(
            f"algorithm.correction: {correction!r} would correct twice: the ratio to the behaviour policy does it already, and all weights "
            f"would be 1; set algorithm.proximal = {instead!r}"
        )
    _check_bounds(algorithm, correction)


def _check_bounds(algorithm: AlgorithmSection, correction: str) -> None:
    for key in ("correction_low", "correction_high"):
        value = getattr(algorithm, key)
        if value is not None and correction == "none":
            raise ValueError(f"algorithm.{key}: {value} bounds nothing without a correction; set algorithm.correction, for example 'tis'")
    if algorithm.correction_low is not None and correction in ("tis", "sequence_tis"):
        masking = "mis" if correction == "tis" else "sequence_mis"
        raise ValueError(
            f"algorithm.correction_low: {algorithm.correction_low} has no use, {correction!r} cuts from above only; leave it out, "
            f"or set algorithm.correction = {masking!r}"
        )
