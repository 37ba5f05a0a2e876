"""What a stopped run is made of is compared when it goes on: other rows are refused, other code is told; report and audit repeat both."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from penstock.pipeline.config.load import Config, ConfigError, from_table, to_json
from penstock.pipeline.config.resume import changed
from penstock.pipeline.data.run_data import described, open_data, open_eval_data, refuse_changed
from penstock.pipeline.inspect.audit import report as audit_report
from penstock.pipeline.inspect.audit.facts import Facts
from penstock.pipeline.inspect.report.summary import summarise
from penstock.pipeline.inspect.report.text import as_text
from penstock.pipeline.launch.check.changes import code_digests, with_changes
from penstock.pipeline.rewards import functions as rewards
from penstock.topics.runs import RunRecord
from tests.support.a_run import RecordBuilder, view_of

ROWS = "".join(json.dumps({"prompt": f"{number}+1=", "answer": str(number + 1)}) + "\n" for number in range(8))
CODE = "def reward(completions, **_):\n    return [0.0 for _ in completions]\n\n\nclass Game:\n    pass\n"


@pytest.fixture
def made(tmp_path: Path) -> tuple[RunRecord, Config]:
    """The record of a run on files of this folder, and its configuration."""
    for name in ("rows.jsonl", "held.jsonl"):
        (tmp_path / name).write_text(ROWS)
    for name in ("rew.py", "own.py", "env.py", "held.py"):
        (tmp_path / name).write_text(CODE)
    config = from_table(
        {
            "run": {"steps": 9},
            "model": {"path": str(tmp_path)},
            "data": {"source": str(tmp_path / "rows.jsonl")},
            "eval": {"source": str(tmp_path / "held.jsonl"), "functions": [f"{tmp_path}/held.py:reward"]},
            "reward": {"functions": [f"{tmp_path}/rew.py:reward", "exact_match"]},
            "environment": {"source": f"{tmp_path}/env.py:Game"},
            "algorithm": {"advantage": f"{tmp_path}/own.py:reward"},
        }
    )
    info = {
        "steps": 9,
        "data": [
            *described(config.data_sources, open_data(config).sources, context="training"),
            *described(config.eval_sources, open_eval_data(config), context="evaluation"),
        ],
        "reward_sources": rewards.digests(config.reward.functions),
        "code": code_digests(config),
    }
    return RunRecord(run="r", status="stopped", config=to_json(config), info=json.dumps(info), created_ns=1, updated_ns=2), config


def edited(text: str) -> str:
    return text.replace("3+1=", "4+1=")


@pytest.mark.parametrize(
    "change",
    [
        edited,
        lambda text: text[: len(text) // 2 + 1].rpartition("\n")[0] + "\n",
        lambda text: text + '{"prompt": "9+1=", "answer": "10"}\n',
        lambda text: "".join(reversed(text.splitlines(keepends=True))),
        lambda text: text.replace('"answer": "2"', '"answer": "3"'),
        lambda text: text.replace('"answer": "2"', '"answer": 2'),
        lambda text: text.replace('"answer": "2"', '"answer": "2", "level": 1'),
    ],
)
@pytest.mark.parametrize(("file", "key"), [("rows.jsonl", "data"), ("held.jsonl", "eval")])
def test_other_rows_are_refused_in_one_line_with_source_and_both_digests(
    made: tuple[RunRecord, Config], tmp_path: Path, change: Callable[[str], str], file: str, key: str
) -> None:
    record, config = made
    before = json.loads(record.info)["data"][file == "held.jsonl"]["digest"][:12]
    (tmp_path / file).write_text(change(ROWS))
    with pytest.raises(ConfigError) as refused:
        with_changes(record, config, notify=pytest.fail)
    line, opened = str(refused.value), open_data(config).sources if key == "data" else open_eval_data(config)
    after = next(iter(opened.values())).digest[:12]
    assert line.startswith(f"{key}.source: the rows of {tmp_path / file} have changed") and "\n" not in line
    assert before in line and after in line and before != after
    assert "penstock run --resume r --set data.on_change=accept" in line


def test_the_same_rows_in_another_file_are_the_same(made: tuple[RunRecord, Config], tmp_path: Path) -> None:
    record, config = made
    (tmp_path / "rows.jsonl").unlink()
    (tmp_path / "rows.jsonl").write_text(ROWS)
    assert with_changes(record, config, notify=pytest.fail) is record


def test_other_rows_that_a_person_accepts_are_told_once_and_stand_in_the_record(made: tuple[RunRecord, Config], tmp_path: Path) -> None:
    record, config = made
    (tmp_path / "rows.jsonl").write_text(edited(ROWS))
    config, said = changed(config, ["data.on_change=accept"], run="r"), list[str]()
    resumed = with_changes(record, config, notify=said.append)
    assert len(said) == 1 and f"data.source {tmp_path / 'rows.jsonl'} changed since" in said[0]
    info = json.loads(resumed.info)
    refuse_changed(info, config.data_sources, open_data(config).sources, context="training", run="r")  # a feeder opens these
    assert [change["what"] for change in info["changes"]] == [f"data.source {tmp_path / 'rows.jsonl'}"]
    assert with_changes(resumed, config, notify=pytest.fail) is resumed


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("rew.py", "reward {}/rew.py:reward"),
        ("held.py", "eval reward {}/held.py:reward"),
        ("env.py", "environment.source {}/env.py:Game"),
        ("own.py", "algorithm.advantage {}/own.py:reward"),
    ],
)
def test_other_code_is_told_once_and_allowed(made: tuple[RunRecord, Config], tmp_path: Path, file: str, what: str) -> None:
    record, config = made
    (tmp_path / file).write_text(CODE.replace("0.0", "50.0"))
    said = list[str]()
    resumed = with_changes(record, config, notify=said.append)
    assert len(said) == 1 and said[0].startswith(f"{what.format(tmp_path)} changed since the run started")
    assert with_changes(resumed, config, notify=pytest.fail) is resumed
    (tmp_path / file).write_text(CODE)
    assert len(json.loads(with_changes(resumed, config, notify=said.append).info)["changes"]) == 2


def test_a_run_of_an_earlier_release_whose_record_lacks_digests_goes_on(made: tuple[RunRecord, Config], tmp_path: Path) -> None:
    record, config = made
    (tmp_path / "rows.jsonl").write_text(edited(ROWS))
    (tmp_path / "env.py").write_text("class Game: ...")
    old = replace(record, info=json.dumps({"steps": 9}))
    assert with_changes(old, config, notify=pytest.fail) is old


CHANGE = {"what": "reward rew.py:reward", "before": "1" * 64, "after": "2" * 64}


def test_report_and_audit_repeat_a_change_with_the_steps_that_were_done_before() -> None:
    builder = RecordBuilder(steps=4)
    records = builder.start()
    for step in range(4):
        builder.now_s += 1.0
        records.append(builder.entry("step", step=step, version=step, metrics={}))
    view = view_of(records)
    assert view.record is not None
    moment = int((view.steps[1].time_s + 0.5) * 1e9)
    changes = [{**CHANGE, "time_ns": moment}]
    view.record = replace(view.record, info=json.dumps({**json.loads(view.record.info), "changes": changes}))
    report = summarise(view)
    assert [change["steps"] for change in report["changed"]] == [2]
    text = as_text(report, directory=None)
    assert "while the run was stopped: rewards before and after may not be comparable" in text
    assert text.count("rew.py:reward") == 1 and "reward rew.py:reward after 2 steps: 111111111111 -> 222222222222" in text
    entries = [SimpleNamespace(entry=SimpleNamespace(kind="step", time_ns=int(view.steps[step].time_s * 1e9))) for step in range(4)]
    facts = cast(Facts, SimpleNamespace(changes=changes, entries=entries))
    assert next(audit_report._about_the_run(facts)) == (
        "reward rew.py:reward was changed while the run was stopped, after 2 steps: 111111111111 -> 222222222222"
    )


def test_a_report_of_a_run_in_which_nothing_was_changed_says_nothing() -> None:
    report = summarise(view_of(RecordBuilder().start()))
    assert report["changed"] == []
    assert "hanged" not in as_text(report, directory=None)
