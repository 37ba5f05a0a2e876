"""The simulator: the rules of live runs hold in it, and simple workloads take the time that arithmetic gives."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pipeline.launch.planning.simulator import simulate
from penstock.pipeline.launch.planning.workload import DecodeTimes, Workload, constant, from_speeds, lognormal, parse, uniform
from penstock.pipeline.scheduling.rules import MODES, preset


def workload(mode: str = "pipelined", **fields: object) -> Workload:
    """Two engines, groups of four, steps of two groups."""
    sizes = {"prompts_per_step": 2, "samples_per_prompt": 4, "steps_per_version": fields.pop("steps_per_version", 1)}
    defaults: dict[str, object] = {
        "schedule": preset(mode, **sizes, max_lag=fields.pop("max_lag", None)),
        "steps": 12,
        "lengths": lognormal(100, 0.8),
        "engines": 2,
        "concurrency": 8,
        "decode": from_speeds([(1, 10), (8, 40)]),
        "train_token_s": 0.02,
        "step_s": 0.5,
    }
    return Workload(**defaults | fields)  # type: ignore[arg-type]


def test_a_synchronous_round_takes_rollout_and_then_training() -> None:
    # two groups of four samples of 100 tokens, one group an engine: 100 decode steps of 0.1 s; then 800 tokens at 0.01 s, and 1 s
    work = workload(
        "synchronous", lengths=constant(100), concurrency=4, decode=DecodeTimes((4.0,), (0.1,)), train_token_s=0.01, step_s=1.0, steps=3
    )
    outcome = simulate(work)
    assert outcome.rollout_to_train_end_s == pytest.approx((19.0, 19.0, 19.0))
    assert outcome.wall_s == pytest.approx(3 * 19.0)
    assert outcome.trainer_waiting_ratio == pytest.approx(10 / 19)


def test_a_pipelined_round_hides_the_shorter_phase_behind_the_longer_one() -> None:
    # one engine that draws a group in 10 s and a trainer that takes 10 s for one: of 16 rollout and training phases all but one overlap
    times = {"lengths": constant(100), "engines": 1, "concurrency": 4, "decode": DecodeTimes((4.0,), (0.1,)), "steps": 8}
    work = workload(steps_per_version=8, train_token_s=0.025, step_s=0.0, **times)
    assert simulate(work).wall_s == pytest.approx(10 * 17)
    synchronous = replace(work, schedule=preset("synchronous", prompts_per_step=2, samples_per_prompt=4, steps_per_version=8))
    assert simulate(synchronous).wall_s == pytest.approx(10 * 32)


def test_a_version_goes_out_while_the_next_step_is_trained_and_no_step_ends_before_it_is_out() -> None:
    # one group is drawn in 10 s and trained in 10 s, two make a step: the trainer is never without one
    times = {"lengths": constant(100), "engines": 2, "concurrency": 4, "decode": DecodeTimes((4.0,), (0.1,)), "steps": 6}
    work = workload("in_flight", max_lag=100, train_token_s=0.025, step_s=0.0, **times)
    assert simulate(replace(work, release_s=15.0)).wall_s == pytest.approx(simulate(work).wall_s) == pytest.approx(10 + 6 * 20)
    late = simulate(replace(work, release_s=25.0))
    assert late.wall_s == pytest.approx(10 + 20 + 5 * 25)  # each version waits for the one before
    assert simulate(replace(work, hold_s=2.0)).wall_s == pytest.approx(10 + 6 * 20 + 5 * 2)


@settings(max_examples=25)
@given(
    mode=st.sampled_from(sorted(MODES)),
    seed=st.integers(0, 1000),
    steps_per_version=st.integers(1, 3),
    engines=st.integers(1, 3),
    continuous_batching=st.booleans(),
)
def test_what_is_trained_is_complete_fresh_and_within_the_time(
    mode: str, seed: int, steps_per_version: int, engines: int, continuous_batching: bool
) -> None:
    fields = {"engines": engines, "continuous_batching": continuous_batching, "load_s": 0.3, "publish_s": 0.2, "deliver_s": 0.1}
    work = workload(mode, steps_per_version=steps_per_version, seed=seed, filtered=0.2, **fields)
    outcome = simulate(work)
    groups = [group for step in outcome.steps for group in step.groups]
    assert len(groups) == len(set(groups)) == work.steps * 2
    assert outcome.lag_max <= work.schedule.max_lag
    assert outcome.token_lag_mean <= outcome.lag_max + 1e-9
    if work.schedule.order == "submission":
        assert groups == sorted(groups)
    if work.schedule.max_lag == 0:
        assert outcome.dropped["stale"] == outcome.dropped["abandoned"] == 0
    assert outcome.generate_s <= outcome.steps[-1].ended_s + 1e-6
    assert outcome.trainer_wait_s + outcome.trainer_compute_s == pytest.approx(outcome.steps[-1].ended_s)


def test_extra_groups_end_a_round_before_its_stragglers_and_train_shorter_completions() -> None:
    bounded = preset("bounded", prompts_per_step=4, samples_per_prompt=4, steps_per_version=1, max_lag=0)
    work = workload(schedule=bounded, lengths=lognormal(100, 1.2), concurrency=16, train_token_s=0.0, steps=40)
    plain, extra = simulate(work), simulate(replace(work, schedule=replace(bounded, oversample_groups=2)))
    assert extra.wall_s < 0.8 * plain.wall_s
    assert extra.tokens < 0.9 * plain.tokens
    assert 0 < extra.dropped["abandoned"] <= 2 * work.steps
    assert plain.dropped["abandoned"] == 0


def test_equal_workloads_give_equal_outcomes_and_every_schedule_draws_the_same_lengths() -> None:
    first, again = simulate(workload()), simulate(workload())
    assert first == again
    assert simulate(workload("synchronous")).tokens == first.tokens


def test_an_engine_that_draws_one_group_at_a_time_keeps_its_batch_until_the_last_sample_ends() -> None:
    work = workload(engines=1, concurrency=4, steps=1, lengths=uniform(50), continuous_batching=False, decode=DecodeTimes((4.0,), (1.0,)))
    longest = [max(work.lengths.of_group(group, samples=4, seed=0)) for group in (0, 1)]
    assert simulate(replace(work, train_token_s=0.0, step_s=0.0)).wall_s == pytest.approx(sum(longest))


def test_decode_times_follow_the_speeds_that_were_given() -> None:
    decode = from_speeds([(1, 50.0), (64, 1600.0)])
    assert 1 / decode(1) == pytest.approx(50.0)
    assert 64 / decode(64) == pytest.approx(1600.0)
    assert 640 / decode(640) == pytest.approx(1600.0)
    with pytest.raises(ValueError, match="a decode step would get faster with more concurrent samples"):
        from_speeds([(1, 50.0), (64, 6400.0)])


@pytest.mark.parametrize("text", ["uniform", "uniform:0", "lognormal:10", "nofile.txt", "constant:x", "uniform:inf"])
def test_a_length_distribution_that_is_none_is_refused_with_what_to_give(text: str) -> None:
    with pytest.raises(ValueError, match="lengths"):
        parse(text)


def test_the_mean_of_a_distribution_is_that_of_what_it_draws() -> None:
    for name in ("uniform:500", "lognormal:300:0.7", "lognormal:300:1.0:600", "constant:40"):
        lengths = parse(name)
        drawn = [length for group in range(400) for length in lengths.of_group(group, samples=8, seed=3)]
        assert sum(drawn) / len(drawn) == pytest.approx(lengths.mean, rel=0.06)
        assert max(drawn) <= lengths.longest
