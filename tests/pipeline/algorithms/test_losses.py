import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.infra.backends.base import TokenBatch
from penstock.pipeline.algorithms.losses import (
    SURROGATES,
    add_stats,
    batch_loss,
    cispo_loss,
    gspo_loss,
    kl_k3,
    policy_loss,
    sapo_loss,
    summarise,
    token_weights,
)
from penstock.pipeline.algorithms.registry import AGGREGATES, CORRECTIONS
from penstock.pipeline.learner.micro_batches import denominator
from tests.support.loss_batches import batch_of
from tests.support.trainer_alone import group_of

LOG2 = math.log(2.0)


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
    assert (float(stats["clip_fraction_sum"]), float(stats["ratio_sum"])) == (clipped, pytest.approx(ratio))
    ends = float(stats["clip_fraction_low_sum"]), float(stats["clip_fraction_high_sum"])
    assert ends == ((clipped, 0) if ratio < 1 else (0, clipped))
    assert float(stats["kl_sum"]) == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-6)


def test_a_clipped_token_has_no_gradient_and_an_unclipped_one_that_of_the_policy_gradient():
    logprobs = torch.tensor([[LOG2, 0.1]], requires_grad=True)
    loss, _ = policy_loss(logprobs, torch.zeros(1, 2), torch.tensor([1.5]), torch.ones(1, 2, dtype=torch.bool), clip_low=0.2, clip_high=0.2)
    loss.sum().backward()
    assert logprobs.grad.tolist() == [[0.0, pytest.approx(-1.5 * math.exp(0.1))]]


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_autograd_agrees_with_finite_differences(aggregate):
    random = np.random.default_rng(3)
    mask = torch.tensor(random.random((3, 4)) < 0.7)
    logprobs, near, reference = (torch.tensor(random.normal(size=(3, 4)) * 0.5 - 1) for _ in range(3))
    advantages = torch.tensor(random.normal(size=3))
    weights = token_weights(mask, aggregate=aggregate, max_tokens=7)

    def loss(current):
        per_token, _ = policy_loss(current, near, advantages, mask, clip_low=0.2, clip_high=0.28)
        return ((per_token + 0.1 * kl_k3(current, reference, mask)) * weights.double()).sum()

    assert torch.autograd.gradcheck(loss, (logprobs.requires_grad_(),))


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_wild_values_outside_the_mask_change_nothing(surrogate):
    mask = torch.tensor([[True, False]])
    logprobs = torch.tensor([[-1.0, 1e4]], requires_grad=True)
    far = torch.tensor([[-1.0, -1e4]])
    loss, _ = SURROGATES[surrogate](logprobs, far, torch.ones(1), mask)
    (loss + kl_k3(logprobs, -far, mask)).sum().backward()
    assert torch.isfinite(loss).all()
    assert logprobs.grad.isfinite().all()
    assert logprobs.grad[0, 1] == 0


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_every_surrogate_at_ratio_one_has_the_plain_policy_gradient(surrogate, aggregate):
    current, batch = random_batch(4)
    weights = token_weights(torch.tensor(batch.completion_mask), aggregate=aggregate, max_tokens=7)
    for proximal in (None, current.numpy()):
        logprobs = current.clone().requires_grad_()
        loss, stats = batch_loss(
            logprobs, batch, proximal=proximal, surrogate=surrogate, clip_low=1e-3, clip_high=1e-3, aggregate=aggregate, max_tokens=7
        )
        loss.backward()
        torch.testing.assert_close(logprobs.grad, -torch.tensor(batch.advantages)[:, None] * weights)
        assert stats["clip_fraction_sum"] == stats["kl_sum"] == 0.0
        assert loss.dtype == torch.float32


