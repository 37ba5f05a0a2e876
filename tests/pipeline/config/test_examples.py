"""The examples beyond a dry run: the own loss in a real optimizer step of a real model."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.topics import groups
from tests.support.a_run import RecordBuilder
from tests.support.paths import EXAMPLES

pytestmark = pytest.mark.costly  # trains a model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, barely taught."""
    pytest.importorskip("torch")
    from penstock.pipeline.data.tiny.model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("example") / "model", steps=1)


def stepped(config: Any) -> Any:
    """A step on one group with the rewards 1 and 0."""
    from penstock.pipeline.learner.train_step import Objective, Step
    from penstock.pipeline.runtime.factories import make_backend

    with closing(make_backend(config, steps=1)) as backend:
        step = Step(backend, Objective.of(config), number=0)
        step.add(groups.decode(RecordBuilder().group([1.0, 0.0], version=0)[-1].value))
        return step.finish(learner_version=0)


@pytest.mark.parametrize(
    ("overrides", "more"),
    [([], set()), (["algorithm.proximal=behaviour", "schedule.steps_per_version=2"], set()), (["algorithm.kl_coef=0.1"], {"kl_reference"})],
    ids=["current", "behaviour", "with a reference"],
)
def test_the_example_loss_trains_and_is_summarised_like_the_built_in_one(model: Path, overrides: list[str], more: set[str]) -> None:
    from penstock.pipeline.config.load import load

    config = load(EXAMPLES / "own.toml", [f'model.path="{model}"', "trainer.device=cpu", *overrides])
    algorithms = (config.algorithm.model_copy(update={"loss": name}) for name in (config.algorithm.loss, "grpo"))
    own, built_in = (stepped(config.model_copy(update={"algorithm": algorithm})) for algorithm in algorithms)
    assert own.metrics.keys() == built_in.metrics.keys() >= {"loss", "grad_norm", "clip_fraction", "ess", "tokens", *more}
    assert own.metrics["ess"] == built_in.metrics["ess"]
    assert own.grad_norm > 0 and own.loss != built_in.loss


def test_the_example_loss_halves_what_mistakes_weigh_in_a_step(model: Path) -> None:
    from penstock.pipeline.config.load import load

    config = load(EXAMPLES / "own.toml", [f'model.path="{model}"', "trainer.device=cpu", "algorithm.advantage=dr_grpo"])
    # Advantages 1/2 and -1/2 under the current policy, whose ratio is 1: -(1/2 - 1/4) over two sequences.
    assert stepped(config).loss == pytest.approx(-0.125)


def test_the_sums_of_the_real_model_are_held_out_and_judged_by_their_last_number() -> None:
    from penstock.pipeline.config.plugins import load

    sums, last_number = (load(f"{EXAMPLES}/arithmetic.py:{name}") for name in ("sums", "last_number"))
    train, test = ({row["prompt"]: row["answer"] for row in sums(split=split)} for split in ("train", "held_out"))
    assert len(train) == len(test) == 200
    assert not train.keys() & test.keys()
    prompt, answer = next(iter(test.items()))
    assert str(sum(int(word) for word in prompt.split("?")[0].split() if word.isdigit())) == answer
    assert last_number(["12 + 3 = 15", "15.", "15 or 16", "fifteen", ""], answer=["15"] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]
