"""A run whose task is solved before its steps are done: evaluated, exported, reported, finished; and what the resumed one needs."""

import json
from pathlib import Path

from penstock.infra.memory.log import MemoryLog
from penstock.infra.paths import run_directory
from penstock.pipeline.inspect.records.runs import list_runs
from penstock.pipeline.launch.create import create
from penstock.pipeline.runtime.registration.run_registry import find
from tests.support.worker_set import PIPELINE, clean, config_of, finish

SOLVED_AFTER = """calls = 0


def letters(completions, **columns):
    global calls
    calls += 1
    return [float(calls > {groups} or number % 2) for number in range(len(completions))]
"""
STEPS, U = 12, 2


def test_a_task_that_is_solved_after_a_third_of_its_steps_ends_evaluated_exported_and_reported(
    run_id: str, tiny_model: Path, tmp_path: Path
) -> None:
    reward, held_out, log = tmp_path / "letters.py", tmp_path / "held_out.jsonl", MemoryLog()
    reward.write_text(SOLVED_AFTER.format(groups=STEPS // 3 * U))
    held_out.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    config = config_of(
        tiny_model,
        tmp_path,
        run={"steps": STEPS, "seed": 7},
        reward={"functions": [f"{reward}:letters"]},
        schedule={"prompts_per_step": U, "samples_per_prompt": 2, "max_drops_per_step": 8},
        sampling={"max_new_tokens": 1},
        rollout={"workers": 1},
        trainer={"export": True, "checkpoint_every": 0},
        eval={"source": str(held_out), "every": 100, "samples": 1, "max_new_tokens": 1},
    )
    create(config, log=log, run_id=run_id, notify=lambda _: None)
    finish(log, run_id, roles=(*PIPELINE, "evaluator", "tracker"))
    ended = find(log, run_id)
    assert ended is not None and ended.status == "finished", "the launcher's status is 0"
    report = json.loads((run_directory(run_id) / "report.json").read_text())
    assert (report["status"], report["steps"], report["steps_planned"]) == ("finished", STEPS // 3, STEPS)
    assert report["reason"].startswith("solved: ") and "the full reward is 1" in report["reason"]
    assert [found["version"] for found in report["eval"]] == [0, report["versions"]]
    assert "finished: solved: " in (run_directory(run_id) / "report.txt").read_text()
    assert (run_directory(run_id) / "model" / "config.json").is_file()
    assert [row["reason"] for row in list_runs(log)] == [report["reason"]]
    clean(log, run_id)
