"""What absent keys of `[algorithm]` stand for where that depends on the schedule and on the number formats: proximal policy, correction.

The rule: a run keeps the edition of the defaults it was created with (`algorithm.defaults`), so that its record means the same for ever.
"""

from penstock.pipeline.config.schema import AlgorithmSection
from penstock.pipeline.scheduling.schedule import Schedule


def proximal_of(algorithm: AlgorithmSection, rules: Schedule, *, rounded: bool) -> str:
    """Which logprobs the ratio is taken against: what is configured, else what fits.

    `current`, or at S > 1 `snapshot`, where a correction weighs what lies between it and the behaviour policy, and for GSPO, whose clip
    range is narrower than the engine's rounding. CISPO's ratio is such a weight itself: it is taken against the behaviour policy.
    `rounded`: engine or trainer computes in bfloat16, so that they differ at equal weights.
    """
    if algorithm.proximal is not None:
        return algorithm.proximal
    if algorithm.defaults == 1:
        return _proximal_1(algorithm, rules)
    apart = "current" if rules.steps_per_version == 1 else "snapshot"
    differs = rules.max_lag > 0 or rounded
    if algorithm.loss == "cispo" and algorithm.correction in (None, "none"):
        return "behaviour"
    if algorithm.correction != "none" and (differs or algorithm.correction is not None):
        return apart
    return apart if algorithm.loss == "gspo" or (rules.max_lag == 0 and apart == "current") else "behaviour"


def correction_of(algorithm: AlgorithmSection, rules: Schedule, *, rounded: bool) -> str:
    """What bounds the weight proximal / behaviour: what is configured, else truncation where the two differ and no ratio corrects it."""
    if algorithm.correction is not None:
        return algorithm.correction
    differs = rules.max_lag > 0 or (rounded and algorithm.defaults > 1)
    if not differs or proximal_of(algorithm, rules, rounded=rounded) == "behaviour":
        return "none"
    if algorithm.loss == "gspo":
        return "sequence_tis" if algorithm.defaults == 1 else "geometric_tis"
    return "tis"


def _proximal_1(algorithm: AlgorithmSection, rules: Schedule) -> str:
    """The first edition: the clip range lies around the behaviour policy, also under a lag."""
    corrected = algorithm.correction not in (None, "none") or (algorithm.loss == "gspo" and rules.max_lag > 0)
    if rules.steps_per_version == 1:
        return "current" if corrected or rules.max_lag == 0 else "behaviour"
    return "snapshot" if corrected else "behaviour"
