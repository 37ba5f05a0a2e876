"""Which keys of a configuration may change when a run goes on."""

from typing import Any

import pytest

from penstock.pipeline.config.load import Config, ConfigError, from_table, override
from penstock.pipeline.config.resume import CHANGEABLE, changed


def config_of(**sections: Any) -> Config:
    return from_table({"run": {"steps": 1}, "model": {"path": "m"}, "data": {"source": "d.jsonl"}, **sections})


def test_what_neither_draws_nor_trains_may_change() -> None:
    new = changed(config_of(), ["trainer.on_mismatch=rebase", "trainer.threads=2", "scorer.processes=4"])
    assert (new.trainer.on_mismatch, new.trainer.threads, new.scorer.processes) == ("rebase", 2, 4)


@pytest.mark.parametrize("text", ["schedule.mode=in_flight", "sampling.temperature=0.5", "trainer.lr=1", "run.seed=2", "trainer.thread=2"])
def test_any_other_key_is_refused_by_name_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"--set {text.partition('=')[0]}: stays as the run was created with; what may change is run\."):
        changed(config_of(), [text])


def test_workers_may_change_as_far_as_the_partitions_reach() -> None:
    assert changed(config_of(), ["rollout.workers=1"]).rollout.workers == 1
    with pytest.raises(ConfigError, match="the run has 8 partitions, made for at most 2 rollout workers"):
        changed(config_of(), ["rollout.workers=9"])


def test_every_key_that_may_change_exists() -> None:
    table = config_of().model_dump()
    assert [key for key in CHANGEABLE if key.partition(".")[2] not in table[key.partition(".")[0]]] == []
    assert override(config_of(), ["trainer.threads=2"]).trainer.threads == 2