@pytest.mark.parametrize(("ratio", "advantage", "expected", "gradient"), [
    (100.0, -2.0, 6.0, 0.0),  # without the bound: 200
    (2.5, -2.0, 5.0, 5.0),
    (0.5, -2.0, 1.6, 0.0),  # the lower clip range goes on as before
    (100.0, 2.0, -2.4, 0.0),
])  # fmt: skip
@pytest.mark.parametrize("surrogate", [policy_loss, gspo_loss])
def test_the_dual_clip_bounds_what_a_bad_token_that_became_likely_can_do(surrogate, ratio, advantage, expected, gradient):
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    mask, bounds = torch.ones(1, 1, dtype=torch.bool), {"clip_low": 0.2, "clip_high": 0.2, "clip_dual": 3.0}
    loss, stats = surrogate(logprobs, torch.zeros(1, 1), torch.tensor([advantage]), mask, **bounds)
    loss.sum().backward()
    assert (loss.item(), logprobs.grad.item()) == (pytest.approx(expected, rel=1e-5), pytest.approx(gradient, rel=1e-5))
    assert stats["clip_fraction_sum"] == (gradient == 0.0)


# ---- sequence ratios and clipped weights


def gspo_in_plain_words(logprobs, near, advantages, mask, *, clip_low, clip_high):
    """GSPO's objective (arXiv 2507.18071, equation 5) row by row, differentiated as it stands; also which rows were clipped."""
    total, clipped = logprobs.sum() * 0, []
    for row in range(len(mask)):
        drawn = [t for t in range(mask.shape[1]) if mask[row, t]]
        if drawn:
            ratio = torch.exp(sum(logprobs[row, t] - near[row, t] for t in drawn) / len(drawn))
            plain, cut = ratio * advantages[row], torch.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages[row]
            total = total - torch.minimum(plain, cut)
            clipped.append(bool(cut < plain))
    return total, clipped


@settings(max_examples=40)
@given(st.integers(0, 10_000))
def test_gspo_has_the_value_and_the_gradient_of_its_objective_written_out(seed):
    current, batch = random_batch(seed)
    near, advantages, mask = (torch.tensor(part) for part in (batch.behaviour_logprobs, batch.advantages, batch.completion_mask))
    bounds = {"clip_low": 0.1, "clip_high": 0.15}
    mine, theirs = current.clone().requires_grad_(), current.clone().requires_grad_()
    loss, stats = batch_loss(mine, batch, proximal=batch.behaviour_logprobs, surrogate="gspo", aggregate="sequence_mean", **bounds)
    expected, clipped = gspo_in_plain_words(theirs, near, advantages, mask, **bounds)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-4)
    rows = [int(row.sum()) for row in batch.completion_mask if row.any()]
    assert stats["clip_fraction_sum"] == sum(count for count, cut in zip(rows, clipped, strict=True) if cut)


def test_the_reference_that_gspo_is_compared_with_passes_a_finite_difference_check():
    random = np.random.default_rng(5)
    logprobs, near = (torch.tensor(random.normal(size=(3, 4)) * 0.5 - 1) for _ in range(2))
    mask, advantages = torch.tensor(random.random((3, 4)) < 0.7), torch.tensor(random.normal(size=3))
    bounds = {"clip_low": 0.1, "clip_high": 0.15}
    assert torch.autograd.gradcheck(lambda x: gspo_in_plain_words(x, near, advantages, mask, **bounds)[0], (logprobs.requires_grad_(),))


def test_a_clipped_sequence_has_no_gradient_though_each_of_its_tokens_is_near():
    logprobs = torch.full((1, 3), 0.01, requires_grad=True)
    loss, stats = gspo_loss(logprobs, torch.zeros(1, 3), torch.ones(1), torch.ones(1, 3, dtype=torch.bool))
    loss.sum().backward()
    assert loss.tolist() == [[pytest.approx(-1.0004)] * 3]
    assert logprobs.grad.tolist() == [[0.0] * 3]
    assert float(stats["clip_fraction_high_sum"]) == 3


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_sapo_is_the_soft_gate_of_its_paper_and_weighs_a_token_less_the_further_it_has_moved(advantage):
    ratios, heat = [0.2, 0.9, 1.0, 1.1, 3.0], 1.0 if advantage > 0 else 1.05
    logprobs = torch.tensor([[math.log(ratio) for ratio in ratios]], dtype=torch.float64, requires_grad=True)
    loss, stats = sapo_loss(logprobs, torch.zeros(1, 5), torch.tensor([advantage]), torch.ones(1, 5, dtype=torch.bool), clip_low=0.1)
    loss.sum().backward()
    gates = [1 / (1 + math.exp(-heat * (ratio - 1))) for ratio in ratios]
    assert loss.tolist() == [[pytest.approx(-4 / heat * gate * advantage) for gate in gates]]
    expected = [-4 * gate * (1 - gate) * ratio * advantage for gate, ratio in zip(gates, ratios, strict=True)]
    assert logprobs.grad.tolist() == [[pytest.approx(one) for one in expected]]
    assert stats["clip_fraction_sum"] == 0


