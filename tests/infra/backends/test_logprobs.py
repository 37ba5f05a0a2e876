"""From logits to the log-probabilities of what was drawn."""

import math

import pytest
import torch

from penstock.infra.backends import forward
from penstock.infra.backends.forward import token_entropy, token_logprobs


@pytest.mark.parametrize("chunk", [3, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_logprobs_and_their_gradient_equal_log_softmax(monkeypatch, chunk, dtype):
    monkeypatch.setattr(forward, "CHUNK_ELEMENTS", chunk)
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 11, generator=random).to(dtype)
    ids = torch.randint(0, 11, (2, 5), generator=random)
    temperature = torch.tensor([[0.5], [1.5]])
    upstream = torch.randn(2, 5, generator=random)

    mine = logits.clone().requires_grad_()
    got = token_logprobs(mine, ids, temperature)
    (got * upstream).sum().backward()
    theirs = logits.clone().requires_grad_()
    expected = torch.log_softmax(theirs.float() / temperature[..., None], -1).gather(-1, ids[..., None])[..., 0]
    (expected * upstream).sum().backward()

    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_token_logprobs_pass_a_finite_difference_check():
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 5, 2, 2])
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, ids, 0.8), (logits,))


def test_huge_logits_do_not_overflow():
    assert token_logprobs(torch.tensor([[1e4, 0.0]]), torch.tensor([0]), 0.01).tolist() == [0.0]


def test_entropy_of_a_uniform_and_of_a_certain_choice():
    entropy = token_entropy(torch.tensor([[0.0] * 8, [100.0] + [0.0] * 7]))
    assert entropy.tolist() == [pytest.approx(math.log(8)), pytest.approx(0.0, abs=1e-6)]
