"""A step of a user's own loss: the learner divides its sum, whatever the function reports."""

from pathlib import Path

import pytest

from penstock.pipeline.learner.train_step import Objective, Step
from penstock.pipeline.runtime.factories import make_backend
from tests.support.trainer_alone import config_for, group_of

OWN = """
import torch

def summed(logprobs, batch, **_):
    mask = torch.as_tensor(batch.completion_mask)
    return torch.where(mask, logprobs * 0 + 1, 0.0).sum(), {}
"""


@pytest.mark.parametrize(("aggregate", "loss"), [("token_mean", 1.0), ("sequence_mean", 6.0)])
def test_the_sum_of_an_own_loss_is_divided_by_what_the_learner_counts(
    tiny_model: Path, tmp_path: Path, aggregate: str, loss: float
) -> None:
    """Two groups of two samples of six tokens, a loss of 1 for each token and no statistics at all."""
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    config = config_for(tiny_model, tmp_path, algorithm={"loss": f"{tmp_path}/own.py:summed", "aggregate": aggregate})
    backend = make_backend(config, steps=1)
    step = Step(backend, Objective.of(config), number=0)
    for number in range(2):
        step.add(group_of(number, version=0))
    outcome = step.finish(learner_version=0)
    backend.close()
    assert (outcome.metrics["tokens"], outcome.loss) == (24.0, loss)