def test_cispo_cuts_the_weight_and_keeps_every_gradient():
    ratios, advantages = [8.0, 1.5, 0.1], [2.0]
    logprobs = torch.tensor([[math.log(ratio) for ratio in ratios]], requires_grad=True)
    mask = torch.ones(1, 3, dtype=torch.bool)
    loss, stats = cispo_loss(logprobs, torch.zeros(1, 3), torch.tensor(advantages), mask)
    loss.sum().backward()
    assert logprobs.grad.tolist() == [[pytest.approx(-2 * weight) for weight in (5.0, 1.5, 0.1)]]
    assert loss.tolist() == [[pytest.approx(-2 * min(ratio, 5.0) * math.log(ratio)) for ratio in ratios]]
    assert (float(stats["clip_fraction_low_sum"]), float(stats["clip_fraction_high_sum"])) == (0, 1)
    _, both = cispo_loss(logprobs, torch.zeros(1, 3), torch.tensor(advantages), mask, clip_low=0.2, clip_high=0.2)
    assert (float(both["clip_fraction_low_sum"]), float(both["clip_fraction_high_sum"])) == (1, 2)


# ---- extremes


EXTREMES = st.sampled_from([-1e4, -800.0, -80.0, -1.0, 0.0, 1.0, 80.0, 800.0, 1e4])


@settings(max_examples=60)
@given(
    st.lists(st.tuples(EXTREMES, st.booleans(), st.sampled_from([-3.0, 0.0, 3.0])), min_size=1, max_size=6),
    st.sampled_from([*SURROGATES]),
    st.sampled_from(["none", *CORRECTIONS]),
    st.sampled_from(AGGREGATES),
)
def test_extreme_log_ratios_empty_masks_and_single_tokens_give_finite_numbers(rows, surrogate, correction, aggregate):
    batch = batch_of([[trained] for _, trained, _ in rows], behaviour=-1.0, advantages=[advantage for _, _, advantage in rows])
    far = np.array([[-1.0 + log_ratio] for log_ratio, _, _ in rows], np.float32)
    for current, near in ((far, batch.behaviour_logprobs), (far * 0, far), (far, far)):
        logprobs = torch.tensor(current, requires_grad=True)
        loss, stats = batch_loss(
            logprobs, batch, proximal=near, surrogate=surrogate, correction=correction, aggregate=aggregate, kl_coef=0.1, reference=far * 0
        )
        loss.backward()
        assert loss.isfinite()
        assert logprobs.grad.isfinite().all()
        assert not logprobs.grad[~torch.tensor(batch.completion_mask)].any()
        summary = summarise(stats)
        assert np.isfinite(list(summary.values())).all(), summary
        assert 0 <= summary.get("ess", 1.0) <= 1 + 1e-9


# ---- importance, KL, effective sample size


@given(st.floats(-5, 5), st.floats(-5, 5))
def test_k3_is_never_negative_and_zero_only_for_equal_policies(current, reference):
    pair = torch.tensor([[[current]], [[reference]]], dtype=torch.float64)
    value = float(kl_k3(pair[0], pair[1], torch.tensor([[True]])))
    assert value == pytest.approx(math.exp(reference - current) - (reference - current) - 1, abs=1e-9)
    assert value >= 0
    assert (value == 0) == (current == reference) or abs(current - reference) < 1e-6


