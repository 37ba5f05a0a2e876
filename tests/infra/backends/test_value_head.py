"""The value head of the torch backend: it learns beside the policy and changes nothing of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.infra.backends.base import TokenBatch
from penstock.infra.backends.registry import open_backend
from penstock.infra.tensors.stream import digest
from penstock.pipeline.algorithms.losses import batch_loss
from tests.support.training import batch_of, save_tiny_model

pytestmark = pytest.mark.costly  # imports transformers


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def step(backend: Any, number: int, *, subtract: bool) -> tuple[Any, dict[str, float]]:
    """One step on two micro-batches; without `subtract` the policy's loss ignores the values."""
    sums: dict[str, float] = {}
    for batch in (batch_of(2 * number), batch_of(2 * number + 1)):

        def loss(logprobs: torch.Tensor, values: Any = None, batch: TokenBatch = batch) -> Any:
            policy, stats = batch_loss(logprobs, batch, values=values if subtract else None)
            if values is not None and not subtract:
                fitted, stats = batch_loss(logprobs.detach(), batch, values=values)
                policy = policy + fitted - fitted.detach()
            return policy, stats

        for name, value in backend.backward(batch, loss).items():
            sums[name] = sums.get(name, 0.0) + value
    return backend.step(denominator=sums["tokens"]), sums


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"lora_rank": 2}])
def test_a_value_head_changes_no_bit_of_a_policy_that_does_not_subtract_it(model_path: str, settings: dict[str, Any]) -> None:
    ends = []
    for value_lr in (None, 1e-2):
        backend = open_backend("torch", model_path=model_path, lr=1e-2, value_lr=value_lr, **settings)
        norms = [step(backend, number, subtract=False)[0].grad_norm for number in range(3)]
        ends.append((norms, digest(backend.weights())))
        backend.close()
    assert ends[0] == ends[1]


def test_the_values_learn_the_advantages_and_go_on_bit_for_bit_from_a_saved_state(model_path: str, tmp_path: Path) -> None:
    backend = open_backend("torch", model_path=model_path, lr=1e-9, value_lr=3e-2)
    errors = [step(backend, 0, subtract=True)[1]["value_error_sum"] for _ in range(60)]
    assert errors[-1] < 0.5 * errors[0]
    backend.save(tmp_path)
    through = [step(backend, number, subtract=True) for number in range(3)]
    fresh = open_backend("torch", model_path=model_path, lr=1e-9, value_lr=3e-2)
    fresh.load(tmp_path)
    assert [step(fresh, number, subtract=True) for number in range(3)] == through


def test_the_loss_takes_the_advantage_less_the_value_and_the_head_their_difference() -> None:
    batch = batch_of(5)
    logprobs = torch.full(batch.completion_mask.shape, -1.0, requires_grad=True)
    values = torch.tensor(np.random.default_rng(0).normal(size=logprobs.shape), dtype=torch.float32, requires_grad=True)
    loss, stats = batch_loss(logprobs, batch, values=values)
    loss.backward()
    mask, advantages = torch.from_numpy(batch.completion_mask), torch.from_numpy(batch.advantages)[:, None]
    torch.testing.assert_close(logprobs.grad, torch.where(mask, values.detach() - advantages, 0.0))
    torch.testing.assert_close(values.grad, torch.where(mask, values.detach() - advantages, 0.0))
    assert float(loss.detach()) == pytest.approx(float((values.detach() - advantages)[mask].sum()), rel=1e-5)
    assert stats["value_target_sum"] == pytest.approx(float((advantages.square() * mask).sum()), rel=1e-5)
