"""From hidden states or logits to the log-probabilities of what was drawn."""

import math

import pytest
import torch

from penstock.infra.backends.logprobs import forward as module
from penstock.infra.backends.logprobs.forward import Head, token_logprobs

pytestmark = pytest.mark.costly  # imports transformers

ROW = torch.tensor([0, 0, 1, 3, 3, 3, 4])
TARGET = torch.tensor([5, 2, 2, 0, 10, 10, 7])
TEMPERATURES = torch.tensor([0.5, 1.0, 1.5, 0.8, 1.2])


def plain(logits):
    return torch.log_softmax(logits / TEMPERATURES[:, None].to(logits.dtype), -1)[ROW, TARGET]


@pytest.mark.parametrize("piece", [11, 22, 10_000], ids=["a row", "two rows", "all rows, kept"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_of_logits_and_their_gradient_equal_log_softmax(monkeypatch, piece, dtype):
    monkeypatch.setattr(module, "PIECE_ELEMENTS", piece)
    random = torch.Generator().manual_seed(0)
    logits, upstream = torch.randn(5, 11, generator=random).to(dtype), torch.randn(7, generator=random)
    mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    got, _ = token_logprobs(mine, head=None, temperatures=TEMPERATURES, row=ROW, target=TARGET)
    expected = plain(theirs.float())
    (got * upstream).sum().backward()
    (expected * upstream).sum().backward()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("piece", [11, 10_000], ids=["in pieces", "kept"])
@pytest.mark.parametrize("biased", [False, True])
def test_logprobs_of_hidden_states_pass_a_finite_difference_check(monkeypatch, piece, biased):
    monkeypatch.setattr(module, "PIECE_ELEMENTS", piece)
    random = torch.Generator().manual_seed(1)
    states, weight, bias = (
        torch.randn(*shape, generator=random, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (11, 3), (11,))
    )
    inputs = (states, weight, bias) if biased else (states, weight)

    def drawn(states, weight, bias=None):
        return token_logprobs(states, head=Head(weight, bias), temperatures=TEMPERATURES, row=ROW, target=TARGET)[0]

    assert torch.autograd.gradcheck(drawn, inputs)
    torch.testing.assert_close(drawn(*inputs), plain(torch.nn.functional.linear(states, weight, bias if biased else None)))


@pytest.mark.parametrize("support", [None, torch.arange(11).expand(7, 11)], ids=["full vocabulary", "support"])
@pytest.mark.parametrize("piece", [22, 10_000], ids=["in pieces", "kept"])
def test_a_float32_head_rounds_no_logit_of_a_bfloat16_model(monkeypatch, piece, support):
    monkeypatch.setattr(module, "PIECE_ELEMENTS", piece)
    random = torch.Generator().manual_seed(2)
    given = [torch.randn(*shape, generator=random).bfloat16() for shape in ((5, 64), (11, 64), (11,))]
    exact = [tensor.double().requires_grad_() for tensor in given]
    expected = plain(torch.nn.functional.linear(*exact))
    expected.sum().backward()
    errors = []
    for in_float32 in (True, False):
        mine = [tensor.clone().requires_grad_() for tensor in given]
        head = Head(mine[1], mine[2], in_float32)
        got, _ = token_logprobs(mine[0], head=head, temperatures=TEMPERATURES, row=ROW, target=TARGET, support=support)
        got.sum().backward()
        errors.append(float((got - expected).detach().abs().max()))
        for tensor, reference in zip(mine, exact, strict=True):
            torch.testing.assert_close(tensor.grad.double(), reference.grad, rtol=0.02, atol=0.02 * float(reference.grad.abs().max()))
    assert errors[0] < 1e-4 < 100 * errors[0] < errors[1]


def test_never_more_logits_are_alive_than_two_pieces(monkeypatch):
    sizes = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(module.functional, "linear", lambda *given: sizes.append((out := linear(*given)).numel()) or out)
    states, weight = torch.randn(40, 4, requires_grad=True), torch.randn(module.PIECE_ELEMENTS // 16, 4, requires_grad=True)
    row = torch.arange(40)
    token_logprobs(states, head=Head(weight), temperatures=torch.ones(40), row=row, target=row)[0].sum().backward()
    assert len(sizes) == 6  # three pieces, and each again for the gradient
    assert max(sizes) * 4 <= 32 * 2**20


def test_huge_logits_do_not_overflow():
    one = torch.zeros(1, dtype=torch.int64)
    assert token_logprobs(torch.tensor([[1e4, 0.0]]), head=None, temperatures=torch.tensor([0.01]), row=one, target=one)[0].tolist() == [
        0.0
    ]


def test_entropy_of_a_uniform_and_of_a_certain_choice():
    logits = torch.tensor([[0.0] * 8, [100.0] + [0.0] * 7])
    for row, expected in ((0, math.log(8)), (1, 0.0)):
        at = torch.tensor([row, row])
        entropy = token_logprobs(logits, head=None, temperatures=torch.ones(2), row=at, target=at, entropy=True)[1]
        assert entropy is not None
        assert entropy.tolist() == pytest.approx([expected, expected], abs=1e-6)


@pytest.mark.parametrize("piece", [11, 10_000], ids=["in pieces", "kept"])
def test_entropies_pass_a_finite_difference_check_beside_their_logprobs(monkeypatch, piece):
    monkeypatch.setattr(module, "PIECE_ELEMENTS", piece)
    random = torch.Generator().manual_seed(2)
    states, weight = (torch.randn(*shape, generator=random, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (11, 3)))

    def both(states, weight):
        return token_logprobs(states, head=Head(weight), temperatures=TEMPERATURES, row=ROW, target=TARGET, entropy=True)

    assert torch.autograd.gradcheck(both, (states, weight))
    whole = torch.log_softmax(states @ weight.T / TEMPERATURES[:, None], -1)
    torch.testing.assert_close(both(states, weight)[1], -(whole.exp() * whole).sum(-1)[ROW])


SUPPORT = torch.tensor([[5, 2, -1], [9, 2, 0], [2, 1, 3], [0, -1, -1], [10, 0, 4], [10, 6, -1], [7, 8, 9]])
"""Another one for each token, those of one place among them."""


@pytest.mark.parametrize("piece", [11, 10_000], ids=["in pieces", "kept"])
def test_logprobs_and_entropies_over_a_support_are_those_of_the_renormalised_distribution(monkeypatch, piece):
    monkeypatch.setattr(module, "PIECE_ELEMENTS", piece)
    random = torch.Generator().manual_seed(3)
    states, weight = (torch.randn(*shape, generator=random, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (11, 3)))

    def both(states, weight):
        return token_logprobs(states, head=Head(weight), temperatures=TEMPERATURES, row=ROW, target=TARGET, entropy=True, support=SUPPORT)

    assert torch.autograd.gradcheck(both, (states, weight))
    logprobs, entropies = both(states, weight)
    logits = states @ weight.T / TEMPERATURES[:, None]
    for place, (row, target, kept) in enumerate(zip(ROW.tolist(), TARGET.tolist(), SUPPORT.tolist(), strict=True)):
        ids = [one for one in kept if one >= 0]
        expected = torch.log_softmax(logits[row, ids], -1)
        torch.testing.assert_close(logprobs[place], expected[ids.index(target)])
        torch.testing.assert_close(entropies[place], -(expected.exp() * expected).sum())