def test_k1_and_k3_average_to_the_divergence_of_the_learner_from_the_behaviour_policy():
    behaviour, current = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    drawn = [0, 0, 1, 2]  # as often as the behaviour policy draws them
    batch = batch_of(np.ones((1, 4)))
    batch.behaviour_logprobs[:] = behaviour.log()[drawn]
    found = summarise(batch_loss(current.log()[drawn][None], batch)[1])
    expected = pytest.approx(float((behaviour * (behaviour / current).log()).sum()), abs=1e-6)
    assert (found["kl_behaviour_k1"], found["kl_behaviour_k3"]) == (expected, expected)


def test_k3_averages_to_the_true_divergence_under_the_current_policy():
    current, reference = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.3, 0.3, 0.4]).double()
    mean = (current * kl_k3(current.log(), reference.log(), torch.ones(3, dtype=torch.bool))).sum()
    assert float(mean) == pytest.approx(float((current * (current / reference).log()).sum()))


def test_the_effective_sample_size_is_of_unclamped_weights():
    # log-normal weights, sigma 0.5: (E w)^2 / E w^2 = exp(-sigma^2) = 0.779
    log_weights = torch.tensor(np.random.default_rng(0).normal(scale=0.5, size=(100, 1000)), dtype=torch.float32)
    _, stats = batch_loss(log_weights - 1.0, batch_of(np.ones((100, 1000)), behaviour=-1.0), correction="tis", correction_high=1.0)
    assert summarise(stats)["ess"] == pytest.approx(math.exp(-0.25), abs=0.01)


def test_statistics_worked_out_by_hand_and_added_over_micro_batches():
    on_policy = batch_loss(torch.zeros(1, 2), batch_of([[1, 0]]))[1]
    moved = batch_loss(torch.full((1, 2), LOG2), batch_of([[1, 1]]), proximal=np.zeros((1, 2), np.float32))[1]
    parts = [on_policy | {"loss_sum": -1.0, "entropy_sum": 3.0}, moved | {"loss_sum": -2.4, "entropy_sum": 6.0}]
    total = summarise(add_stats(parts) | {"denominator": 3.0})
    assert total == pytest.approx({
        "tokens": 3, "clip_fraction": 2 / 3, "clip_fraction_low": 0.0, "clip_fraction_high": 2 / 3, "ratio": 5 / 3,
        "kl": 2 * (1 - LOG2) / 3, "kl_behaviour_k1": -2 * LOG2 / 3, "kl_behaviour_k3": 2 * (1 - LOG2) / 3,
        "weight": 5 / 3, "ess": 25 / (3 * 9), "loss": -3.4 / 3, "entropy": 3.0,
    }, abs=1e-6)  # fmt: skip
    assert summarise(add_stats([batch_loss(torch.zeros(1, 2), batch_of([[0, 0]]))[1]])) == {"tokens": 0.0}


# ---- aggregation

