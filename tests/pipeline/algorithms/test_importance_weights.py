"""Importance weights between the behaviour and the proximal policy, and which of them a configuration means."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pipeline.algorithms.losses import CORRECTIONS, batch_loss, correction_weights, summarise
from penstock.pipeline.config.load import ConfigError, from_json, from_table, override, to_json
from penstock.pipeline.learner.train_step import Objective
from tests.support.loss_batches import batch_of
from tests.support.refusals import one_line

LOG2 = math.log(2.0)
RATIOS = [[8.0, 0.25, 1.0, 2.0], [0.1, 4.0, 4.0, 99.0]]
MASK = [[True, True, True, False], [True, True, True, False]]


def weights_of(correction, **bounds):
    ratios, mask = torch.tensor(RATIOS), torch.tensor(MASK)
    behaviour = torch.full(ratios.shape, -2.0)
    found, sums = correction_weights(behaviour + ratios.log(), behaviour, mask, correction=correction, **bounds)
    assert not found.requires_grad
    return torch.where(mask, found, -1.0).tolist(), {name: float(value) for name, value in sums.items()}


@pytest.mark.parametrize(("correction", "bounds", "expected", "changed"), [
    ("tis", {}, [[5, 0.25, 1], [0.1, 4, 4]], 1),
    ("tis", {"high": 2.0}, [[2, 0.25, 1], [0.1, 2, 2]], 3),
    ("sequence_tis", {"high": 1.5}, [[1.5] * 3, [1.5] * 3], 6),  # products 2 and 1.6
    ("mis", {}, [[0, 0.25, 1], [0.1, 4, 4]], 1),
    ("mis", {"low": 0.2, "high": 4.5}, [[0, 0.25, 1], [0, 4, 4]], 2),
    ("sequence_mis", {"high": 1.8}, [[0] * 3, [1.6] * 3], 3),
    ("geometric_tis", {"high": 1.2}, [[1.2] * 3, [1.6 ** (1 / 3)] * 3], 3),  # means 2^(1/3) and 1.6^(1/3)
    ("geometric_mis", {"high": 1.2}, [[0] * 3, [1.6 ** (1 / 3)] * 3], 3),
    ("icepop", {}, [[0, 0, 1], [0, 4, 4]], 3),
])  # fmt: skip
def test_the_weights_of_every_correction_worked_out_by_hand(correction, bounds, expected, changed):
    found, sums = weights_of(correction, **bounds)
    assert found == [[*map(pytest.approx, row), -1.0] for row in expected]
    tokens = sum(sum(row[:3]) for row in RATIOS)
    raw = {"token": tokens, "sequence": 3 * (2 + 1.6), "geometric": 3 * (2 ** (1 / 3) + 1.6 ** (1 / 3))}[CORRECTIONS[correction].unit]
    assert sums == pytest.approx({
        "correction_weight_raw_sum": raw, "correction_weight_sum": sum(map(sum, expected)), "corrected_fraction_sum": changed,
    })  # fmt: skip


@pytest.mark.parametrize("bounds", [{"low": 1.1}, {"high": 0.9}, {"low": -0.1}, {"high": math.nan}])
def test_bounds_that_exclude_the_weight_one_are_refused(bounds):
    with pytest.raises(ValueError, match="enclose the importance weight 1"):
        weights_of("mis", **bounds)


LOG_RATIOS = st.sampled_from([-1e4, -80.0, -3.0, -0.1, 0.0, 0.1, 3.0, 80.0, 1e4])


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.tuples(LOG_RATIOS, st.booleans()), min_size=3, max_size=3), min_size=1, max_size=3),
    st.sampled_from([*CORRECTIONS]),
)
def test_a_correction_equals_its_definition_token_by_token_however_extreme(rows, correction):
    chosen = CORRECTIONS[correction]
    mask = torch.tensor([[trained for _, trained in row] for row in rows])
    log_ratios = torch.tensor([[value for value, _ in row] for row in rows])
    found, sums = correction_weights(log_ratios, torch.zeros(log_ratios.shape), mask, correction=correction)
    assert found.isfinite().all() and all(value.isfinite() for value in sums.values())
    for row, tokens in enumerate(rows):
        for column, (value, trained) in enumerate(tokens):
            if trained:
                drawn = [other for other, counts in tokens if counts]
                log_weight = {"token": value, "sequence": sum(drawn), "geometric": sum(drawn) / len(drawn)}[chosen.unit]
                weight = math.exp(min(log_weight, 600.0))
                bounded = min(weight, chosen.high) if not chosen.masks else weight if chosen.low <= weight <= chosen.high else 0.0
                assert float(found[row, column]) == pytest.approx(bounded, rel=1e-4, abs=1e-8)


def decoupled_in_plain_words(logprobs, near, behaviour, advantages, mask, *, cap, clip):
    """AReaL's objective (arXiv 2505.24298) token by token, with the weight cut at `cap`."""
    total = logprobs.sum() * 0
    for row, column in np.argwhere(mask):
        weight = min(cap, math.exp(float(near[row, column] - behaviour[row, column])))
        ratio = torch.exp(logprobs[row, column] - near[row, column])
        total = total - weight * torch.minimum(ratio * advantages[row], torch.clip(ratio, 1 - clip, 1 + clip) * advantages[row])
    return total


