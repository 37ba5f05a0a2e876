import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.backends import forward
from infra.backends.batch import TokenBatch
from pipeline.losses import (
    AGGREGATES,
    add_stats,
    batch_loss,
    denominator,
    kl_k3,
    policy_loss,
    summarise,
    token_entropy,
    token_logprobs,
    token_weights,
    truncated_importance,
)

LOG2 = math.log(2.0)


def batch_of(mask, *, behaviour=0.0, advantages=None):
    mask = np.array(mask, bool)
    rows, width = mask.shape
    return TokenBatch(
        input_ids=np.zeros((rows, width + 1), np.int64),
        attention_mask=np.ones((rows, width + 1), bool),
        completion_mask=mask,
        behaviour_logprobs=np.full(mask.shape, behaviour, np.float32) * mask,
        advantages=np.ones(rows, np.float32) if advantages is None else np.array(advantages, np.float32),
        temperatures=np.ones(rows, np.float32),
        groups=np.zeros(rows, np.int64),
        samples=np.arange(rows),
    )


def random_batch(seed, rows=4, width=6):
    random = np.random.default_rng(seed)
    mask = random.random((rows, width)) < 0.6
    batch = batch_of(mask, behaviour=-1.0, advantages=random.normal(size=rows))
    logprobs = torch.tensor(-1.0 + 0.4 * random.normal(size=(rows, width)), dtype=torch.float32)
    return logprobs, batch


# ---- the clipped surrogate


@pytest.mark.parametrize(("ratio", "advantage", "expected", "clipped"), [
    (2.0, 1.0, -1.3, 1),  # clip-higher binds: min(2, 1.3)
    (2.0, -1.0, 2.0, 0),  # a bad token that became likelier is never clipped
    (0.5, 1.0, -0.5, 0),
    (0.5, -1.0, 0.8, 1),  # min(-0.5, -0.8)
    (1.0, 3.0, -3.0, 0),
])  # fmt: skip
def test_the_clipped_surrogate_worked_out_by_hand(ratio, advantage, expected, clipped):
    loss, stats = policy_loss(
        torch.tensor([[math.log(ratio), 9.0]]), torch.zeros(1, 2), torch.tensor([advantage]), torch.tensor([[True, False]]),
        clip_low=0.2, clip_high=0.3,
    )  # fmt: skip
    assert loss.tolist() == [[pytest.approx(expected), 0.0]]
    assert (float(stats["clipped"]), float(stats["ratio_sum"])) == (clipped, pytest.approx(ratio))
    assert float(stats["kl_sum"]) == pytest.approx(1 / ratio - 1 + math.log(ratio), abs=1e-6)


def test_a_clipped_token_has_no_gradient_and_an_unclipped_one_that_of_the_policy_gradient():
    logprobs = torch.tensor([[LOG2, 0.1]], requires_grad=True)
    loss, _ = policy_loss(logprobs, torch.zeros(1, 2), torch.tensor([1.5]), torch.ones(1, 2, dtype=torch.bool), clip_low=0.2, clip_high=0.2)
    loss.sum().backward()
    assert logprobs.grad.tolist() == [[0.0, pytest.approx(-1.5 * math.exp(0.1))]]


def test_with_the_current_policy_as_proximal_it_is_reinforce():
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    loss, stats = policy_loss(logprobs, logprobs, torch.tensor([2.0, -1.0]), torch.ones(2, 2, dtype=torch.bool))
    loss.sum().backward()
    assert logprobs.grad.tolist() == [[-2.0, -2.0], [1.0, 1.0]]
    assert float(stats["kl_sum"]) == 0.0


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_autograd_agrees_with_finite_differences(aggregate):
    random = np.random.default_rng(3)
    mask = torch.tensor(random.random((3, 4)) < 0.7)
    logprobs, near, reference = (torch.tensor(random.normal(size=(3, 4)) * 0.5 - 1) for _ in range(3))
    advantages = torch.tensor(random.normal(size=3))
    weights, _ = token_weights(mask, aggregate=aggregate, max_tokens=7)

    def loss(current):
        per_token, _ = policy_loss(current, near, advantages, mask, clip_low=0.2, clip_high=0.28)
        return ((per_token + 0.1 * kl_k3(current, reference, mask)) * weights.double()).sum()

    assert torch.autograd.gradcheck(loss, (logprobs.requires_grad_(),))


def test_wild_values_outside_the_mask_change_nothing():
    mask = torch.tensor([[True, False]])
    logprobs = torch.tensor([[-1.0, 1e4]], requires_grad=True)
    far = torch.tensor([[-1.0, -1e4]])
    loss, _ = policy_loss(logprobs, far, torch.ones(1), mask, importance=truncated_importance(logprobs, far, mask, cap=5.0))
    (loss + kl_k3(logprobs, -far, mask)).sum().backward()
    assert torch.isfinite(loss).all()
    assert logprobs.grad.isfinite().all()
    assert logprobs.grad[0, 1] == 0


# ---- importance, KL, effective sample size


def test_importance_weights_are_cut_from_above_only():
    weights = truncated_importance(torch.tensor([[LOG2 * 3, -LOG2, 0.0]]), torch.zeros(1, 3), torch.tensor([[True, True, False]]), cap=5.0)
    assert weights.tolist() == [[5.0, pytest.approx(0.5), 1.0]]


