"""`penstock replay score` on a recorded run: what flips, what ends otherwise, what breaks, and a new run that can be trained from."""

import json
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline import cli
from penstock.pipeline.inspect.report.summary import collect
from penstock.pipeline.learner.ledger_history import read_ledger_history
from penstock.pipeline.replay.rescore import RescoreRequest, score_run
from penstock.pipeline.runtime.registration.run_registry import find
from penstock.pipeline.runtime.weights.read import fetch
from tests.support.full_read import FullRead
from tests.support.recorded_run import JUDGE, RecordedRun

STRICT = """
def strict(completions, **columns):
    return [0.0 if any(c.isspace() for c in text) or len(text) % 2 else sum(c.isdigit() for c in text) / 4 + 0.25 for text in completions]
"""
REPAIRED = """
def digits(prompts, completions, **columns):
    return [sum(c.isdigit() for c in text) / 8 for text in completions]


def brevity(prompts, completions, **columns):
    return [1.0 - len(text) / 16 for text in completions]
"""
FRAIL = """
import time


def frail(prompts, completions, **columns):
    first = int(prompts[0].split("+")[0])
    if first % 10 == 3:
        raise ValueError(f"frail about {prompts[0]}")
    if first == 34:
        time.sleep(60)
    return [sum(c.isdigit() for c in text) / 8 for text in completions]
"""


@pytest.fixture(scope="module")
def samples(recorded: RecordedRun, log: KafkaLog) -> list[dict[str, Any]]:
    return list(FullRead(log, recorded.run).samples().to_pylist())


@pytest.fixture(scope="module")
def groups(recorded: RecordedRun, log: KafkaLog) -> dict[int, dict[str, Any]]:
    return {row["group"]: row for row in FullRead(log, recorded.run).groups().to_pylist()}