@settings(max_examples=40)
@given(st.integers(0, 10_000))
def test_decoupled_ppo_has_the_value_and_the_gradient_of_its_objective_written_out(seed):
    random = np.random.default_rng(seed)
    batch = batch_of(random.random((3, 5)) < 0.6, behaviour=-1.0, advantages=random.normal(size=3))
    near = (-1.0 + random.normal(size=(3, 5))).astype(np.float32)
    current = torch.tensor(near + 0.3 * random.normal(size=(3, 5)).astype(np.float32))
    mine, theirs = current.clone().requires_grad_(), current.clone().requires_grad_()
    loss, _ = batch_loss(mine, batch, proximal=near, correction="tis", correction_high=2.0)
    expected = decoupled_in_plain_words(theirs, near, batch.behaviour_logprobs, batch.advantages, batch.completion_mask, cap=2.0, clip=0.2)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-4)


def test_without_a_snapshot_it_is_reinforce_with_truncated_weights():
    batch = batch_of([[1, 1]], behaviour=-5.0, advantages=[2.0])
    logprobs = torch.tensor([[-5.0 + math.log(9.0), -5.0 + math.log(0.5)]], requires_grad=True)
    loss, _ = batch_loss(logprobs, batch, correction="tis")
    loss.backward()
    assert logprobs.grad.tolist() == [[pytest.approx(-2 * 5.0), pytest.approx(-2 * 0.5)]]


def test_cispo_against_the_behaviour_policy_has_the_gradient_of_truncated_weights():
    random = np.random.default_rng(1)
    batch = batch_of(random.random((3, 5)) < 0.6, behaviour=-1.0, advantages=random.normal(size=3))
    values = torch.tensor(-1.0 + 2 * random.normal(size=(3, 5)), dtype=torch.float32)
    one, other = values.clone().requires_grad_(), values.clone().requires_grad_()
    batch_loss(one, batch, correction="tis")[0].backward()
    batch_loss(other, batch, proximal=batch.behaviour_logprobs, surrogate="cispo", clip_low=1.0, clip_high=4.0)[0].backward()
    torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "constant"])
def test_masked_tokens_stay_in_what_a_step_is_divided_by(aggregate):
    batch = batch_of([[1, 1, 1, 1], [1, 1, 0, 0]])
    logprobs = torch.tensor([[math.log(9.0), 0, 0, 0], [math.log(9.0), math.log(9.0), 0, 0]], requires_grad=True)
    arguments = {"aggregate": aggregate, "max_tokens": 4}
    plain, before = batch_loss(logprobs, batch, **arguments)
    loss, after = batch_loss(logprobs, batch, correction="mis", **arguments)
    assert after["tokens"] == before["tokens"]  # what is divided by is the learner's count of the loss mask
    loss.backward()
    assert (logprobs.grad != 0).tolist() == [[False, True, True, True], [False] * 4]
    summary = summarise(after)
    assert summary["corrected_fraction"] == pytest.approx(3 / 6)
    assert (summary["correction_weight_raw"], summary["correction_weight"]) == (pytest.approx(30 / 6), pytest.approx(3 / 6))
    assert "correction_weight" not in summarise(before)
    assert float(loss.detach()) != float(plain.detach())


def test_no_correction_weighs_the_divergence_from_the_reference():
    batch = batch_of([[1]])
    logprobs = torch.tensor([[math.log(9.0)]], requires_grad=True)
    loss, _ = batch_loss(logprobs, batch, correction="mis", kl_coef=1.0, reference=np.zeros((1, 1), np.float32))
    assert float(loss.detach()) == pytest.approx(1 / 9 - 1 + math.log(9))


