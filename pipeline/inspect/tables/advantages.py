"""Advantages of a group's samples as the trainer computes them: NaN for samples that are not trained, none with a reason if unknown."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.pipeline.learner.micro_batches import advantage_function, combined_advantages, sequences
from penstock.topics.groups import Group

Floats = npt.NDArray[np.float32]


class Advantages:
    """The advantage function that a run's configuration names; a function of the user is loaded with `trust_code` only."""

    def __init__(self, config: dict[str, Any], *, trust_code: bool) -> None:
        self.name: str | None = None
        self.why_not: str | None = None
        self._function: Callable[..., Any] | None = None
        self._truncated = "train"
        try:
            self._open(config, trust_code=trust_code)
        except ValueError as error:
            self.why_not = " ".join(str(error).split())

    def of(self, group: Group) -> Floats:
        """[K] advantages, one per sample; NaN for a sample without one."""
        values = np.full(len(group.samples), np.nan, np.float32)
        if self._function is None or not group.samples:
            return values
        try:
            advantage_of = {
                sequence.sample: sequence.advantage for sequence in sequences(group, advantages=self._function, truncated=self._truncated)
            }
        # A user's function may raise any exception.
        except Exception as error:
            self._function, self.why_not = None, f"{self.name} fails: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return values
        for number, sample in enumerate(group.samples):
            values[number] = advantage_of.get(sample.rollout.sample, np.nan)
        return values

    def _open(self, table: dict[str, Any], *, trust_code: bool) -> None:
        from penstock.pipeline.config.load import from_json

        config = from_json(json.dumps(table))
        self.name, self._truncated = config.advantage, config.algorithm.truncated
        if config.algorithm.kl_coef and config.algorithm.kl_in == "reward":
            raise ValueError("rewards were lowered by the KL to the reference, whose logprobs are not in the log (algorithm.kl_in)")
        self._function = combined_advantages(advantage_function(self.name, trust_code=trust_code), combine=config.algorithm.combine)
