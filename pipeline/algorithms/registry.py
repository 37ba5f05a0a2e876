"""The losses, advantages, aggregations and importance-weight corrections by the names that a configuration gives them; needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.pipeline.algorithms.advantages import ADVANTAGES

__all__ = ["ADVANTAGES", "AGGREGATES", "CORRECTIONS", "LOSSES", "Correction", "Loss"]

AGGREGATES = ("token_mean", "sequence_mean", "constant")
"""How token losses become one number: what a step is divided by, and what each token counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A named loss: its function in `SURROGATES`, and the settings it has where the configuration gives none."""

    surrogate: str
    advantage: str = "grpo"
    aggregate: str = "sequence_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = 3.0
    """Bound of the ratio where the advantage is negative (arXiv 1912.09729); None for a loss that bounds it by itself."""


LOSSES: Mapping[str, Loss] = {
    # One function, other arguments: GRPO (arXiv 2402.03300), Dr. GRPO (arXiv 2503.20783), DAPO (arXiv 2503.14476).
    "grpo": Loss(surrogate="clip"),
    "dr_grpo": Loss(surrogate="clip", advantage="dr_grpo", aggregate="constant"),
    "dapo": Loss(surrogate="clip", aggregate="token_mean", clip_high=0.28),
    # GSPO (arXiv 2507.18071) clips a sequence's mean ratio, which is far closer to 1 than a token's.
    "gspo": Loss(surrogate="gspo", clip_low=3e-4, clip_high=4e-4),
    # SAPO (arXiv 2511.20347) has a soft gate in the place of a clip range.
    "sapo": Loss(surrogate="sapo", clip_dual=None),
    # CISPO (arXiv 2506.13585) has no lower bound; weights are cut at 1 + 4 = 5 (arXiv 2509.19128).
    "cispo": Loss(surrogate="cispo", aggregate="token_mean", clip_low=1.0, clip_high=4.0, clip_dual=None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What one named correction does with the ratio w = proximal / behaviour; outside [low, high] it is cut or masked."""

    unit: Literal["token", "sequence", "geometric"]
    """Whose ratio w is: one token's, the product over a sequence's trained tokens, or their geometric mean, which has no length in it."""
    masks: bool
    """Outside the bounds: weight 0. Otherwise w is cut down to `high`, and `low` is not used."""
    low: float
    high: float


CORRECTIONS: Mapping[str, Correction] = {
    # "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao et al. 2025), with PipelineRL's cap (arXiv 2509.19128).
    "tis": Correction(unit="token", masks=False, low=0.0, high=5.0),
    # By sequence, and masks: "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch" (Liu et al. 2025).
    "sequence_tis": Correction(unit="sequence", masks=False, low=0.0, high=5.0),
    "mis": Correction(unit="token", masks=True, low=0.0, high=5.0),
    "sequence_mis": Correction(unit="sequence", masks=True, low=0.0, high=5.0),
    # The same by the geometric mean, as GSPO's ratio (arXiv 2507.18071): near 1 at every length.
    "geometric_tis": Correction(unit="geometric", masks=False, low=0.0, high=2.0),
    "geometric_mis": Correction(unit="geometric", masks=True, low=0.9, high=1.1),
    # IcePop masks on both sides ("Every Step Evolves", arXiv 2510.18855).
    "icepop": Correction(unit="token", masks=True, low=0.5, high=5.0),
}
