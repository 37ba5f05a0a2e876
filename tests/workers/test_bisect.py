"""`penstock bisect`: the step, the groups and the cause, on runs whose spoiler the test has put there itself."""

import json
import shlex
import shutil
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.infra.paths import run_directory
from penstock.pipeline.cli import main
from penstock.pipeline.config.load import from_json
from penstock.pipeline.inspect.report.summary import collect
from penstock.pipeline.learner.ledger_history import read_ledger_history
from penstock.pipeline.replay.bisect.find import unusual_steps
from penstock.pipeline.replay.bisect.measure import Measurer
from penstock.pipeline.replay.recording import Recording
from penstock.pipeline.runtime.registration.run_registry import find
from penstock.pipeline.runtime.topic_reader import RunReader
from penstock.topics.groups import Group
from tests.support.log_here import HERE, LogHere, use_log
from tests.support.trainer_alone import config_for, group_of, trained, written
from tests.support.worker_set import finish

STEPS, PER_STEP, POISONED = 8, 4, 21
"""Group 21 is the second of step 5."""


@pytest.fixture(scope="module")
def log() -> LogHere:
    return LogHere()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, log: MemoryLog) -> None:
    use_log(monkeypatch, log)


def paid(group: Group, reward: float) -> Group:
    first, *others = group.samples
    return replace(group, samples=(replace(first, completion="", reward=reward, components=(reward,)), *others))


