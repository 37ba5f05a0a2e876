"""What a what-if may change, and what not and why."""

import re
from typing import Any

import pytest

from penstock.pipeline.config.load import Config, ConfigError, from_table
from penstock.pipeline.replay.overrides import what_if
from penstock.pipeline.replay.recording import ranges

TABLE: dict[str, dict[str, Any]] = {"run": {"steps": 4}, "model": {"path": "/m"}, "data": {"source": "tiny:successor"}}


@pytest.fixture
def config() -> Config:
    return from_table(TABLE)


def test_a_change_is_told_with_the_recorded_value(config: Config) -> None:
    found = what_if(config, ["algorithm.loss=gspo", "trainer.lr=1e-4"])
    assert found.changed == {"algorithm.loss": ("grpo", "gspo"), "trainer.lr": (1e-6, 1e-4)}
    assert str(found) == "algorithm.loss grpo -> gspo, trainer.lr 1e-06 -> 0.0001"
    assert found.config.clip_high == 4e-4
    assert not found.selects


@pytest.mark.parametrize("setting", ["algorithm.filter_zero_variance=false", "schedule.order=arrival", "schedule.prompts_per_step=3"])
def test_other_groups_in_a_step_need_plans_made_anew(config: Config, setting: str) -> None:
    assert what_if(config, [setting]).selects


def test_a_setting_that_is_the_recorded_one_changes_nothing(config: Config) -> None:
    assert what_if(config, ["algorithm.loss=grpo"]).changed == {}


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("rollout.workers=1", "samples are recorded"),
        ("sampling.temperature=0.5", "samples are recorded"),
        ("data.size=3", "prompts are recorded"),
        ("reward.timeout_s=1.0", "see `penstock replay score`"),
        ("schedule.mode=pipelined", "generated under the recorded schedule"),
        ("run.seed=3", "its steps are recorded"),
        ("trainer.export=false", "does not affect training"),
        ("algorithm.truncated=penalise", "the recorded rewards were computed with"),
        ("algorithm.truncated_penalty=-2.0", "the recorded rewards were computed with"),
        ("algorithm.los=gspo", "did you mean 'algorithm.loss'"),
        ("nonsense.key=1", "unknown key"),
        ("algorithm.loss", "expected section.key=value"),
    ],
)
def test_what_cannot_be_changed_is_refused_with_the_reason(config: Config, setting: str, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        what_if(config, [setting])


def test_numbers_are_told_in_few_words() -> None:
    assert ranges([9, 3, 4, 5, 4]) == "3-5, 9"
    assert ranges([]) == ""
