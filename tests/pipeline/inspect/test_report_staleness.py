"""Lag, effective sample size and engines in the report: every figure against steps and workers whose numbers are known."""

import pytest

from penstock.pipeline.inspect.report import figures
from penstock.pipeline.inspect.report.summary import summarise
from penstock.pipeline.inspect.report.text import as_text
from penstock.pipeline.inspect.run_view_types import StepFacts
from tests.support.a_run import RecordBuilder, view_of

STEPS = [
    StepFacts(step=0, version=0, time_s=1.0, groups=(0,), metrics={
        "samples": 4.0, "tokens": 30.0, "lag_mean": 0.0, "lag_p95": 0.0, "lag_max": 0.0, "token_lag_mean": 0.0, "token_lag_max": 0.0,
        "tokens_at_lag_0": 1.0, "spans_mean": 1.0, "ess": 1.0,
    }),
    StepFacts(step=1, version=1, time_s=2.0, groups=(1,), metrics={
        "samples": 12.0, "tokens": 10.0, "lag_mean": 2.0, "lag_p95": 3.0, "lag_max": 3.0, "token_lag_mean": 1.6, "token_lag_max": 3.0,
        "tokens_at_lag_0": 0.4, "tokens_at_lag_3": 0.6, "spans_mean": 3.0, "ess": 0.8,
    }),
]  # fmt: skip


def test_the_lag_of_steps_is_weighted_by_what_it_counts() -> None:
    found = figures.lag(STEPS)
    assert found["mean"] == pytest.approx(1.5)
    assert found["p95"] == pytest.approx(2.25)
    assert found["max"] == 3.0
    assert found["tokens"]["mean"] == pytest.approx(0.4)
    assert found["tokens"]["shares"] == pytest.approx({"0": 0.85, "3": 0.15})
    assert found["spans"] == pytest.approx(2.5)
    assert figures.ess(STEPS) == {"mean": pytest.approx(0.85), "min": 0.8}


def test_without_steps_nothing_is_known() -> None:
    assert figures.lag([])["mean"] is None
    assert figures.ess([]) == {"mean": None, "min": None}


def test_engines_of_all_rollout_workers_are_added_up_and_named_in_the_text() -> None:
    builder = RecordBuilder(steps=2)
    records = [
        *builder.whole(),
        builder.measured_by("rollout-0", "final", engine_swaps=3.0, engine_swap_stall_s=0.12, engine_swap_stall_max_s=0.06,
                           engine_occupancy=0.5, engine_prefix_cache_queries=10.0, engine_prefix_cache_hits=4.0),
        builder.measured_by("rollout-1", "final", engine_swaps=1.0, engine_swap_stall_s=0.08, engine_swap_stall_max_s=0.08,
                           engine_occupancy=0.9, engine_prefix_cache_queries=10.0, engine_prefix_cache_hits=1.0, aborted_groups=2.0),
    ]  # fmt: skip
    view = view_of(records)
    found = figures.engines(view)
    assert found == {
        "swaps": 4.0,
        "swap_stall_ms_mean": pytest.approx(50.0),
        "swap_stall_ms_max": pytest.approx(80.0),
        "occupancy": pytest.approx(0.7),
        "prefix_cache_hits": pytest.approx(0.25),
        "aborted_groups": 2.0,
    }
    text = as_text(summarise(view), full=True)
    assert "4 times new weights in flight (50 ms each, 80 max) · batch 70 % full" in " ".join(text.split())
