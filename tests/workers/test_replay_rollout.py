"""Recorded prompts drawn again from the log of a finished run."""

import json

import pytest

from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline.cli import main
from penstock.pipeline.learner.ledger_history import read_ledger_history
from tests.support.recorded_run import RecordedRun


def redraw(recorded: RecordedRun, capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["replay", "rollout", recorded.run, "--bootstrap", recorded.bootstrap, "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_same_weights_and_seeds_draw_the_same_tokens_and_logprobs(recorded: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    found = redraw(recorded, capsys, "--step", "5")
    assert (found["samples"], found["same_samples"], found["logprob_difference_max"], found["differences"]) == (16, 16, 0.0, [])
    assert found["tokens_before_a_difference"] == found["tokens"] > 16


def test_other_weights_draw_other_tokens_and_each_difference_is_named(recorded: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    found = redraw(recorded, capsys, "--step", "0", "--policy-version", "7")
    assert 0 < found["same_samples"] + len(found["differences"]) == 16
    assert found["differences"], "seven steps at this learning rate change what is drawn"
    one = found["differences"][0]
    place = one["first_difference"]
    assert one["recorded"][:place] == one["resampled"][:place]
    assert one["recorded"][place : place + 1] != one["resampled"][place : place + 1]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--step", "99"], "--step 99: this step is not committed; steps 0 to 7 are"),
        (["--group", "9999"], "group 9999 was never admitted"),
        (["--step", "0", "--policy-version", "99"], "has published versions 0 to 8"),
        (["--step", "0", "--set", "trainer.lr=1.0"], "trainer.lr does not affect generation"),
    ],
)
def test_what_is_not_recorded_or_has_no_part_in_drawing_is_refused_in_one_line(
    recorded: RecordedRun, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    assert main(["replay", "rollout", recorded.run, "--bootstrap", recorded.bootstrap, *words]) == 2
    assert line in capsys.readouterr().err.splitlines()[-1]


def test_one_group_can_be_drawn_alone_with_other_settings(recorded: RecordedRun, log: KafkaLog, capsys: pytest.CaptureFixture[str]) -> None:
    group = read_ledger_history(log, recorded.run).steps[3].plan[0].group
    assert redraw(recorded, capsys, "--group", str(group))["same_samples"] == 4
    assert redraw(recorded, capsys, "--group", str(group), "--set", "run.seed=8")["same_samples"] < 4
