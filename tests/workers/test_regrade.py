"""Regrading: the report, and a run that trains the regraded groups, continues live, and is its parent if the reward is the same."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.errors import ConfigError, PenstockError
from penstock.infra.memory.log import MemoryLog
from penstock.infra.paths import run_directory
from penstock.pipeline.cli import main
from penstock.pipeline.inspect.recorded_run import read_run
from penstock.pipeline.learner.ledger_history import LedgerHistory, read_ledger_history
from penstock.pipeline.replay.recording import Recording
from penstock.pipeline.replay.regrade import Candidate, Past, in_order, plan_steps, score_from
from penstock.pipeline.replay.regraded_run import write_regraded
from penstock.pipeline.replay.rescore import RescoreRequest
from penstock.pipeline.replay.rescored_groups import NewRun
from penstock.pipeline.scheduling.rules import preset
from tests.support.log_here import LogHere, use_log
from tests.support.worker_set import PIPELINE, clean, complete, config_of, finish

STEPS = 6
REWARDS = """
def letters(completions, **columns):
    return [sum(c.isalpha() for c in text) / 8 for text in completions]


def digits(completions, **columns):
    return [sum(c.isdigit() for c in text) / 8 for text in completions]


def strict(completions, **columns):
    return [float(sum(c.isdigit() for c in text) > 1) for text in completions]


def broken(completions, **columns):
    raise ValueError("cannot score")