MASK = [[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(("aggregate", "first", "second"), [
    ("token_mean", 1.0, 1.0), ("sequence_mean", 1 / 3, 1.0), ("constant", 0.1, 0.1),
])  # fmt: skip
def test_token_weights_worked_out_by_hand(aggregate, first, second):
    weights = token_weights(torch.tensor(MASK, dtype=torch.bool), aggregate=aggregate, max_tokens=10)
    np.testing.assert_allclose(weights, np.float32([[first] * 3 + [0], [second, 0, 0, 0], [0] * 4]), rtol=1e-6)


@pytest.mark.parametrize(("aggregate", "counts", "expected"), [
    ("token_mean", True, 4.0), ("sequence_mean", True, 4.0), ("constant", True, 4.0),
    ("token_mean", False, 4.0), ("sequence_mean", False, 2.0), ("constant", False, 2.0),
])  # fmt: skip
def test_a_step_is_divided_by_all_samples_of_its_plan_those_that_are_not_trained_too(aggregate, counts, expected):
    plan = [group_of(0, version=0), group_of(1, version=0)]  # two samples each, one of the four is trained nowhere
    masks = [np.array(MASK[:1], bool), np.array(MASK[1:], bool)]
    assert denominator(masks, plan, aggregate=aggregate, counts_untrained=counts) == expected


@given(
    st.integers(0, 10_000),
    st.sampled_from(AGGREGATES),
    st.integers(1, 3),
    st.sampled_from([*SURROGATES]),
    st.sampled_from(["none", "sequence_mis"]),
)
def test_a_step_cut_into_micro_batches_has_the_loss_of_the_whole(seed, aggregate, cut, surrogate, correction):
    logprobs, batch = random_batch(seed)
    arguments = {"aggregate": aggregate, "max_tokens": 9, "clip_high": 0.28, "surrogate": surrogate, "correction": correction}

    def part(rows):
        fields = {name: getattr(batch, name)[rows] for name in batch.__slots__ if getattr(batch, name) is not None}
        piece = TokenBatch(**fields)
        return batch_loss(logprobs[rows], piece, proximal=logprobs[rows].numpy() * 0.9, **arguments)

    whole, stats = part(slice(None))
    pieces = [part(slice(0, cut)), part(slice(cut, None))]
    assert sum(float(loss) for loss, _ in pieces) == pytest.approx(float(whole), abs=1e-5)
    assert add_stats(stats for _, stats in pieces) == pytest.approx(stats, abs=1e-5)


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


def test_the_weighted_kl_has_the_gradient_of_the_divergence_for_tokens_that_another_policy_drew():
    behaviour, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    logits = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
    current = logits.log_softmax(0)
    (current.exp() * (current - reference.log())).sum().backward()
    exact, logits.grad = logits.grad.clone(), None
    # Every token once, its loss as often as the behaviour policy draws it.
    batch = batch_of(np.ones((3, 1)), advantages=[0.0] * 3)
    batch.behaviour_logprobs[:] = behaviour.log()[:, None]
    for weighted in (True, False):
        total = 0.0
        for token in range(3):
            row = slice(token, token + 1)
            piece = TokenBatch(**{name: getattr(batch, name)[row] for name in batch.__slots__ if getattr(batch, name) is not None})
            logprobs = logits.log_softmax(0)[token].reshape(1, 1)
            loss, _ = batch_loss(logprobs, piece, kl_coef=1.0, kl_weighted=weighted, reference=reference.log()[token].reshape(1, 1))
            total = total + behaviour[token] * loss
        total.backward()
        found, logits.grad = logits.grad.clone(), None
        assert torch.allclose(found, exact, atol=1e-6) == weighted


def test_sequences_whose_policies_disagree_too_much_are_left_out_and_stay_in_the_count():
    batch = batch_of([[1, 1, 1], [1, 1, 0]], behaviour=-1.0)
    logprobs = torch.tensor([[-1.0, -1.0, -0.9], [-1.0, -2.0, 5.0]], requires_grad=True)  # mean k3: 0.0017 and 0.18
    loss, stats = batch_loss(logprobs, batch, reject_kl=0.1)
    loss.backward()
    assert (logprobs.grad != 0).tolist() == [[True] * 3, [False] * 3]
    assert summarise(stats)["rejected_fraction"] == pytest.approx(2 / 5)
    assert stats["tokens"] == 5


def test_an_unknown_surrogate_or_correction_is_named():
    logprobs, batch = random_batch(0)
    with pytest.raises(ValueError, match=r"'ppo'.*clip, gspo, sapo, cispo"):
        batch_loss(logprobs, batch, surrogate="ppo")
    with pytest.raises(ValueError, match=r"'is'.*tis, sequence_tis, mis, sequence_mis, geometric_tis, geometric_mis, icepop"):
        batch_loss(logprobs, batch, correction="is")


@pytest.mark.parametrize("call", [
    lambda: token_weights(torch.ones(1, 1, dtype=torch.bool), aggregate="mean", max_tokens=1),
    lambda: denominator([np.ones((1, 1), bool)], [], aggregate="mean", counts_untrained=True),
])  # fmt: skip
def test_an_unknown_aggregation_is_named(call):
    with pytest.raises(ValueError, match=r"'mean'.*token_mean, sequence_mean, constant"):
        call()
    with pytest.raises(ValueError, match="max_tokens"):
        token_weights(torch.ones(1, 1, dtype=torch.bool), aggregate="constant", max_tokens=0)
