"""Which keys of a configuration may change when a run goes on."""

import pytest

from penstock.pipeline.config.load import ConfigError, override
from penstock.pipeline.config.resume import CHANGEABLE, changed
from tests.support.least_config import least_config


def test_what_neither_draws_nor_trains_may_change_and_a_resumed_run_may_bear_more_dropped_groups() -> None:
    changes = ["trainer.on_mismatch=rebase", "trainer.threads=2", "scorer.processes=4", "schedule.max_drops_per_step=900"]
    new = changed(least_config(), changes, run="demo")
    assert (new.trainer.on_mismatch, new.trainer.threads, new.scorer.processes, new.rules.max_drops_per_step) == ("rebase", 2, 4, 900)


@pytest.mark.parametrize(
    "text", ["schedule.mode=in_flight", "sampling.temperature=0.5", "trainer.lr=1", "run.seed=2", "data.source=other.jsonl", "run.steps=9"]
)
def test_any_other_key_is_refused_in_one_line_that_names_the_command_to_change_it(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        changed(least_config(), ["trainer.threads=2", text], run="demo")
    line = str(refused.value)
    assert line.startswith(f"--set {text.partition('=')[0]}: demo must keep the value that it was created with; ")
    assert f"penstock fork demo --set trainer.threads=2 --set {text} --start" in line and "\n" not in line


@pytest.mark.parametrize(
    ("text", "way"),
    [
        ("data.first_group=4", "`penstock fork` sets data.first_group: create another run with `penstock run CONFIG`"),
        ("trainer.initial_steps=4", "a fork must too, because `penstock fork` sets trainer.initial_steps"),
        ("run.epochs=2", "a fork takes a number of steps instead: penstock fork demo --set run.steps=N --start"),
        ("trainer.dtype=bfloat16", "penstock fork demo --from-step 0 --set trainer.threads=2 --set trainer.dtype=bfloat16 --start"),
        ("trainer.lora_rank=4", "the optimizer state depends on trainer.lora_rank, so only a fork from step 0"),
        ("trainer.backend=deepspeed", "only a fork from step 0 can change it"),
        ("run.steps=9", "run.steps counts the fork's own steps"),
    ],
)
def test_the_advice_for_a_key_that_a_fork_cannot_change_either_is_one_that_works(text: str, way: str) -> None:
    with pytest.raises(ConfigError) as refused:
        changed(least_config(), ["trainer.threads=2", text], run="demo")
    assert way in str(refused.value) and "\n" not in str(refused.value)


def test_the_command_that_changes_a_key_can_be_pasted_into_a_shell() -> None:
    with pytest.raises(ConfigError, match=r"penstock fork demo --set 'data\.source=my rows\.jsonl' --start"):
        changed(least_config(), ["data.source=my rows.jsonl"], run="demo")


@pytest.mark.parametrize("text", ["trainer.thread=2", "scorer.worker=2"])
def test_a_key_that_does_not_exist_is_named_with_the_nearest(text: str) -> None:
    key = text.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"{key.partition('.')[2]}.*{key}s?"):
        changed(least_config(), [text], run="demo")


def test_workers_may_change_as_far_as_the_partitions_reach() -> None:
    assert changed(least_config(), ["rollout.workers=1"], run="demo").rollout.workers == 1
    with pytest.raises(ConfigError, match="the run has 8 partitions, enough for at most 2 rollout workers"):
        changed(least_config(), ["rollout.workers=9"], run="demo")


def test_every_key_that_may_change_exists() -> None:
    table = least_config().model_dump()
    assert [key for key in CHANGEABLE if key.partition(".")[2] not in table[key.partition(".")[0]]] == []
    assert override(least_config(), ["trainer.threads=2"]).trainer.threads == 2