def scored(recorded: RecordedRun, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What the command prints for machines."""
    capsys.readouterr()
    assert cli.main(["replay", "score", recorded.run, *words, "--bootstrap", recorded.bootstrap, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def reward(directory: Path, name: str, text: str) -> str:
    (directory / name).write_text(text)
    return str(directory / name)


def test_a_stricter_reward_lists_exactly_the_samples_that_flip(
    recorded: RecordedRun, samples: list[dict[str, Any]], groups: dict[int, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stricter(text: str) -> float:  # as STRICT says it, written anew
        return 0.0 if " " in text or "\n" in text or len(text) % 2 == 1 else len([c for c in text if c in "0123456789"]) / 4 + 0.25

    judged = [row for row in samples if row["reward"] is not None]
    threshold = sorted(row["reward"] for row in judged)[len(judged) // 2]
    expected = {
        (row["group"], row["sample"]): (groups[row["group"]]["prompt"], row["completion"], row["reward"], stricter(row["completion"]))
        for row in judged
        if (row["reward"] >= threshold) != (stricter(row["completion"]) >= threshold)
    }
    assert len(expected) >= 5
    found = scored(recorded, capsys, "--reward", reward(tmp_path, "strict.py", STRICT) + ":strict", "--threshold", repr(threshold))
    listed = {(one["group"], one["sample"]): (one["prompt"], one["completion"], one["before"], one["after"]) for one in found["flips"]}
    assert listed == expected
    assert len(found["flips"]) == len(expected) == found["flips_up"] + found["flips_down"]
    assert found["samples"] == len(judged)
    assert found["changed"] == sum(row["reward"] != stricter(row["completion"]) for row in judged)
    assert found["mean_before"] == pytest.approx(sum(row["reward"] for row in judged) / len(judged))
    assert found["mean_after"] == pytest.approx(sum(stricter(row["completion"]) for row in judged) / len(judged))
    by_row = {one["row"]: one for one in found["prompts"]}
    for row, one in by_row.items():
        mine = [entry for entry in judged if groups[entry["group"]]["row"] == row]
        assert one["changed"] == sum(entry["reward"] != stricter(entry["completion"]) for entry in mine)
    # Every group's outcome follows from its rewards: equal ones are filtered.
    after = {}
    for number in groups:
        rewards = {stricter(row["completion"]) for row in samples if row["group"] == number and row["completion"] is not None}
        after[number] = "filtered" if len(rewards) == 1 else "scored"
    changed = {one["group"]: one["after"] for one in found["changed_outcomes"] if one["before"] != "failed"}
    recorded_outcome = {
        number: "filtered" if row["status"] == "filtered" else "scored" for number, row in groups.items() if row["status"] != "failed"
    }
    assert changed == {number: after[number] for number, was in recorded_outcome.items() if after[number] != was}


def test_the_same_reward_changes_nothing_and_its_broken_groups_are_listed(
    recorded: RecordedRun, groups: dict[int, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found = scored(recorded, capsys)
    failed = sorted(number for number, row in groups.items() if row["status"] == "failed")
    assert (found["changed"], found["flips"], found["changed_outcomes"], found["not_scored"]) == (0, [], [], [])
    assert found["mean_before"] == found["mean_after"]
    assert set(found["outcomes"]) == {"scored -> scored", "filtered -> filtered", "failed -> failed"}
    assert [one["group"] for one in found["broken"]] == failed
    assert all("cannot judge" in one["reason"] for one in found["broken"])
    assert found["scored"] == found["groups"] == len(groups)
    assert {name.rpartition(":")[2]: one["changed"] for name, one in found["components"].items()} == {"digits": 0, "brevity": 0}
    assert found["reward"]["before"] == found["reward"]["after"]
    assert found["reward"]["after"]["weights"] == [1.0, 0.5]


def test_a_repaired_reward_judges_groups_that_had_failed_and_is_written_as_a_new_run(
    recorded: RecordedRun,
    log: KafkaLog,
    groups: dict[int, Any],
    samples: list[dict[str, Any]],
    run_id: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = reward(tmp_path, "repaired.py", REPAIRED)
    found = scored(recorded, capsys, "--reward", f"{file}:digits", "--reward", f"{file}:brevity", "--write", run_id)
    fates = [row["status"] for row in groups.values()]
    assert found["broken"] == []
    assert found["newly_scored"]["samples"] == 4 * fates.count("failed")
    turned = {one["group"] for one in found["changed_outcomes"]}
    assert {number for number, row in groups.items() if row["status"] == "failed"} <= turned
    assert found["written"] == run_id
    assert {name.rpartition(":")[2]: one["samples"] > 0 for name, one in found["components"].items()} == {"digits": True, "brevity": True}
    assert found["reward"]["after"]["weights"] == [1.0, 0.5]  # as many functions as before: their weights stay
    try:
        record = find(log, run_id)
        assert record is not None
        assert json.loads(record.info)["rescored_from"]["run"] == recorded.run
        assert json.loads(record.config)["reward"]["functions"] == [f"{file}:digits", f"{file}:brevity"]
        report = collect(log, run_id)
        assert (report["status"], report["steps"], report["groups"]["admitted"]) == ("finished", 0, len(groups))
        assert report["groups"]["filtered"] == sum(count for change, count in found["outcomes"].items() if change.endswith("-> filtered"))
        assert report["groups"]["failed"] == 0
        with penstock.open(run_id, bootstrap=recorded.bootstrap) as run:
            rows = run.samples().to_pylist()
        same = ("group", "sample", "token_ids", "behaviour_logprobs", "policy_version_min", "started", "worker")
        assert [[row[name] for name in same] for row in rows] == [[row[name] for name in same] for row in samples]
        for row in rows:
            text = row["completion"]
            assert row["reward"] == pytest.approx(sum(c.isdigit() for c in text) / 8 + 0.5 * (1 - len(text) / 16))
        texts = {(row["group"], row["sample"]): row["completion"] for row in samples}
        assert all(texts[row["group"], row["sample"]] in (None, row["completion"]) for row in rows)
        past = read_ledger_history(log, run_id)
        assert past.steps == []
        original = read_ledger_history(log, recorded.run).ledger_state.manifests
        assert past.ledger_state.manifests[0].digest == original[0].digest
        assert fetch(log, past.ledger_state.manifests, 0, run=run_id) == fetch(log, original, 0, run=recorded.run)
        capsys.readouterr()
        words = ["replay", "train", run_id, "--bootstrap", recorded.bootstrap, "--to-step", "1", "--no-mlflow", "--json"]
        assert cli.main(words) == 0
        trained = json.loads(capsys.readouterr().out)
        assert trained["steps"] == 2
        first = trained["curves"][0]["what_if"]["reward_trained"]
        lowest = _scored_first(log, run_id, 4)
        taken = [row["reward"] for row in rows if row["group"] in lowest]
        assert first == pytest.approx(sum(taken) / len(taken))
        assert cli.main(["replay", "score", recorded.run, "--bootstrap", recorded.bootstrap, "--write", run_id]) == 2
        assert "exist already" in capsys.readouterr().err.splitlines()[-1]
        assert cli.main(["audit", run_id, "--bootstrap", recorded.bootstrap]) == 1
        assert capsys.readouterr().err.splitlines()[-1].endswith("it is closed and no worker has ever reported")
        unused = str(_scored_first(log, run_id, 1)[0])
        assert cli.main(["explain", run_id, unused, "--bootstrap", recorded.bootstrap]) == 0
        assert f"this run re-scores {recorded.run} and was never trained" in capsys.readouterr().out
    finally:
        log.delete_topics(log.topics(f"{run_id}."))


def _scored_first(log: KafkaLog, run: str, count: int) -> list[int]:
    """The lowest numbers of a run's scored groups."""
    return [row["group"] for row in FullRead(log, run).groups().to_pylist() if row["status"] == "unused"][:count]


def test_a_reward_that_breaks_or_hangs_is_listed_with_its_reason_and_is_never_a_zero(
    recorded: RecordedRun, groups: dict[int, Any], samples: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = reward(tmp_path, "frail.py", FRAIL)
    found = scored(recorded, capsys, "--reward", f"{file}:frail", "--set", "reward.timeout_s=1", "--processes", "2")
    raised = {number for number, row in groups.items() if int(row["prompt"].split("+")[0]) % 10 == 3}
    hung = {number for number, row in groups.items() if row["prompt"].startswith("34+")}
    assert raised
    assert {one["group"] for one in found["broken"]} == raised | hung
    assert all(("frail about" if one["group"] in raised else "longer than 1 s") in one["reason"] for one in found["broken"])
    assert found["reward"]["after"]["weights"] == [1.0]
    kept = [row for row in samples if row["reward"] is not None and row["group"] not in raised | hung]
    assert found["samples"] == len(kept)
    assert found["mean_after"] == pytest.approx(sum(sum(c.isdigit() for c in row["completion"]) / 8 for row in kept) / len(kept))


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--reward", "exact_mach"], 2, "did you mean 'exact_match'?"),
        (["--reward", "nowhere.py:f"], 2, "nowhere.py does not exist"),
        (["--write", ""], 2, "--write needs the id of the new run"),
        (["--weights", "1,x"], 2, "expected numbers separated by commas"),
        (["--weights", "1"], 2, "1 weights for 2 reward.functions"),
        (["--set", "trainer.lr=1"], 2, "does not affect a reward"),
        (["--write", "No_Run"], 2, "--write run id 'No_Run'"),
    ],
)
def test_a_wish_that_makes_no_sense_is_one_line_and_leaves_nothing_behind(
    recorded: RecordedRun, words: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", "score", recorded.run, "--bootstrap", recorded.bootstrap, *words]) == status
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_reward_that_does_not_load_leaves_no_half_of_a_new_run(
    recorded: RecordedRun, log: KafkaLog, run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = reward(tmp_path, "torn.py", "import nothing_like_it\n\n\ndef f(completions, **columns):\n    return []\n")
    assert cli.main(["replay", "score", recorded.run, "--bootstrap", recorded.bootstrap, "--reward", f"{file}:f", "--write", run_id]) == 1
    assert "nothing_like_it" in capsys.readouterr().err.splitlines()[-1]
    assert log.topics(f"{run_id}.") == []
    assert find(log, run_id) is None


def test_an_interruption_leaves_no_half_of_a_new_run(recorded: RecordedRun, log: KafkaLog, run_id: str) -> None:
    def interrupt(text: str) -> None:
        if text.startswith("copying"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_run(log, recorded.run, RescoreRequest(write=run_id), notify=interrupt)
    assert log.topics(f"{run_id}.") == []
    assert find(log, run_id) is None


def test_groups_without_text_are_left_out_where_the_tokenizer_is_not_here(
    recorded: RecordedRun, groups: dict[int, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = scored(recorded, capsys, "--model", str(tmp_path / "nowhere"))
    failed = sorted(number for number, row in groups.items() if row["status"] == "failed")
    assert [one["group"] for one in found["not_scored"]] == failed
    assert all("give --model DIR" in one["why"] for one in found["not_scored"])
    assert found["scored"] == len(groups) - len(failed)


def test_the_page_says_what_changed(recorded: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = reward(tmp_path, "repaired.py", REPAIRED)
    capsys.readouterr()
    words = ["--reward", f"{file}:digits", "--weights", "2", "--bootstrap", recorded.bootstrap]
    assert cli.main(["replay", "score", recorded.run, *words]) == 0
    shown = capsys.readouterr().out
    assert f"after   {file}:digits x 2" in shown
    assert "samples had no reward before" in shown
    assert shown.splitlines()[-1].startswith("flips ")  # what it comes to stands last, where a terminal stands still
    assert shown.index("changed outcomes") < shown.index("groups scored again")
    assert "edited after" not in shown
    assert JUDGE not in shown
