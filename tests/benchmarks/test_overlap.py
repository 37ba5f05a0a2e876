"""Overlap table: savings against the attainable saving and the simulator's prediction."""

from typing import Any

import pytest

from benchmarks.overlap import phases, rows, show


def report(*, wall: float, rollout: float, train: float, waiting: float) -> dict[str, Any]:
    one = {"rollout_s": rollout, "rollout_to_train_end_s": rollout + train, "first_dispatch_s": 1.0}
    return {
        "time": {"train_s": wall, "trainer_waiting_ratio": waiting},
        "rounds": [one, one],
        "lag": {"mean": 0.0},
        "weights": {"digest": "ab" * 32},
    }


def test_a_saving_is_shown_with_its_share_of_the_attainable_and_of_the_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    synchronous = [report(wall=wall, rollout=10.0, train=10.0, waiting=0.5) for wall in (39.0, 40.0, 41.0)]
    reports = {"synchronous": synchronous, "pipelined": [report(wall=22.0, rollout=10.0, train=1.0, waiting=0.1)]}
    variants = [{"mode": mode, "workers": 1, "wall_s": wall} for mode, wall in (("synchronous", 40.0), ("pipelined", 21.0))]
    assert phases(synchronous) == (10.0, 10.0)
    base, pipelined = rows(reports, {"workers": 1, "variants": variants}, slowdown=(1.0, 1.0))
    assert base["saving"] == 0.0
    assert base["spread_s"] == [39.0, 41.0]
    assert pipelined["saving"] == pytest.approx(0.45)
    assert pipelined["of_attainable"] == pytest.approx(0.9)
    assert pipelined["of_predicted"] == pytest.approx(0.45 / 0.475)
    show([base, pipelined], rollout=10.0, train=10.0, slowdown=(1.25, 1.25))
    assert "attainable saving 37.5% here, 50.0% without slowdown" in capsys.readouterr().out
