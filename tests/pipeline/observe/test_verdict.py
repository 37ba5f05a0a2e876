"""A run's verdict: what it learned, what held it back; noise is no change."""

import math
import random
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.observe.report.summary import summarise
from penstock.pipeline.observe.report.verdict import LEAST_POINTS, noise, verdict
from penstock.pipeline.observe.run_view import RunView
from tests.support.a_run import RUN, Teller, as_records

RISING = [0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5]
NOISY = [0.30, 0.38, 0.29, 0.40, 0.33, 0.41, 0.28, 0.38, 0.33]


def report(curve: list[float], **changes: Any) -> dict[str, Any]:
    """As much of a report as a verdict looks at."""
    reward = {"first": curve[0], "last": curve[-1], "curve": curve}
    return {"steps": 40, "reward": reward, "groups": {"failed": 0}, "waste": [], "eval": [], "time": {}, **changes}


@pytest.mark.parametrize(
    ("curve", "said"),
    [
        (RISING, "It learned: the reward rose from 0.100 to 0.500 in 40 steps."),
        (RISING[::-1], "It got worse: the reward fell from 0.500 to 0.100 in 40 steps; try a smaller trainer.lr."),
        (NOISY, "No clear change: the reward was 0.300 at first and 0.330 at last in 40 steps."),
        ([0.2] * 12, "No clear change: the reward was 0.200 at first and 0.200 at last in 40 steps."),
        ([0.1, 0.5, 0.9], "Too short to tell: the reward was 0.100 at first and 0.900 at last in 40 steps."),
    ],
)
def test_the_first_sentence_says_whether_it_learned(curve: list[float], said: str) -> None:
    assert verdict(report(curve)) == [said]


@pytest.mark.parametrize("points", [8, 10, 20, 60])
def test_rewards_that_only_fluctuate_are_seldom_called_a_change(points: int) -> None:
    draw, ends = random.Random(7), math.ceil(points / 10)
    bold = 0
    for _ in range(500):
        curve = [draw.gauss(0.5, 0.1) for _ in range(points)]
        reward = {"first": statistics.fmean(curve[:ends]), "last": statistics.fmean(curve[-ends:]), "curve": curve}
        bold += not verdict(report(curve, reward=reward))[0].startswith("No clear change")
    assert bold <= 500 * 0.07  # 5 %, and three standard errors of a share of 500


@given(curve=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=LEAST_POINTS - 1))
def test_a_few_points_are_too_short_whatever_they_are(curve: list[float]) -> None:
    assert verdict(report(curve))[0].startswith("Too short to tell")


def test_held_out_accuracy_failures_waste_and_waiting_are_said() -> None:
    evals = [{"greedy_accuracy": 0.03}, {"greedy_accuracy": 1.0}]
    assert verdict(report(RISING, eval=evals))[0].endswith("held-out prompts solved from 3% to 100%.")
    evals = [{"greedy_accuracy": 0.0, "greedy_reward": 0.05}, {"greedy_accuracy": 0.0, "greedy_reward": 0.4}]
    assert verdict(report(RISING, eval=evals))[0].endswith("held-out reward from 0.050 to 0.400.")
    waste = [{"fate": "filtered", "share": 0.9, "why": "90% of the groups are filtered", "advice": "take easier prompts"}]
    assert verdict(report(RISING, waste=waste))[1:] == ["90% of the groups are filtered: take easier prompts."]
    assert "3 groups failed" in verdict(report(RISING, groups={"failed": 3}))[1]
    assert "waited 80%" in verdict(report(RISING, time={"trainer_waiting_ratio": 0.8}))[1]
    slowest = {"who": "scorer", "why": "busy 90%", "advice": "make the reward faster"}
    assert verdict(report(RISING, time={"trainer_waiting_ratio": 0.8}, bottleneck=slowest))[1].endswith(": make the reward faster.")
    assert verdict(report(RISING, reward={"first": None, "last": None}, steps=0)) == ["No optimizer step was taken."]


def test_a_straight_line_has_no_noise() -> None:
    assert noise(RISING) == pytest.approx(0.0, abs=1e-9)
    assert noise(NOISY) > 0.03


def test_a_whole_run_has_a_verdict() -> None:
    view = RunView(run=RUN)
    for record in as_records(list(Teller(steps=30).whole())):
        view.fold(record)
    assert verdict(summarise(view))[0].startswith("It learned")