# ---- what a configuration means


def config_of(*, mode="one_step_off", per_version=1, dtype="float32", trainer="float32", backend="torch", share="auto", **algorithm):
    return from_table({
        "run": {"steps": 4}, "model": {"path": "/m"}, "data": {"source": "x.jsonl"}, "rollout": {"engine": "vllm", "dtype": dtype},
        "trainer": {"dtype": trainer, "backend": backend, "share_prompts": share},
        "schedule": {"mode": mode, "steps_per_version": per_version}, "algorithm": algorithm,
    })  # fmt: skip


def recorded_before_editions(config):
    """The configuration as a record has it that was written before `algorithm.defaults` and `algorithm.clip_dual` were keys."""
    table = json.loads(to_json(config))
    for key in ("defaults", "clip_dual", "combine", "kl_weighted", "reject_kl"):
        del table["algorithm"][key]
    return from_json(json.dumps(table))


# ((what is given), (proximal, correction), (the same of a record without an edition))
DEFAULTS = [
    ({"mode": "pipelined"}, ("current", "none"), ("current", "none")),
    ({"mode": "pipelined", "dtype": "bfloat16"}, ("current", "tis"), ("current", "none")),
    ({"mode": "synchronous", "trainer": "bfloat16"}, ("current", "tis"), ("current", "none")),
    ({"mode": "pipelined", "per_version": 2}, ("behaviour", "none"), ("behaviour", "none")),
    ({"mode": "pipelined", "per_version": 2, "dtype": "bfloat16"}, ("snapshot", "tis"), ("behaviour", "none")),
    ({"mode": "pipelined", "dtype": "bfloat16", "correction": "none"}, ("current", "none"), ("current", "none")),
    ({}, ("current", "tis"), ("behaviour", "none")),
    ({"correction": "none"}, ("behaviour", "none"), ("behaviour", "none")),
    ({"mode": "in_flight"}, ("current", "tis"), ("behaviour", "none")),
    ({"mode": "bounded", "per_version": 4}, ("snapshot", "tis"), ("behaviour", "none")),
    ({"mode": "in_flight", "loss": "cispo"}, ("behaviour", "none"), ("behaviour", "none")),
    ({"mode": "in_flight", "loss": "cispo", "correction": "tis"}, ("current", "tis"), ("current", "tis")),
    ({"mode": "pipelined", "loss": "cispo", "dtype": "bfloat16"}, ("behaviour", "none"), ("current", "none")),
    ({"correction": "icepop"}, ("current", "icepop"), ("current", "icepop")),
    ({"correction": "mis", "per_version": 2}, ("snapshot", "mis"), ("snapshot", "mis")),
    ({"proximal": "current"}, ("current", "tis"), ("current", "tis")),
    ({"proximal": "behaviour"}, ("behaviour", "none"), ("behaviour", "none")),
    ({"proximal": "snapshot", "per_version": 2}, ("snapshot", "tis"), ("snapshot", "tis")),
    ({"proximal": "snapshot", "per_version": 2, "mode": "pipelined"}, ("snapshot", "none"), ("snapshot", "none")),
    ({"proximal": "current", "correction": "none"}, ("current", "none"), ("current", "none")),
    ({"loss": "gspo"}, ("current", "geometric_tis"), ("current", "sequence_tis")),
    ({"loss": "gspo", "per_version": 2}, ("snapshot", "geometric_tis"), ("snapshot", "sequence_tis")),
    ({"loss": "gspo", "mode": "pipelined"}, ("current", "none"), ("current", "none")),
    ({"loss": "gspo", "mode": "pipelined", "per_version": 2}, ("snapshot", "none"), ("behaviour", "none")),
    ({"loss": "gspo", "mode": "pipelined", "trainer": "bfloat16"}, ("current", "geometric_tis"), ("current", "none")),
]


@pytest.mark.parametrize(("given_", "now", "before"), DEFAULTS)
def test_what_is_left_out_follows_from_the_schedule_and_a_record_without_an_edition_means_what_it_meant(given_, now, before):
    new = config_of(**given_)
    assert (new.proximal, new.correction) == now
    assert from_json(to_json(new)) == new
    config = recorded_before_editions(new)
    assert (config.proximal, config.correction) == before
    assert (config.clip_dual, config.counts_untrained, config.kl_weighted) == (None, False, False)
    assert from_json(to_json(config)) == config
    assert override(config, ["run.seed=1"]).proximal == before[0]  # a fork or a what-if keeps the edition
    renewed = override(config, ["algorithm.defaults=2"])
    assert (renewed.proximal, renewed.correction) == now


