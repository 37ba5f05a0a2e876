"""A run in which samples have no reward: its report, audit, tables, training again and scoring again agree on which."""

from pathlib import Path

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.archive.sql import LiveTables, ask
from penstock.pipeline.inspect.report.text import as_text
from penstock.pipeline.inspect.run_view import load
from penstock.pipeline.inspect.status import standing
from penstock.pipeline.replay.recording import Recording
from penstock.pipeline.replay.rescore import RescoreRequest, score_run
from penstock.pipeline.replay.steps import ReplayRequest
from penstock.pipeline.replay.verify import ReplayResult, replay
from tests.support.worker_set import clean, complete, config_of

PARTIAL = """import time


def scored(text):
    kind = sum(map(ord, text)) % 4
    if kind == 0:
        {broken}
    return None if kind == 1 else sum(c.isdigit() for c in text) / 8


def partial(completions, **columns):
    return [scored(text) for text in completions]
"""
RAISES, HANGS = "raise ValueError('no verdict')", "time.sleep(3600)"


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (RAISES, "ValueError: no verdict (partial.py line 7)"),
        pytest.param(HANGS, "took longer than 1 s and was killed", marks=pytest.mark.slow),
    ],
)
def test_samples_without_a_reward_are_the_same_for_everything_that_reads_the_run(
    run_id: str,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    broken: str,
    error: str,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a replay sets it for its own process
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    reward, log = tmp_path / "partial.py", MemoryLog()
    reward.write_text(PARTIAL.format(broken=broken))
    config = config_of(
        tiny_model,
        tmp_path,
        run={"steps": 2, "seed": 7},
        reward={"functions": [f"{reward}:partial"], "on_error": "drop", "timeout_s": 1.0},
        schedule={"prompts_per_step": 2, "samples_per_prompt": 4, "max_drops_per_step": 50},
        sampling={"max_new_tokens": 4},
        rollout={"workers": 1},
    )
    report = complete(log, run_id, config)
    assert report["status"] == "finished" and report["no_reward"] > 0
    assert f", {report['no_reward']} without a reward" in as_text(report)
    warned = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line and "have no reward" in line]
    assert len(warned) == 2 and sum(error in line for line in warned) == 1, "one for what failed, one for None"
    failed, none = sorted(report["missing_rewards"], key=lambda line: line.endswith("returned None"))
    assert failed.endswith(error) and none.endswith("every reward function returned None")
    assert standing(load(log, run_id), now_s=0.0)["missing_rewards"] == report["missing_rewards"]
    assert all(line in " ".join(as_text(report).split()) for line in (failed, none))
    clean(log, run_id)
    tables = LiveTables(log, run_id)
    scored = "from samples s join groups g on s.group_id = g.group_id where g.outcome in ('scored', 'filtered')"
    (row,) = ask(tables, f"select count(*) - count(s.reward) as without, count(s.reward_error) as broken {scored}").to_pylist()
    assert row["without"] == report["no_reward"] > row["broken"] > 0
    errors = ask(tables, "select distinct reward_error from samples where reward_error is not null")["reward_error"].to_pylist()
    assert all(found.endswith(error) for found in errors), errors
    assert ask(tables, "select reward from rewards order by version")["reward"].to_pylist() == report["reward"]["curve"]
    recording, again = Recording.open(log, run_id), ReplayResult(run_id)
    replay(recording, ReplayRequest(), result=again, notify=lambda _: None)
    recording.close()
    assert (again.as_json()["steps"], again.as_json()["matching_steps"]) == (2, 2)
    scores = score_run(log, run_id, RescoreRequest(), notify=lambda _: None)
    assert (scores["changed"], scores["no_reward"], scores["newly_scored"]["samples"]) == (0, report["no_reward"], 0)
    assert set(scores["outcomes"]) <= {f"{outcome} -> {outcome}" for outcome in ("scored", "filtered", "failed")}, "no outcome changes"
