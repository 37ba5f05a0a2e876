"""`penstock plan`: the best split is the one that the simulator finds fastest, and what is wrong with the input is said in a line."""

import json
from pathlib import Path

import pytest

from penstock.pipeline import cli
from penstock.pipeline.launch.planning.rendering import reasons
from penstock.pipeline.launch.planning.search import Cluster, search, simulated
from penstock.pipeline.launch.planning.workload import Workload, from_speeds, lognormal
from penstock.pipeline.scheduling.rules import preset

GIVEN = ["--accelerators", "6", "--speed", "1:60,16:700", "--train-speed", "700", "--lengths", "lognormal:100:0.5"]
GIVEN += ["--prompts-per-step", "8"]


def cluster(*, max_lag: int, step_sizes: tuple[int, ...] = (8,)) -> Cluster:
    """Four accelerators of which one trains as fast as one draws."""
    schedule = preset("pipelined", prompts_per_step=8, samples_per_prompt=4, steps_per_version=1)
    speeds = {"decode": from_speeds([(1, 60), (16, 700)]), "train_token_s": 1 / 700}
    base = Workload(schedule=schedule, steps=1, lengths=lognormal(100, 0.5), engines=1, concurrency=16, **speeds)  # type: ignore[arg-type]
    return Cluster(accelerators=4, base=base, max_lag=max_lag, step_sizes=step_sizes)


def test_the_best_of_each_mode_is_the_best_of_all_its_splits() -> None:
    plan = search(cluster(max_lag=2))
    for best in plan.by_mode:
        every = [simulated(plan.cluster, mode=best.mode, generating=count, prompts_per_step=8) for count in range(1, 4)]
        assert best.tokens_per_s == max(one.tokens_per_s for one in every)
    assert plan.best.tokens_per_s == max(one.tokens_per_s for one in plan.by_mode)
    assert plan.speedup > 1.0
    assert reasons(plan)


def test_no_mode_goes_beyond_the_lag_bound() -> None:
    assert {one.mode for one in search(cluster(max_lag=0)).by_mode} == {"synchronous", "pipelined"}
    assert all(one.outcome.lag_max <= 1 for one in search(cluster(max_lag=1)).simulated)


def test_the_smallest_step_that_is_nearly_as_fast_is_taken() -> None:
    plan = search(cluster(max_lag=1, step_sizes=(4, 8, 16)))
    fastest = max(one.tokens_per_s for one in plan.by_step_size)
    smaller = [one for one in plan.by_step_size if one.prompts_per_step < plan.best.prompts_per_step]
    assert all(one.tokens_per_s < 0.95 * fastest for one in smaller)


@pytest.mark.costly  # imports matplotlib
@pytest.mark.parametrize("suffix", [pytest.param(".png", marks=pytest.mark.slow), ".svg"])
def test_the_command_prints_json_and_draws_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    picture = tmp_path / f"plan{suffix}"
    assert cli.main(["plan", *GIVEN, "--max-lag", "1", "--json", "--plot", str(picture)]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["best"]["generating"] + plan["best"]["training"] == 6
    assert plan["speedup"] >= 1.0
    assert picture.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--accelerators", "6"], "missing options: --speed, --train-speed, --lengths"),
        ([*GIVEN, "--speed", "fast"], "expected SAMPLES:TOKENS_PER_S"),
        ([*GIVEN, "--lengths", "normal:3"], "lengths 'normal:3'"),
        ([*GIVEN, "--train-speed", "0"], "expected tokens per second above 0"),
        ([*GIVEN, "--engine-size", "6"], "an engine needs 6"),
        ([*GIVEN, "--plot", "plan.jpg"], "ends in .png or .svg"),
    ],
)
def test_wrong_input_is_refused_in_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