@settings(deadline=None)
@given(st.floats(-5, 5), st.floats(-5, 5))
def test_k3_is_never_negative_and_zero_only_for_equal_policies(current, reference):
    pair = torch.tensor([[[current]], [[reference]]], dtype=torch.float64)
    value = float(kl_k3(pair[0], pair[1], torch.tensor([[True]])))
    assert value == pytest.approx(math.exp(reference - current) - (reference - current) - 1, abs=1e-9)
    assert value >= 0
    assert (value == 0) == (current == reference) or abs(current - reference) < 1e-6


def test_k3_averages_to_the_true_divergence_under_the_current_policy():
    current, reference = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.3, 0.3, 0.4]).double()
    mean = (current * kl_k3(current.log(), reference.log(), torch.ones(3, dtype=torch.bool))).sum()
    assert float(mean) == pytest.approx(float((current * (current / reference).log()).sum()))


def test_the_effective_sample_size_is_of_unclamped_weights():
    # log-normal weights, sigma 0.5: (E w)^2 / E w^2 = exp(-sigma^2) = 0.779
    log_weights = torch.tensor(np.random.default_rng(0).normal(scale=0.5, size=(100, 1000)), dtype=torch.float32)
    _, stats = batch_loss(log_weights - 1.0, batch_of(np.ones((100, 1000)), behaviour=-1.0), importance_cap=1.0)
    assert summarise(stats)["ess"] == pytest.approx(math.exp(-0.25), abs=0.01)


def test_statistics_worked_out_by_hand_and_added_over_micro_batches():
    on_policy = batch_loss(torch.zeros(1, 2), batch_of([[1, 0]]))[1]
    moved = batch_loss(torch.full((1, 2), LOG2), batch_of([[1, 1]]), proximal=np.zeros((1, 2), np.float32))[1]
    total = summarise(add_stats([on_policy | {"loss_sum": -1.0, "entropy_sum": 3.0}, moved | {"loss_sum": -2.4, "entropy_sum": 6.0}]))
    assert total == pytest.approx({
        "tokens": 3, "clip_fraction": 2 / 3, "ratio": 5 / 3, "kl": 2 * (LOG2 - 0.5) / 3, "kl_behaviour": 2 * (LOG2 - 0.5) / 3,
        "weight": 5 / 3, "ess": 25 / (3 * 9), "loss": -3.4 / 3, "entropy": 3.0,
    }, abs=1e-6)  # fmt: skip
    assert summarise(add_stats([batch_loss(torch.zeros(1, 2), batch_of([[0, 0]]))[1]])) == {"tokens": 0.0}


# ---- aggregation

MASK = [[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(("aggregate", "first", "second", "count"), [
    ("token_mean", 1.0, 1.0, 4.0), ("sequence_mean", 1 / 3, 1.0, 2.0), ("constant", 0.1, 0.1, 2.0),
])  # fmt: skip
def test_token_weights_worked_out_by_hand(aggregate, first, second, count):
    weights, contribution = token_weights(torch.tensor(MASK, dtype=torch.bool), aggregate=aggregate, max_tokens=10)
    np.testing.assert_allclose(weights, np.float32([[first] * 3 + [0], [second, 0, 0, 0], [0] * 4]), rtol=1e-6)
    assert contribution == count == denominator(np.array(MASK, bool), aggregate=aggregate)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from(AGGREGATES), st.integers(1, 3))
def test_a_step_cut_into_micro_batches_has_the_loss_of_the_whole(seed, aggregate, cut):
    logprobs, batch = random_batch(seed)
    arguments = {"aggregate": aggregate, "max_tokens": 9, "clip_high": 0.28}

    def part(rows):
        fields = {name: getattr(batch, name)[rows] for name in batch.__slots__}
        piece = TokenBatch(**fields)
        return batch_loss(logprobs[rows], piece, proximal=piece.behaviour_logprobs, **arguments)

    whole, stats = part(slice(None))
    pieces = [part(slice(0, cut)), part(slice(cut, None))]
    assert sum(float(loss) for loss, _ in pieces) == pytest.approx(float(whole), abs=1e-5)
    assert add_stats(stats for _, stats in pieces) == pytest.approx(stats, abs=1e-5)
    assert stats["denominator"] == denominator(batch.completion_mask, aggregate=aggregate)


def test_kl_sits_in_the_loss_with_its_coefficient():
    batch = batch_of([[1, 1]])
    logprobs = torch.full((1, 2), -1.0)
    reference = np.full((1, 2), -1.0 + LOG2, np.float32)
    plain, _ = batch_loss(logprobs, batch)
    with_kl, stats = batch_loss(logprobs, batch, kl_coef=0.5, reference=reference)
    assert float(with_kl - plain) == pytest.approx(0.5 * 2 * (2 - LOG2 - 1), abs=1e-6)
    assert summarise(stats)["kl_reference"] == pytest.approx(1 - LOG2, abs=1e-6)
    with pytest.raises(ValueError, match="reference"):
        batch_loss(logprobs, batch, kl_coef=0.5)


@pytest.mark.parametrize("call", [
    lambda: token_weights(torch.ones(1, 1, dtype=torch.bool), aggregate="mean", max_tokens=1),
    lambda: denominator(np.ones((1, 1), bool), aggregate="mean"),
])  # fmt: skip
def test_an_unknown_aggregation_is_named(call):
    with pytest.raises(ValueError, match=r"'mean'.*token_mean, sequence_mean, constant"):
        call()
    with pytest.raises(ValueError, match="max_tokens"):
        token_weights(torch.ones(1, 1, dtype=torch.bool), aggregate="constant", max_tokens=0)


# ---- logits to log-probabilities


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
