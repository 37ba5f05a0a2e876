"""A reward that breaks on a held-out completion is counted, and the run goes on, unless it breaks often."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.infra.sandbox.timed_pool import Done
from penstock.pipeline.inspect.report.text import as_text
from penstock.pipeline.inspect.run_view import load
from penstock.pipeline.learner.evaluation import Evaluator
from penstock.pipeline.rewards.scoring import FaultCount
from penstock.pipeline.rewards.values import BrokenReward
from tests.support.worker_set import complete, config_of


class Ended(list[Done[int]]):
    """Stands in for a pool of which all calls have ended."""

    @property
    def pending(self) -> int:
        return len(self)

    def poll(self, _: float) -> list[Done[int]]:
        return [self.pop()]


ROLES = ("trainer", "rollout", "scorer", "feeder", "evaluator")


def test_a_run_whose_evaluation_reward_breaks_ends_with_the_failures_counted_and_each_source_measured(
    run_id: str, tiny_model: Path, tmp_path: Path
) -> None:
    frail = tmp_path / "frail.py"
    frail.write_text(
        "def frail(prompts, completions, **columns):\n"
        "    if '3+4' in prompts[0]:\n        raise ValueError('no such number')\n"
        "    return [0.5 for _ in completions]\n"
    )
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"prompt": f"{i}-{i}=", "answer": "0"}) + "\n" for i in range(3)))
    held = {
        "source": [str(tmp_path / "data.jsonl"), str(other)], "limit": 4, "every": 2, "samples": 2,
        "functions": [f"{frail}:frail"], "threshold": 0.5,
    }  # fmt: skip
    config = config_of(tiny_model, tmp_path, run={"steps": 2, "seed": 7}, eval=held)
    report = complete(MemoryLog(), run_id, config, roles=ROLES)
    assert (report["status"], report["steps"]) == ("finished", 2)
    assert [found["version"] for found in report["eval"]] == [0, 2]
    assert [one["prompt"] for one in report["examples"]] == [f"{i}+{i + 1}=" for i in range(3)]
    assert [(one["before"]["version"], one["after"]["version"]) for one in report["examples"]] == [(0, 2)] * 3
    assert {one[when]["reward"] for one in report["examples"] for when in ("before", "after")} == {0.5}
    text = as_text(report, full=True)
    assert all(one["after"]["completion"] in text and one["prompt"] in text for one in report["examples"])
    for found in report["eval"]:
        assert (found["n"], found["n_failed"], found["greedy_accuracy"]) == (7.0, 3.0, 1.0)
        assert (found["data/n"], found["data/n_failed"]) == (4.0, 3.0)
        assert (found["other/n"], found["other/n_failed"], found["other/sampled_reward/frail"]) == (3.0, 0.0, 0.5)


@pytest.mark.slow
def test_an_evaluation_reward_that_breaks_on_most_prompts_stops_the_evaluator(run_id: str, tiny_model: Path, tmp_path: Path) -> None:
    frail = tmp_path / "frail.py"
    frail.write_text("def frail(completions, **columns):\n    return [1 / 0]\n")
    held = {"source": str(tmp_path / "data.jsonl"), "limit": 8, "samples": 1, "functions": [f"{frail}:frail"], "threshold": 0.5}
    config = config_of(tiny_model, tmp_path, run={"steps": 1, "seed": 7}, eval=held)
    with pytest.raises(AssertionError, match=r"evaluator failed: .*ZeroDivisionError.* for 6 of 6 groups"):
        complete(MemoryLog(), run_id, config, roles=ROLES)


def test_a_reward_that_breaks_on_most_groups_stops_the_scorer_which_has_written_them(run_id: str, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "frail.py").write_text("def frail(completions, **columns):\n    return [1 / 0]\n")
    config = config_of(tiny_model, tmp_path, run={"steps": 8, "seed": 7}, reward={"functions": [f"{tmp_path / 'frail.py'}:frail"]})
    log = MemoryLog()
    with pytest.raises(AssertionError, match=r"scorer-0 failed: .*ZeroDivisionError"):
        complete(log, run_id, config)
    view = load(log, run_id)
    failed = [group for group in view.groups.values() if group.outcome == "failed"]
    assert len(failed) >= 6
    assert len(view.dead_letters) >= len(failed)


@pytest.mark.parametrize(("prompts", "stops"), [(10, False), (11, True)])
def test_a_reward_that_breaks_on_one_completion_of_two_counts_as_half_a_prompt_and_is_logged_at_first(prompts: int, stops: bool) -> None:
    score = {"rewards": [1.0, None], "components": [[1.0], [None]], "broken": {"1": "reward f broke: KeyError (f.py line 3)"}}
    pool: Any = Ended(Done(key=number, result=score, seconds=0.0) for number in range(prompts))
    logged = list[str]()
    unused: Any = None
    evaluator = Evaluator(unused, unused, logged.append, unused, unused, pool, unused, [], [], unused, FaultCount("stop"), lambda: None)
    if stops:
        with pytest.raises(BrokenReward, match=r"it failed for 5\.5 of 11 groups"):
            evaluator._scored()
    else:
        assert len(evaluator._scored()) == prompts
    reason = "reward f broke: KeyError (f.py line 3); others of this cause are only counted"
    assert logged == [f"no reward for a completion of held-out prompt {prompts - 1}: {reason}"]