def test_a_new_run_weighs_its_kl_to_the_reference_and_a_record_without_an_edition_does_not():
    batch = batch_of([[1, 1, 1]], behaviour=-1.0)
    logprobs, reference = torch.tensor([[-0.5, -1.0, -2.0]]), np.full((1, 3), -1.5, np.float32)

    def kl_of(config):
        """What the KL adds to the loss."""
        plain, _ = Objective.of(override(config, ["algorithm.kl_coef=0.0"])).batch_loss(logprobs, batch)
        return float(Objective.of(config).batch_loss(logprobs, batch, reference=reference)[0] - plain)

    distance = np.float64([-1.0, -0.5, 0.5])  # of the reference from the learner, in log space
    k3, drawn = np.exp(distance) - distance - 1, np.exp([0.5, 0.0, -1.0])
    new = config_of(kl_coef=1.0, aggregate="token_mean")
    before = recorded_before_editions(new)
    weighed, unweighed = pytest.approx((drawn * k3).sum(), rel=1e-5), pytest.approx(k3.sum(), rel=1e-5)
    assert kl_of(new) == kl_of(from_json(to_json(new))) == kl_of(config_of(kl_coef=1.0, aggregate="token_mean", defaults=2)) == weighed
    assert kl_of(before) == kl_of(config_of(kl_coef=1.0, aggregate="token_mean", defaults=1)) == unweighed
    assert kl_of(override(new, ["algorithm.kl_weighted=false"])) == unweighed  # what a person says stands in either edition
    assert kl_of(override(before, ["algorithm.kl_weighted=true"])) == weighed


@pytest.mark.parametrize(("loss", "expected"), [
    ("grpo", (0.2, 0.2, "sequence_mean", "grpo")),
    ("dapo", (0.2, 0.28, "token_mean", "grpo")),
    ("gspo", (3e-4, 4e-4, "sequence_mean", "grpo")),
    ("sapo", (0.2, 0.2, "sequence_mean", "grpo")),
    ("cispo", (1.0, 4.0, "token_mean", "grpo")),
])  # fmt: skip
def test_a_loss_brings_its_own_clip_ranges_aggregation_and_advantage(loss, expected):
    config = config_of(loss=loss)
    assert (config.clip_low, config.clip_high, config.aggregate, config.advantage) == expected
    assert loss == "sapo" or config_of(loss=loss, clip_low=0.5).clip_low == 0.5
    assert config.clip_dual == (None if loss in ("cispo", "sapo") else 3.0)
    assert config_of(loss=loss, clip_dual=0.0).clip_dual is None


