"""A run's verdict: what it learned, what held it back; noise is no change."""

import math
import random
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.inspect.report.headline import LEAST_POINTS, attention, headline, noise
from penstock.pipeline.inspect.report.summary import summarise
from penstock.pipeline.inspect.report.text import as_text
from penstock.pipeline.inspect.web.run_facts import run_facts
from tests.support.a_run import RecordBuilder, view_of

RISING = [0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5]
NOISY = [0.30, 0.38, 0.29, 0.40, 0.33, 0.41, 0.28, 0.38, 0.33]


def report(curve: list[float], **changes: Any) -> dict[str, Any]:
    reward = {"first": curve[0], "last": curve[-1], "curve": curve}
    return {"steps": 40, "reward": reward, "groups": {"failed": 0}, "waste": [], "eval": [], "time": {}, **changes}


@pytest.mark.parametrize(
    ("curve", "said"),
    [
        (RISING, "It learned: reward 0.10 -> 0.50."),
        (RISING[::-1], "It got worse: reward 0.50 -> 0.10; try a smaller trainer.lr."),
        (NOISY, "No clear change: reward 0.30 -> 0.33."),
        ([0.2] * 12, "No clear change: reward 0.20 -> 0.20."),
        ([0.1, 0.5, 0.9], "Too short to tell: reward 0.10 -> 0.90."),
    ],
)
def test_the_first_sentence_says_whether_it_learned(curve: list[float], said: str) -> None:
    assert headline(report(curve)) == [said]


@pytest.mark.parametrize("points", [8, 10, 20, 60])
def test_rewards_that_only_fluctuate_are_seldom_called_a_change(points: int) -> None:
    draw, ends = random.Random(7), math.ceil(points / 10)
    bold = 0
    for _ in range(500):
        curve = [draw.gauss(0.5, 0.1) for _ in range(points)]
        reward = {"first": statistics.fmean(curve[:ends]), "last": statistics.fmean(curve[-ends:]), "curve": curve}
        bold += not headline(report(curve, reward=reward))[0].startswith("No clear change")
    assert bold <= 500 * 0.07  # 5 %, and three standard errors of a share of 500


@given(curve=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=LEAST_POINTS - 1))
def test_a_few_points_are_too_short_whatever_they_are(curve: list[float]) -> None:
    assert headline(report(curve))[0].startswith("Too short to tell")


def test_held_out_accuracy_waste_and_the_bottleneck_are_in_the_headline() -> None:
    evals = [{"greedy_accuracy": 0.03}, {"greedy_accuracy": 1.0}]
    assert headline(report(RISING, eval=evals))[0].endswith("held-out accuracy 3 % -> 100 %.")
    evals = [{"greedy_accuracy": 0.0, "greedy_reward": 0.05}, {"greedy_accuracy": 0.0, "greedy_reward": 0.4}]
    assert headline(report(RISING, eval=evals))[0].endswith("held-out reward 0.05 -> 0.40.")
    waste = [{"status": "filtered", "share": 0.9, "why": "90% of the groups are filtered", "advice": "use easier prompts"}]
    assert headline(report(RISING, waste=waste))[1:] == ["90% of the groups are filtered: use easier prompts."]
    slowest = {"who": "scorer", "why": "busy 90%", "advice": "make the reward faster"}
    assert headline(report(RISING, bottleneck=slowest))[1:] == ["Scorer is the bottleneck: make the reward faster."]
    assert headline(report(RISING, reward={"first": None, "last": None}, steps=0)) == ["No optimizer step was made."]


def test_what_needs_attention_says_which_setting_may_help_and_is_the_same_on_the_page_and_in_the_text() -> None:
    builder, error = RecordBuilder(steps=2), {"status": "failed", "error": "no GPU"}
    view = view_of([*builder.whole(), builder.measured_by("scorer-0", kind="final", labels=error)])
    assert attention(summarise(view)) == ["scorer-0 failed: no GPU"]
    for step in view.steps.values():
        step.metrics.update(truncated_share=0.9, ess=0.1)
    report = summarise(view)
    lines = attention(report)
    assert [piece in line for piece, line in zip(("no GPU", "max_new_tokens", "max_lag"), lines, strict=True)] == [True] * 3
    page, text = run_facts(view, report, now_s=1.0)["attention"], " ".join(as_text(report).split())
    assert page[:3] == lines and all(line in text for line in lines)


def test_a_straight_line_has_no_noise() -> None:
    assert noise(RISING) == pytest.approx(0.0, abs=1e-9)
    assert noise(NOISY) > 0.03


def test_a_whole_run_has_a_headline() -> None:
    assert headline(summarise(view_of(RecordBuilder(steps=30).whole())))[0].startswith("It learned")
