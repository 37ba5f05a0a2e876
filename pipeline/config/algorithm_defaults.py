"""Defaults that depend on the schedule: the proximal policy and the correction of a lag."""

from penstock.pipeline.config.schema import AlgorithmSection
from penstock.pipeline.scheduling.schedule import Schedule


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