class Losses:
    """A backend that gives the loss of fixed logprobs after `steps` steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def reference_logprobs(self, batch):
        return batch.behaviour_logprobs - 0.5

    def backward(self, batch, loss, **_):
        logprobs = torch.tensor(batch.behaviour_logprobs + 0.1)
        return loss(logprobs, entropies=-logprobs)


@pytest.mark.parametrize(("steps", "kl_coef", "entropy_coef"), [(0, 0.4, 0.2), (3, 0.2, 0.3), (6, 0.0, 0.4), (9, 0.0, 0.4)])
def test_coefficients_change_linearly_up_to_the_last_step(steps, kl_coef, entropy_coef):
    batch = batch_of([[1, 1, 1], [1, 0, 1]], behaviour=-1.0, advantages=[1.0, -2.0])
    changing = Objective.of(config_of(kl_coef=0.4, final_kl_coef=0.0, entropy_coef=0.2, final_entropy_coef=0.4), total_steps=6)
    constant = Objective.of(config_of(kl_coef=kl_coef or 1e-30, entropy_coef=entropy_coef))
    loss, _ = changing.backward(Losses(steps), batch)
    expected, _ = constant.backward(Losses(0), batch)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert changing.coefficients(steps) == pytest.approx({"entropy_coef": entropy_coef, "kl_coef": kl_coef})


@pytest.mark.parametrize(("settings_", "message"), [
    ({"final_kl_coef": 0.1}, "final_kl_coef: needs algorithm.kl_coef above 0"),
    ({"proximal": "behaviour", "correction": "tis"}, "'tis' has no effect.*set algorithm.proximal = 'current'"),
    ({"proximal": "behaviour", "correction": "icepop", "per_version": 2}, "set algorithm.proximal = 'snapshot'"),
    ({"proximal": "current", "per_version": 2}, "'current' needs schedule.steps_per_version = 1, not 2; use 'snapshot'"),
    ({"proximal": "snapshot"}, "with schedule.steps_per_version = 1 the 'snapshot' is the current policy; use 'current'"),
    ({"correction_high": 2.0, "mode": "pipelined"}, "correction_high: 2.0 bounds nothing without a correction"),
    ({"correction": "none", "correction_low": 0.5}, "correction_low: 0.5 bounds nothing without a correction"),
    ({"correction": "tis", "correction_low": 0.5}, "'tis' only truncates from above.*correction = 'mis'"),
    ({"correction": "geometric_tis", "correction_low": 0.5}, "'geometric_tis' only truncates from above.*correction = 'geometric_mis'"),
    ({"loss": "sapo", "clip_low": 0.1}, "algorithm.clip_low: 'sapo' has no clip range"),
    ({"advantage": "pass_at_q?k=2"}, "'pass_at_q\\?k=2' is unknown; expected one of .*did you mean 'pass_at_k'"),
    ({"value_lr": 1e-3, "backend": "deepspeed"}, "'deepspeed' does not support a value head; set trainer.backend = 'torch'"),
    ({"value_lr": 1e-3, "share": "off"}, "value_lr: a value head needs hidden states"),
    ({"value_lr": 1e-3, "loss": "own.py:loss", "aggregate": "token_mean"}, "value_lr: .*use a built-in loss"),
    ({"clip_dual": 1.1}, "clip_dual: 1.1 is within the clip range, which ends at 1.2; set a larger value"),
    ({"clip_dual": 3.0, "loss": "cispo"}, "clip_dual: 3.0 has no effect with 'cispo', which truncates every ratio at 5"),
    ({"correction": "mis", "correction_low": 1.5}, "algorithm.correction_low = 1.5"),
    ({"correction": "mis", "correction_high": 0.5}, "algorithm.correction_high = 0.5"),
    ({"correction": "mis", "correction_high": math.inf}, "algorithm.correction_high = inf"),
    ({"clip_high": math.inf}, "algorithm.clip_high = inf"),
    ({"correction": "vtrace"}, "algorithm.correction: 'vtrace' is unknown; expected one of tis"),
    ({"loss": "gsop"}, "'gsop' is unknown; expected one of grpo, dr_grpo, dapo, gspo, sapo, cispo.*did you mean 'gspo'"),
])  # fmt: skip
def test_settings_that_make_no_sense_together_are_refused_in_one_line(settings_, message):
    with one_line(ConfigError, match=message):
        config_of(**settings_)


@pytest.mark.parametrize(("algorithm", "expected"), [
    ({"loss": "gspo"},
     {"surrogate": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregate": "sequence_mean", "correction": "geometric_tis"}),
    ({"mode": "pipelined", "per_version": 2}, {"clip_dual": 3.0, "aggregate": "sequence_mean"}),
    ({"loss": "sapo", "reject_kl": 0.01}, {"surrogate": "sapo", "aggregate": "sequence_mean", "correction": "tis", "reject_kl": 0.01}),
    ({"loss": "cispo"}, {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0, "aggregate": "token_mean"}),
    ({"correction": "icepop", "correction_high": 1.5, "loss": "dapo"},
     {"clip_low": 0.2, "clip_high": 0.28, "aggregate": "token_mean", "correction": "icepop", "correction_high": 1.5}),
])  # fmt: skip
def test_what_is_configured_is_what_a_step_computes(algorithm, expected):
    objective = Objective.of(config_of(**algorithm))
    batch = batch_of([[1, 1, 1], [1, 0, 1]], behaviour=-1.0, advantages=[1.0, -2.0])
    logprobs = torch.tensor([[-1.1, -0.2, -0.5], [2.7, -1.0, -2.0]])
    near = batch.behaviour_logprobs if objective.proximal == "behaviour" else logprobs.numpy()
    loss, stats = objective.batch_loss(logprobs, batch, proximal=near)
    same, same_stats = batch_loss(logprobs, batch, proximal=near, **expected)
    assert (float(loss), stats) == (float(same), same_stats)
    assert float(loss) != float(batch_loss(logprobs, batch, proximal=near)[0])
