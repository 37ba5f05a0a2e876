"""Losses, advantages, aggregations and importance-weight corrections by their configuration names; needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.pipeline.algorithms.advantages import ADVANTAGES

__all__ = ["ADVANTAGES", "AGGREGATES", "CORRECTIONS", "LOSSES", "Correction", "Loss"]

AGGREGATES = ("token_mean", "sequence_mean", "constant")
"""Aggregations of token losses: the divisor of a step and the weight of each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A named loss: its function in `SURROGATES` and its default settings."""

    surrogate: str
    advantage: str = "grpo"
    aggregate: str = "sequence_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = 3.0
    """Upper bound of the ratio for negative advantages (arXiv 1912.09729); None for a loss that bounds it itself."""


LOSSES: Mapping[str, Loss] = {
    # One function with different arguments: GRPO (arXiv 2402.03300), Dr. GRPO (arXiv 2503.20783), DAPO (arXiv 2503.14476).
    "grpo": Loss(surrogate="clip"),
    "dr_grpo": Loss(surrogate="clip", advantage="dr_grpo", aggregate="constant"),
    "dapo": Loss(surrogate="clip", aggregate="token_mean", clip_high=0.28),
    # GSPO (arXiv 2507.18071) clips a sequence's mean ratio, which is far closer to 1 than a token's.
    "gspo": Loss(surrogate="gspo", clip_low=3e-4, clip_high=4e-4),
    # SAPO (arXiv 2511.20347) has a soft gate instead of a clip range.
    "sapo": Loss(surrogate="sapo", clip_dual=None),
    # CISPO (arXiv 2506.13585) has no lower bound; weights are clamped at 1 + 4 = 5 (arXiv 2509.19128).
    "cispo": Loss(surrogate="cispo", aggregate="token_mean", clip_low=1.0, clip_high=4.0, clip_dual=None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A named correction by the ratio w = proximal / behaviour, truncated or masked outside [low, high]."""

    unit: Literal["token", "sequence", "geometric"]
    """w of one token, the product over a sequence's trained tokens, or their geometric mean, which does not depend on the length."""
    masks: bool
    """True: weight 0 outside the bounds. False: w is truncated at `high`, and `low` is not used."""
    low: float
    high: float


CORRECTIONS: Mapping[str, Correction] = {
    # "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao et al. 2025), with PipelineRL's cap (arXiv 2509.19128).
    "tis": Correction(unit="token", masks=False, low=0.0, high=5.0),
    # By sequence, and masks: "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch" (Liu et al. 2025).
    "sequence_tis": Correction(unit="sequence", masks=False, low=0.0, high=5.0),
    "mis": Correction(unit="token", masks=True, low=0.0, high=5.0),
    "sequence_mis": Correction(unit="sequence", masks=True, low=0.0, high=5.0),
    # By the geometric mean, as GSPO's ratio (arXiv 2507.18071): near 1 at every length.
    "geometric_tis": Correction(unit="geometric", masks=False, low=0.0, high=2.0),
    "geometric_mis": Correction(unit="geometric", masks=True, low=0.9, high=1.1),
    # IcePop masks on both sides ("Every Step Evolves", arXiv 2510.18855).
    "icepop": Correction(unit="token", masks=True, low=0.5, high=5.0),
}