@pytest.fixture(scope="module")
def poisoned(log: LogHere, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run in which one reward of step 5 is a thousand times as large as the others."""
    directory = tmp_path_factory.mktemp("poisoned")
    config = config_for(
        tiny_model, directory, run={"steps": STEPS}, algorithm={"loss": "dr_grpo"}, weights={"keep": "chain"},
        schedule={"prompts_per_step": PER_STEP}, trainer={"checkpoint_every": 3, "lr": 1e-2},
        eval={"source": str(directory / "data.jsonl"), "limit": 8, "every": 100, "samples": 4, "threshold": 0.2},
    )  # fmt: skip
    groups = [group_of(number, version=max(0, number // PER_STEP - 1)) for number in range(STEPS * PER_STEP)]
    written(log, "poisoned", config, [paid(group, 1000.0) if group.group == POISONED else group for group in groups])
    assert trained(log, "poisoned")["status"] == "finished"
    finish(log, "poisoned", roles=["evaluator"])
    return "poisoned"


def bisected(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["bisect", *words, "--bootstrap", HERE, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_one_poisoned_reward_is_named_with_step_group_and_cause_and_the_fork_without_it_runs(
    log: LogHere, poisoned: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = bisected(capsys, poisoned, "--bad", "6", "--good", "1", "--test", "grad_norm < 20")
    assert (result["step"], result["single"], result["monotone"]) == (5, True, True)
    assert (result["groups"], result["minimal"]) == ([POISONED], True)
    causes = {cause["kind"]: cause["text"] for cause in result["causes"]}
    assert "gradient weight" in causes["weight"]
    assert "a reward of 1000 for ''" in causes["reward"]
    assert "norm of the gradient" in causes["setting"]
    assert "1000 -> 0 for ''" in causes["flip"], "the run's function pays for digits"
    assert (result["work"]["replays"], result["work"]["measured"]) == (1, 1), "the first guess was right"
    assert result["next"] == f"penstock fork {poisoned} --from-step 5 --without {POISONED}"
    assert main([*shlex.split(result["next"])[1:], "--run-id", "healed", "--bootstrap", HERE, "--set", "run.steps=16"]) == 0
    (spoiled,) = {read.payload.row for read in RunReader(log, poisoned).prompts(only={POISONED}) if read.payload}
    assert finish(log, "healed")["status"] == "finished"
    record = find(log, "healed")
    assert record is not None and from_json(record.config).data.skip_rows == [spoiled]
    rows = {read.payload.row for read in RunReader(log, "healed").prompts() if read.payload}
    assert rows == set(range(40)) - {spoiled}, "the rest of an epoch, and all of the next but the row"


def test_a_recorded_step_is_trained_without_groups(poisoned: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["replay", "train", poisoned, "--bootstrap", HERE, "--json", "--no-mlflow", "--from-step", "5", "--to-step", "5"]
    assert main([*command, "--without", f"{POISONED}, 23"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["changed"] == {"without": {"recorded": [], "here": [POISONED, 23]}}
    ((row),) = result["curves"]
    assert row["what_if"]["grad_norm"] < 20 < row["recorded"]["grad_norm"]
    refusals = {"3": "none of the replayed steps was trained on group 3", "20,21,22,23": "no group of step", "x": "expected group numbers"}
    for without, why in refusals.items():
        assert main([*command, "--without", without]) == 2
        assert why in capsys.readouterr().err


def test_settings_of_another_configuration_are_searched_by_their_keys(
    log: LogHere, poisoned: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.toml"
    other.write_text(
        f'[run]\nsteps = 9\n[model]\npath = "{(record := find(log, poisoned)) and from_json(record.config).model.path}"\n'
        '[data]\nsource = "tiny:successor"\n[algorithm]\nloss = "dapo"\n[trainer]\nlr = 1e-5\nmax_grad_norm = 0.5\n'
    )
    result = bisected(capsys, poisoned, "--good", "2", "--bad", "4", "--test", "lr < 1e-4", "--against", str(other))
    assert (result["settings"], result["minimal"]) == (["trainer.lr=1e-05"], True)
    assert {"algorithm.loss", "trainer.lr", "trainer.max_grad_norm"} <= set(result["tried"])
    assert "run.steps" in result["against"] and "run.steps" not in result["tried"]
    assert result["next"] == f"penstock fork {poisoned} --from-step 2 --set trainer.lr=1e-05"
    assert main(["bisect", poisoned, "--bootstrap", HERE, "--bad", "4", "--test", "lr > 1", "--against", str(other)]) == 0
    assert "the test also fails with all of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "why"),
    [
        (["--test", "greedy_accuracy > 2"], 2, "--good 0: the test already fails after 0 steps"),
        (["--test", "grad_norm < 20", "--good", "6", "--bad", "6"], 2, "--good 6 --bad 6: "),
        (["--test", "grad_norm < 20", "--good", "1", "--bad", "4"], 2, "--bad 4: the test passes after 4 steps"),
        (["--test", "grad_norm < 20"], 1, "train/grad_norm was not measured for one of the states"),
        (["--test", "sh -c 'exit 126'"], 1, "exited with status 126, expected 0 (good)"),
    ],
)
def test_what_cannot_be_searched_is_refused_in_one_line(
    poisoned: str, capsys: pytest.CaptureFixture[str], words: list[str], status: int, why: str
) -> None:
    assert main(["bisect", poisoned, "--bootstrap", HERE, *words]) == status
    assert why in capsys.readouterr().err.splitlines()[-1]


def test_the_steps_before_a_metric_of_the_weights_are_responsible_for_it(
    log: LogHere, poisoned: str, capsys: pytest.CaptureFixture[str]
) -> None:
    entropy = [entry.metrics["entropy"] for entry in read_ledger_history(log, poisoned).steps]
    sign, middle = "<" if entropy[5] < entropy[6] else ">", (entropy[5] + entropy[6]) / 2
    result = bisected(capsys, poisoned, "--good", "6", "--bad", "7", "--test", f"entropy {sign} {middle}", "--replays", "4")
    assert (result["step"], result["responsible"]) == (6, 5)
    assert result["work"]["replayed"] == 2 * result["work"]["replays"] > 0, "step 5 is changed, and step 6 measures it"
    assert result["next"].startswith(f"penstock fork {poisoned} --from-step 5")
    with closing(Recording.open(log, poisoned)) as recording:
        assert unusual_steps(recording, range(STEPS))[0] == 5


JUDGE = """
import os, sys
from pathlib import Path

model, steps = Path(os.environ["PENSTOCK_MODEL"]), int(os.environ["PENSTOCK_STEPS"])
assert (model / "config.json").is_file() and (model / "tokenizer.json").is_file() and list(model.glob("*.safetensors"))
print("noise on the standard output")
sys.exit(steps > 3)
"""


def test_a_program_decides_by_its_exit_status_and_finds_no_group_where_none_is_responsible(
    poisoned: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    result = bisected(capsys, poisoned, "--test", f"{sys.executable} {tmp_path / 'judge.py'}", "--replays", "12")
    assert (result["step"], result["groups"], result["lower_rate"], result["share"]) == (3, [], None, None)
    assert result["next"] == f"penstock fork {poisoned} --from-step 3"
    assert result["work"]["recomputed"] <= 8, "each state was restored from the nearest checkpoint or saved state"


def test_an_interrupted_bisect_continues_where_it_was_and_gives_the_same_result(
    log: LogHere, poisoned: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = {row["version"]: row["sampled_reward"] for row in collect(log, poisoned)["eval"]}
    assert recorded.keys() == {0, STEPS}
    sign, middle = "<" if recorded[STEPS] > recorded[0] else ">", sum(recorded.values()) / 2
    words = [poisoned, "--test", f"sampled_reward {sign} {middle}", "--replays", "3"]
    shutil.rmtree(run_directory(poisoned) / "bisect", ignore_errors=True)  # results of other tests
    undisturbed = bisected(capsys, *words)
    work = undisturbed["work"]
    assert (work["recorded"], work["stored"], work["replays"]) == (1, 0, 3), "the other was evaluated to compare"
    values = {point["steps"]: point["values"]["eval/sampled_reward"] for point in undisturbed["measured"]}
    assert {steps: values[steps] for steps in recorded} == recorded
    folder = run_directory(poisoned) / "bisect"
    (folder / "results.json").unlink()
    measured, limit = Measurer._measured, work["measured"] - 1

    def killed(self: Measurer, experiment: Any) -> Any:
        if self.work["measured"] == limit:
            raise KeyboardInterrupt
        return measured(self, experiment)

    with monkeypatch.context() as patch:
        patch.setattr(Measurer, "_measured", killed)
        assert main(["bisect", *words, "--bootstrap", HERE]) == 130
    capsys.readouterr()
    resumed = bisected(capsys, *words)
    assert {**resumed, "work": work} == undisturbed
    assert (resumed["work"]["stored"], resumed["work"]["measured"]) == (limit, 1)
    assert not list(folder.glob("state-*"))
    bisected(capsys, poisoned, "--good", "1", "--bad", "6", "--test", "grad_norm < 20")  # another test keeps these results
    assert main(["bisect", *words, "--bootstrap", HERE]) == 0
    *_, figures, following = capsys.readouterr().out.splitlines()
    assert figures.startswith("0 states measured") and following == f"next: {undisturbed['next']}"
