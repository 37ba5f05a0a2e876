"""The table of learning curves shows the runs that have finished."""

import json
from pathlib import Path

from benchmarks import learning_curves


def a_run(variant: str, seed: int, last: float) -> str:
    reward = {"first": 0.1, "last": last, "curve": [0.1, last]}
    return json.dumps({"variant": variant, "seed": seed, "steps": 100, "reward": reward, "eval": [0.0, last]})


def test_the_table_has_every_variant_and_marks_those_that_learn_less_than_grpo(tmp_path: Path) -> None:
    for number, (variant, seed, last) in enumerate(
        [("loss=grpo", 1, 0.8), ("loss=grpo", 2, 0.9), ("loss=gspo", 1, 0.7), ("loss=dapo", 1, 0.81)]
    ):
        (tmp_path / f"{number}.json").write_text(a_run(variant, seed, last))
    lines = {line.split()[0]: line for line in learning_curves.table(learning_curves.finished_runs(tmp_path)).splitlines()[1:]}
    assert set(learning_curves.variants()) <= set(lines)
    assert "0.850" in lines["loss=grpo"] and "0.800-0.900" in lines["loss=grpo"] and "+0.000" in lines["loss=grpo"]
    assert "-0.150*" in lines["loss=gspo"] and "*" not in lines["loss=dapo"]
    assert lines["advantage=rloo"].split() == ["advantage=rloo", "0"]


def test_each_variant_is_the_demo_with_that_loss_or_advantage_and_its_defaults(tmp_path: Path) -> None:
    for name, settings in learning_curves.variants().items():
        config = learning_curves.configuration(tmp_path, settings)
        kind, _, chosen = name.partition("=")
        assert (config.algorithm.loss if kind == "loss" else config.algorithm.advantage) == chosen
        assert config.algorithm.correction is None and config.data.source == "tiny:successor"
        assert (config.run.steps, config.algorithm.clip_low) == (100, None)