"""
PIPELINED = {"mode": "pipelined", "steps_per_version": 2}


@pytest.fixture(scope="module")
def log() -> LogHere:
    return LogHere()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, log: MemoryLog) -> None:
    use_log(monkeypatch, log)


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(REWARDS)
    return str(path)


def parent_of(log: MemoryLog, run: str, model: Path, directory: Path, reward: str, schedule: dict[str, Any]) -> LedgerHistory:
    config = config_of(
        model, directory, run={"steps": STEPS, "seed": 7}, reward={"functions": [reward]}, schedule=schedule, rollout={"workers": 1},
        trainer={"checkpoint_every": 3, "lr_schedule": "linear"},
    )  # fmt: skip
    complete(log, run, config)
    return read_ledger_history(log, run)


@pytest.fixture(scope="module")
def parent(log: LogHere, tiny_model: Path, rewards: str, tmp_path_factory: pytest.TempPathFactory) -> LedgerHistory:
    """An on-policy run, two steps a version, that was rewarded for what the reward should not pay."""
    return parent_of(log, "parent", tiny_model, tmp_path_factory.mktemp("parent"), f"{rewards}:letters", PIPELINED)


def regraded(log: MemoryLog, run: str, kid: str, *functions: str, first: int = 0, floor: float | None = None) -> LedgerHistory:
    recording = Recording.open(log, run)
    scored = score_from(recording, RescoreRequest(functions=functions), first=first, floor=floor, notify=print)
    write_regraded(recording, scored, run_id=kid, notify=print)
    recording.close()
    return read_ledger_history(log, kid)


def continued(log: MemoryLog, run: str, *, roles: Sequence[str] = PIPELINE) -> dict[str, Any]:
    """The report of a run whose workers have continued it to its end; its audit is clean."""
    report = finish(log, run, roles=roles)
    clean(log, run)
    return report


def numbers(history: LedgerHistory) -> list[tuple[Any, ...]]:
    """What identifies each step: its groups, the bits of loss and gradient, and the weights."""
    return [([planned.group for planned in entry.plan], entry.loss_bits, entry.grad_norm_bits, entry.digest) for entry in history.steps]


@pytest.mark.parametrize(
    ("first", "schedule"),
    [
        pytest.param(0, None, marks=pytest.mark.slow),
        (3, None),
        pytest.param(0, {"mode": "one_step_off"}, marks=pytest.mark.slow),
        pytest.param(4, {"mode": "one_step_off", "order": "arrival"}, marks=pytest.mark.slow),
    ],
)
def test_the_same_reward_makes_the_parent_bit_for_bit(
    run_id: str,
    log: LogHere,
    tiny_model: Path,
    rewards: str,
    tmp_path: Path,
    parent: LedgerHistory,
    first: int,
    schedule: dict[str, Any] | None,
) -> None:
    run, before = "parent", parent
    if schedule is not None:
        run, reward = run_id, f"{rewards}:digits"
        before = parent_of(log, run, tiny_model, tmp_path, reward, schedule)
    kid = f"{run_id}-kid"
    after = regraded(log, run, kid, first=first)
    assert numbers(after) == numbers(before)
    stale = [entry.groups for entry in before.entries if entry.kind == "stale" and (entry.step or 0) < STEPS]
    assert [entry.groups for entry in after.entries if entry.kind == "stale"] == stale
    report = continued(log, kid)
    assert (report["status"], report["weights"]["digest"]) == ("finished", before.steps[-1].digest)
    assert numbers(regraded(log, kid, f"{kid}s-kid", first=STEPS - 1)) == numbers(before)
    clean(log, f"{kid}s-kid")


@pytest.mark.usefixtures("parent")
def test_a_repaired_reward_makes_the_run_that_had_it_from_that_step_and_continues_live(
    run_id: str, log: LogHere, rewards: str, capsys: pytest.CaptureFixture[str]
) -> None:
    repaired = f"{rewards}:digits"
    reference = ["fork", "parent", "--from-step", "2", "--run-id", f"{run_id}-ref", "--set", f'reward.functions=["{repaired}"]']
    assert main([*reference, "--bootstrap", "here:1"]) == 0
    continued(log, f"{run_id}-ref")
    kid = f"{run_id}-kid"
    sizes = [entry.metrics["ess"] for entry in regraded(log, "parent", f"{run_id}-all", repaired, first=2, floor=0.01).steps]
    assert min(sizes[2:4]) > sizes[4]
    after = regraded(log, "parent", kid, repaired, first=2, floor=(min(sizes[2:4]) + sizes[4]) / 2)
    # Both steps of version 1 have samples of its weights; those of the next version are the parent's and not near enough.
    assert [entry.step for entry in after.steps] == [0, 1, 2, 3]
    expected = [entry.digest for entry in read_ledger_history(log, f"{run_id}-ref").steps]
    assert [entry.digest for entry in after.steps[2:]] == expected[:2]
    report = continued(log, kid)
    assert (report["steps"], report["status"]) == (STEPS, "finished")
    live = read_ledger_history(log, kid)
    assert [entry.digest for entry in live.steps[:4]] == [entry.digest for entry in after.steps]
    own = {planned.group for entry in live.steps[4:] for planned in entry.plan}
    assert min(own) > max(planned.group for entry in after.steps for planned in entry.plan)
    capsys.readouterr()
    assert main(["explain", kid, str(after.steps[3].plan[0].group), "--bootstrap", "here:1"]) == 0
    assert "regrade:parent" in capsys.readouterr().out
    assert main(["replay", "rollout", kid, "--step", "3", "--bootstrap", "here:1"]) == 2
    assert "penstock replay rollout parent --group" in capsys.readouterr().err
    assert main(["replay", "train", kid, "--bootstrap", "here:1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["matching_steps"] == STEPS


def test_the_report_counts_groups_by_status_and_estimates_the_sample_size(
    rewards: str, parent: LedgerHistory, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["regrade", "parent", "--reward", f"{rewards}:strict", "--from-step", "2", "--bootstrap", "here:1"]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    trained = {planned.group for entry in parent.steps[2:] for planned in entry.plan}
    assert sum(count for change, count in report["statuses"].items() if change.startswith("trained")) == len(trained)
    assert report["statuses"]["trained -> filtered"] > 0
    assert report["steps"]["recorded"] == STEPS - 2 > report["steps"]["regraded"]
    assert [point["step"] for point in report["ess"]["points"]] == [2, 3, 4, 5]
    assert report["ess"]["agreement"] < 1
    assert main(words) == 0
    assert "4 recorded" in capsys.readouterr().out


@pytest.mark.usefixtures("parent")
def test_a_reward_that_fails_makes_no_run_and_an_interruption_leaves_none(
    run_id: str, log: LogHere, rewards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PenstockError, match=r"nothing to train\. Last failed reward: .*cannot score"):
        regraded(log, "parent", f"{run_id}-a", f"{rewards}:broken")
    with pytest.raises(PenstockError, match=r"effective sample size of step 4 is below 1, .*--floor.* penstock fork parent --from-step 4"):
        regraded(log, "parent", f"{run_id}-b", f"{rewards}:digits", first=4, floor=1.0)
    with monkeypatch.context() as patched:
        patched.setattr("penstock.pipeline.replay.regraded_run.open_store", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            regraded(log, "parent", f"{run_id}-c")
    for end in "abc":
        assert log.topics(f"{run_id}-{end}.") == []
        assert not run_directory(f"{run_id}-{end}").exists()
    # A process that is killed leaves topics and files, and no run.
    source = read_run(log, "parent")
    NewRun.create(log, source, f"{run_id}-c", source.config).copy(notify=print)
    (run_directory(f"{run_id}-c") / "checkpoints").mkdir(parents=True)
    assert numbers(regraded(log, "parent", f"{run_id}-c")) == numbers(read_ledger_history(log, "parent"))
    with pytest.raises(ConfigError, match="this run or topics of this name exist already"):
        regraded(log, "parent", f"{run_id}-c")


def test_groups_are_taken_in_the_order_of_the_run_and_stale_ones_where_they_became_stale() -> None:
    schedule = preset("in_flight", prompts_per_step=2, samples_per_prompt=2, steps_per_version=1, max_lag=0)
    arrived = {3: 10, 0: 11, 5: 12, 1: 13, 4: 14, 2: 15}
    past = Past(
        first=0, settled=frozenset(), planned=[3, 0, 4, 2], stale={1: 1}, outcomes={},
        keys={group: (time, 0, 0) for group, time in arrived.items()},
    )  # fmt: skip
    before = [Candidate(group, 0, "filtered" if group == 5 else "scored", 0 if group == 1 else 1) for group in range(6)]
    assert [candidate.number for candidate in in_order(before, past, schedule)] == [3, 0, 5, 1, 4, 2]
    first, second = plan_steps(in_order(before, past, schedule), schedule, first=0, steps=9)
    assert [[member.number for member in step.members] for step in (first, second)] == [[3, 0], [4, 2]]
    assert (first.ended, second.stale, second.ended) == (2, (1,), 6)
