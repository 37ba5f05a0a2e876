"""Which prompts a whole run asks: all of its epochs and no more, mixed sources with their own rewards and sampling, no solved row twice."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.config.load import ConfigError
from penstock.pipeline.learner.ledger_history import read_ledger_history
from penstock.topics import groups, prompts
from penstock.topics.groups import Group
from tests.support.least_config import least_config
from tests.support.refusals import one_line
from tests.support.worker_set import clean, complete, config_of, records_of

JUDGES = """def even(prompts, completions, **columns):
    return [float(int(prompt.split("+")[0]) % 2 == 0) * len(text) for prompt, text in zip(prompts, completions)]


def length(prompts, completions, **columns):
    return [len(text) / 8 for text in completions]


def known(prompts, completions, **columns):
    return [1.0 - 0.001 * (place if int(prompts[0].split("+")[0]) % 2 else 0) for place in range(len(prompts))]
"""


@pytest.fixture
def judges(tmp_path: Path) -> str:
    (tmp_path / "judges.py").write_text(JUDGES)
    return str(tmp_path / "judges.py")


def ended(log: MemoryLog, run: str) -> list[Group]:
    return [groups.read([record], run=run)[1] for record in records_of(log, f"{run}.groups")]


def test_a_run_of_epochs_ends_when_every_prompt_was_asked_though_half_are_filtered(
    run_id: str, tiny_model: Path, tmp_path: Path, judges: str
) -> None:
    log = MemoryLog()
    config = config_of(tiny_model, tmp_path, run={"steps": None, "epochs": 1.0}, reward={"functions": [f"{judges}:even"]})
    report = complete(log, run_id, config)
    asked = Counter(prompts.read(record, run=run_id)[1].row for record in records_of(log, f"{run_id}.prompts"))
    assert asked == dict.fromkeys(range(40), 1)
    found = report["groups"]
    assert (report["status"], report["steps_planned"], found["admitted"]) == ("finished", 10, 40)
    assert found["filtered"] >= 20 and found["trained"] == 4 * report["steps"] <= 20 and found["unused"] < 4
    closed = read_ledger_history(log, run_id).ledger_state.closed
    assert closed is not None and "every prompt of the run's epochs was used" in (closed.details or "")
    left = found["unused"]
    assert ("scored groups are unused, because a step needs 4" in report["reason"]) == (left > 0)
    assert not left or f"; {left} scored groups are unused" in report["reason"]
    clean(log, run_id)


def test_sources_are_mixed_by_weight_each_with_its_rewards_and_sampling(run_id: str, tiny_model: Path, tmp_path: Path, judges: str) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"prompt": f"{i}-{i}=", "answer": "0"}) + "\n" for i in range(5)))
    log = MemoryLog()
    data: dict[str, Any] = {
        "source": [str(tmp_path / "data.jsonl"), str(other)], "max_prompt_tokens": 32, "weights": [3.0, 1.0],
        "rewards": {"other": ["length"]}, "sampling": {"other": {"temperature": 0.5, "max_new_tokens": 4}},
    }  # fmt: skip
    reward = {"functions": [f"{judges}:even", f"{judges}:length"]}
    complete(log, run_id, config_of(tiny_model, tmp_path, data=data, reward=reward, run={"steps": 3, "seed": 1}))
    found = ended(log, run_id)
    other_groups = [group for group in found if json.loads(group.columns)["data_source"] == "other"]
    assert abs(len(other_groups) - len(found) / 4) <= 2
    assert all(group.row >= 40 and group.prompt in {f"{i}-{i}=" for i in range(5)} for group in other_groups)
    for group in found:
        own = group in other_groups
        for sample in group.samples:
            assert (sample.rollout.temperature, len(sample.rollout.token_ids) <= 4 if own else True) == (0.5 if own else 1.0, True)
            assert (sample.components[0] is None) == own and sample.components[1] is not None
    clean(log, run_id)


def test_rows_that_were_solved_are_left_out_of_the_next_epoch(run_id: str, tiny_model: Path, tmp_path: Path, judges: str) -> None:
    log = MemoryLog()
    data = {"limit": 6, "skip_solved": 1.0}
    schedule = {"prompts_per_step": 3}
    reward = {"functions": [f"{judges}:known"]}
    complete(log, run_id, config_of(tiny_model, tmp_path, data=data, schedule=schedule, reward=reward, run={"steps": 3, "seed": 1}))
    asked = [prompts.read(record, run=run_id)[1] for record in records_of(log, f"{run_id}.prompts")]
    assert {prompt.row for prompt in asked if prompt.epoch == 0} == set(range(6))
    assert {prompt.row for prompt in asked if prompt.epoch == 1} == {1, 3, 5}
    clean(log, run_id)


@pytest.mark.parametrize(
    ("data", "mistake"),
    [
        ({"weights": [1.0]}, "data.weights: 1 weights for 2 sources"),
        ({"rewards": {"c": ["exact_match"]}}, "data.rewards.c: data.source has no such source; expected one of a, b"),
        ({"rewards": {"a": ["exact"]}}, "data.rewards.a: 'exact' is not in reward.functions; add it there"),
        ({"sampling": {"a": {"max_new_tokens": 999}}}, "data.sampling.a.max_new_tokens: 999 is above sampling.max_new_tokens = 256"),
        ({"source": ["x/a.jsonl", "y/a.jsonl"]}, "data.source: two sources have the same name 'a'; rename one"),
        ({"skip_solved": 0.1, "skip_unsolved": 0.5}, "data.skip_solved: 0.1 must be above data.skip_unsolved = 0.5"),
    ],
)
def test_a_mixture_that_does_not_fit_is_refused_in_one_line(data: dict[str, Any], mistake: str) -> None:
    with one_line(ConfigError, match=f"^{re.escape(mistake)}"):
        least_config(data={"source": ["a.jsonl", "b.jsonl"], **data})
