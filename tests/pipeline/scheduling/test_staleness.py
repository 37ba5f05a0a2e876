"""How old tokens and groups are: the summaries, and what a step says of what it trained."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.backends.base import StepResult
from penstock.pipeline.scheduling.rules import fractions_by_lag, lag_summary
from penstock.topics import groups
from penstock.topics.groups import Group
from tests.support.a_run import RecordBuilder
from tests.support.least_config import least_config


def test_a_summary_worked_out_by_hand() -> None:
    assert lag_summary([0] * 19 + [7]) == {"lag_min": 0.0, "lag_mean": 0.35, "lag_max": 7.0, "lag_p95": 0.0}
    assert lag_summary([0] * 18 + [3, 7])["lag_p95"] == 3.0
    assert lag_summary([2]) == {"lag_min": 2.0, "lag_mean": 2.0, "lag_max": 2.0, "lag_p95": 2.0}
    assert lag_summary([]) == {}
    assert fractions_by_lag([2, 0, 0, 0]) == {0: 0.75, 2: 0.25}
    assert fractions_by_lag([]) == {}


@given(st.lists(st.integers(0, 9), min_size=1, max_size=50))
def test_a_summary_is_ordered_and_fractions_add_up(lags: list[int]) -> None:
    found = lag_summary(lags)
    assert found["lag_min"] <= min(found["lag_mean"], found["lag_p95"]) <= max(found["lag_mean"], found["lag_p95"]) <= found["lag_max"]
    assert sum(lag <= found["lag_p95"] for lag in lags) >= 0.95 * len(lags)
    shares = fractions_by_lag(lags)
    assert list(shares) == sorted(set(lags))
    assert sum(shares.values()) == pytest.approx(1.0)
    assert sum(lag * share for lag, share in shares.items()) == pytest.approx(found["lag_mean"])


def group_of(number: int, samples: list[dict[str, Any]]) -> Group:
    """A group of four samples of eight tokens, changed as said."""
    group = groups.decode(RecordBuilder().group([1.0, 0.0, 1.0, 0.0], version=5)[-1].value)
    ids, logprobs, mask = np.arange(8, dtype=np.int32), np.zeros(8, np.float32), np.ones(8, bool)
    plain = {"group": number, "token_ids": ids, "behaviour_logprobs": logprobs, "loss_mask": mask}
    changed = [
        replace(sample, rollout=replace(sample.rollout, **{**plain, **more}))
        for sample, more in itertools.zip_longest(group.samples, samples, fillvalue={})
    ]
    return replace(group, group=number, samples=tuple(changed))


def spans(versions: list[int], starts: list[int]) -> dict[str, Any]:
    return {"span_versions": np.array(versions, np.int32), "span_starts": np.array(starts, np.int32)}


class Backend:
    """Adds nothing up; says what every step says."""

    divides_late = True
    shares_prompts = False
    steps = 0

    def backward(self, batch: Any, *_: Any, **__: Any) -> dict[str, float]:
        return {"tokens": float(batch.tokens), "loss_sum": 0.0, "denominator": 1.0}

    def step(self, *, denominator: float) -> Any:
        return StepResult(grad_norm=1.0, lr=0.1)


def measured(*found: Group) -> Mapping[str, float]:
    pytest.importorskip("torch")
    from penstock.pipeline.learner.train_step import Objective, Step

    step = Step(Backend(), Objective.of(least_config()), number=5)  # type: ignore[arg-type]
    for group in found:
        step.add(group)
    return step.finish(learner_version=5).metrics


def test_a_step_says_how_old_its_groups_and_its_trained_tokens_are() -> None:
    mixed = spans([3, 5], [0, 2])  # two tokens of version 3, six of version 5
    aborted = {**spans([4], [0]), "finish": "abort"}
    found = measured(group_of(0, [mixed, aborted, spans([5], [0]), spans([5], [0])]), group_of(1, [spans([5], [0])] * 4))
    assert {name: found[name] for name in found if "lag" in name or "spans" in name} == pytest.approx({
        "lag_min": 0.0, "lag_mean": 1.0, "lag_max": 2.0, "lag_p95": 2.0,
        "lag_steps_min": 0.0, "lag_steps_mean": 1.0, "lag_steps_max": 2.0, "lag_steps_p95": 2.0,
        "token_lag_min": 0.0, "token_lag_mean": 4 / 56, "token_lag_max": 2.0, "token_lag_p95": 0.0,
        "tokens_at_lag_0": 54 / 56, "tokens_at_lag_2": 2 / 56,
        "spans_mean": 8 / 7,
    })  # fmt: skip


def test_tokens_that_are_not_trained_have_no_lag() -> None:
    found = measured(group_of(0, [{**spans([1, 5], [0, 2]), "loss_mask": np.array([False] * 2 + [True] * 6)}]))
    assert (found["token_lag_max"], found["lag_max"], found["tokens_at_lag_0"]) == (0.0, 0.0, 1.0)
