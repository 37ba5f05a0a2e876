"""A run that gets nothing to train, for an hour or for ever, says why, and goes on once that is over."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.inspect.report.summary import collect
from penstock.pipeline.inspect.report.text import as_text
from penstock.pipeline.launch.create import create
from penstock.pipeline.runtime.registration.run_registry import find
from tests.support.worker_set import WorkerSet, clean, config_of

FRAIL = """from pathlib import Path


def share(prompts, completions, **columns):
    if Path({flag!r}).exists():
        raise ConnectionError("the judge does not answer")
    return [sum(c.isdigit() for c in text) / 8 for text in completions]
"""


def attended(log: MemoryLog, run: str, config: Config, *, error: str | None = None) -> dict[str, Any]:
    """Workers come, and go when the run is over, or when its trainer has ended with this error; returns the report."""
    with WorkerSet(log, run) as worker_set:
        worker_set.start_all(config)
        if error is None:
            worker_set.wait()
        else:
            with pytest.raises(AssertionError, match=error):
                worker_set.wait()
            assert list(worker_set.failures) == ["trainer"]
    return collect(log, run)  # once all have ended: a run that was stopped counts as running while workers report


def created(run: str, policy: Path, directory: Path, **sections: Mapping[str, Any]) -> tuple[MemoryLog, Config]:
    log = MemoryLog()
    schedule = {"prompts_per_step": 2, "samples_per_prompt": 4, "max_drops_per_step": 8}  # or some more: groups come together
    config = config_of(policy, directory, run={"steps": 2, "seed": 7}, schedule=schedule, rollout={"workers": 1}, **sections)
    create(config, log=log, run_id=run, notify=lambda _: None)
    return log, config


def test_a_reward_that_is_broken_for_an_hour_stops_the_run_with_its_error_and_the_resumed_run_ends(
    run_id: str, tiny_model: Path, tmp_path: Path
) -> None:
    flag, reward = tmp_path / "broken", tmp_path / "frail.py"
    flag.touch()
    reward.write_text(FRAIL.format(flag=str(flag)))
    log, config = created(run_id, tiny_model, tmp_path, reward={"functions": [f"{reward}:share"], "on_error": "drop"})
    error = r"(9|[1-9]\d) groups were dropped before step 0, .* \1 failed; the last one: .*ConnectionError: the judge does not answer"
    stopped = attended(log, run_id, config, error=error)
    assert (stopped["status"], stopped["steps"], stopped["groups"]["trained"]) == ("stopped", 0, 0)
    assert "fix the reward function" in as_text(stopped)
    again = attended(log, run_id, config, error="groups were dropped since the trainer was started")  # resumed within the hour
    assert again["groups"]["failed"] > stopped["groups"]["failed"]
    flag.unlink()
    ended = attended(log, run_id, config)
    assert (ended["status"], ended["steps"], ended["groups"]["trained"]) == ("finished", 2, 4)
    clean(log, run_id)


def test_completions_that_are_all_truncated_and_masked_stop_the_run_with_that_cause_and_leave_it_sound(
    run_id: str, tiny_model: Path, tmp_path: Path
) -> None:
    log, config = created(run_id, endless(tiny_model, tmp_path), tmp_path, algorithm={"truncated": "mask"})
    error = r"(9|[1-9]\d) groups were dropped .*; the last one: (no sample has a trained token|every sample has the reward)"
    for _ in range(2):
        stopped = attended(log, run_id, config, error=error)
        assert (stopped["status"], stopped["steps"], stopped["groups"]["trained"]) == ("stopped", 0, 0)
    assert "100% of the groups are filtered, because every sample is truncated" in " ".join(as_text(stopped).split())
    found = find(log, run_id)
    assert found is not None and found.status == "stopped"
    clean(log, run_id)


@pytest.mark.slow
def test_completions_that_are_all_truncated_and_trained_are_a_run_that_says_so(run_id: str, tiny_model: Path, tmp_path: Path) -> None:
    log, config = created(run_id, endless(tiny_model, tmp_path), tmp_path)
    report = attended(log, run_id, config)
    assert (report["status"], report["steps"], report["practice"]["truncated_share"]) == ("finished", 2, 1.0)
    assert "100 % truncated" in " ".join(as_text(report).split())


def endless(model: Path, directory: Path) -> Path:
    """The model without a stop token: whatever it draws runs out of tokens."""
    copy = directory / "endless"
    copy.mkdir()
    for file in model.iterdir():
        if file.name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            kept = {name: value for name, value in json.loads(file.read_text()).items() if not name.startswith("eos")}
            (copy / file.name).write_text(json.dumps(kept))
        else:
            (copy / file.name).write_bytes(file.read_bytes())
    return copy
