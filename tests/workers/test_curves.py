"""Curves of `benchmarks in_flight` on a recorded run."""

import itertools

import penstock
from benchmarks.in_flight import curve_of
from tests.support.recorded_run import RecordedRun


def test_a_curve_counts_the_samples_and_seconds_of_each_step_of_a_run(recorded: RecordedRun) -> None:
    with penstock.open(recorded.run, bootstrap=recorded.bootstrap) as run:
        points = curve_of(run.steps().to_pylist())
    assert len(points) == recorded.report["steps"]
    per_step = points[0].samples
    assert [point.samples for point in points] == [per_step * step for step in range(1, len(points) + 1)]
    assert all(0 < before.seconds < after.seconds for before, after in itertools.pairwise(points))
    assert all(0 < point.ess <= 1 for point in points)
