"""A step of a trainer of several processes: how its samples are divided, and that a repeated step keeps the recorded division."""

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.pipeline.learner.micro_batches import Ranks
from penstock.pipeline.learner.train_step import Objective, Step, StepOutcome
from penstock.topics.ledger import Planned
from tests.support.number_run import NumberBackend, config_of
from tests.support.strategies import a_group

pytest.importorskip("torch")

SIZE, GROUPS, SAMPLES = 4, 8, 8


class FakeProcesses:
    """Counts the sequences of each rank; the statistics of other ranks are those of an empty micro-batch."""

    size = SIZE

    def __init__(self) -> None:
        self.sequences = [0] * SIZE
        self.batches = [0] * SIZE

    def send(self, rank: int, **message: Any) -> None:
        self.sequences[rank] += len(message.get("rows", ()))
        self.batches[rank] += message["do"] == "train"

    def broadcast(self, **message: Any) -> None:
        assert message == {"do": "report"}

    def replies(self) -> list[Any]:
        return [[{"tokens": 0.0, "loss_sum": 0.0, "denominator": 0.0}] * batches for batches in self.batches[1:]]


class CountingBackend(NumberBackend):
    """Rank 0's backend; of the sequences that it trains only those with a trained token count."""

    trained = 0

    def backward(self, batch: Any, _loss: Any, *, denominator: float | None = None) -> dict[str, float]:
        self.trained += int(batch.completion_mask.any(1).sum())
        return super().backward(batch, _loss, denominator=denominator)


def divided(*, groups: int = GROUPS, by: str = "padded", recorded_ends: Sequence[int] | None = None) -> tuple[list[int], StepOutcome]:
    """Sequences of each rank, and the outcome, of a step of groups of 8 samples of 100 tokens."""
    config = config_of(
        trainer={"processes": SIZE, "micro_batch_tokens": 8192, "micro_batch_by": by},
        schedule={"prompts_per_step": groups, "samples_per_prompt": SAMPLES},
    )
    processes, backend = FakeProcesses(), CountingBackend()
    ranks = Ranks(processes)  # type: ignore[arg-type]
    step = Step(backend, Objective.of(config), 0, ranks, recorded_ends=recorded_ends)  # type: ignore[arg-type]
    for number in range(groups):
        group = a_group(samples=SAMPLES, tokens=95, group=number)
        step.add(group, Planned(group=number, sha256="", partition=0, offset=number))
    outcome = step.finish(learner_version=9)
    return [backend.trained, *processes.sequences[1:]], outcome


def test_a_step_that_fits_into_one_micro_batch_is_divided_between_all_ranks() -> None:
    sequences, outcome = divided()
    assert (sequences, outcome.boundaries) == ([16, 16, 16, 16], (16, 32, 48, 64))


def test_a_step_of_one_group_is_divided_between_all_ranks_by_computed_tokens() -> None:
    sequences, outcome = divided(groups=1, by="computed")
    assert (sequences, outcome.boundaries) == ([2, 2, 2, 2], (2, 4, 6, 8))


@pytest.mark.parametrize("by", ["padded", "computed"])
def test_a_repeated_step_keeps_the_recorded_micro_batches(by: str) -> None:
    sequences, outcome = divided(by=by, recorded_ends=(64,))
    assert (sequences, outcome.boundaries) == ([0, 64, 0, 0], (64,))
