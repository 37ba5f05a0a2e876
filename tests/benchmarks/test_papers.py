"""The papers' settings: what was not put in comes out within the allowed deviation."""

import pytest

from benchmarks.papers.simulated import pipelinerl, rollart, rolloutpipe
from benchmarks.support.comparison import Figure


def misses(figures: tuple[Figure, ...]) -> list[str]:
    """The figures that deviate by more than they may."""
    return [f"{figure.name}: {figure.simulated:g} for {figure.published:g}" for figure in figures if not figure.holds]


@pytest.mark.costly
@pytest.mark.slow
def test_rolloutpipe_calibrated_on_its_largest_round_predicts_the_smaller_ones() -> None:
    found = rolloutpipe.reproduce(["LSAT-AR"])
    assert misses(found.figures) == []
    assert {figure.name for figure in found.figures} >= {"LSAT-AR R=32: saving", "LSAT-AR R=32: waiting"}
    assert not any("R=96" in figure.name for figure in found.figures), "what it was calibrated on is no prediction"
    savings = [setting["saving"] for setting in found.more["settings"]["LSAT-AR"].values()]
    assert savings == sorted(savings)


@pytest.mark.slow
def test_rolloutpipe_of_every_workload_is_within_the_papers_ranges() -> None:
    found = rolloutpipe.reproduce()
    assert misses(found.figures) == []
    assert found.more["saving_grows_with_round"]


def test_pipelinerl_formulas_give_the_papers_split_and_rates() -> None:
    decode = pipelinerl.proportional()
    split = pipelinerl.best_split(decode, accelerators=128, samples_per_step=128, max_lag=133, train_token=pipelinerl.TRAIN_TOKEN)
    _, train, turns = pipelinerl.conventional_rates(decode, accelerators=128, each=133, train_token=pipelinerl.TRAIN_TOKEN)
    assert (split.rate, train, turns) == pytest.approx((17.0, 26.02, 10.3), rel=0.005)
    assert pipelinerl.token_lag_bound(batch=192, generating=44, longest=2, mean=1, samples_per_step=128) == 132


@pytest.mark.slow
def test_pipelinerl_is_faster_than_turns_by_as_much_as_the_paper_says() -> None:
    found = pipelinerl.reproduce()
    assert misses(found.figures) == []
    assert found.as_json()["speedup"] == pytest.approx(1.57, rel=0.02)


def test_trajectories_by_themselves_gain_what_rollart_reports() -> None:
    found = rollart.reproduce()
    assert misses(found.figures) == []
    gains = list(found.more["by_spread"].values())
    assert gains == sorted(gains)


def test_a_figure_within_an_interval_deviates_by_nothing() -> None:
    inside = Figure(name="x", simulated=0.31, published=0.30, upper=0.33, tolerance=0.05, unit="%")
    assert inside.deviation == 0.0
    above = Figure(name="x", simulated=0.40, published=0.30, upper=0.33, tolerance=0.05, unit="%")
    assert above.deviation == pytest.approx(0.07)
    assert not above.holds
