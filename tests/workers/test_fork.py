"""A fork goes on where its parent stood: weights, optimizer, data; unchanged it ends where its parent ended."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.infra.paths import run_directory
from penstock.pipeline.cli import main
from penstock.pipeline.config.load import from_json
from penstock.pipeline.learner.ledger_history import read_ledger_history
from penstock.pipeline.runtime.registration.run_registry import find
from tests.support.log_here import HERE, LogHere, use_log
from tests.support.worker_set import complete, config_of, finish

STEPS, AT = 4, 2


ROLES = ("trainer", "rollout", "scorer", "feeder", "tracker")


@pytest.fixture(scope="module")
def log() -> LogHere:
    return LogHere()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, log: MemoryLog) -> None:
    use_log(monkeypatch, log)


@pytest.fixture(scope="module")
def parent(log: MemoryLog, tiny_model: Path, empty_database: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A strictly on-policy run whose rate falls and whose loss looks back at version 0."""
    directory = tmp_path_factory.mktemp("parent")
    shutil.copy(empty_database, directory / "mlflow.db")
    config = config_of(
        tiny_model,
        directory,
        run={"steps": STEPS, "seed": 7},
        algorithm={"kl_coef": 0.05},
        rollout={"workers": 1},
        trainer={"checkpoint_every": 3, "lr_schedule": "linear"},
        mlflow={"enabled": True, "tracking_uri": f"sqlite:///{directory / 'mlflow.db'}"},
    )
    return {**complete(log, "parent", config, roles=ROLES), "mlflow": f"sqlite:///{directory / 'mlflow.db'}"}


def forked(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["fork", "parent", "--bootstrap", HERE, "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_fork_without_changes_ends_in_its_parents_weights(
    log: MemoryLog, parent: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow import MlflowClient

    messages = forked(capsys, "--from-step", str(AT), "--run-id", "kid")
    steps = read_ledger_history(log, "parent").steps
    assert (messages["run"], messages["status"]) == ("kid", "created")
    assert {"run": "parent", "step": AT, "version": AT, "digest": steps[AT - 1].digest}.items() <= messages["forked_from"].items()
    assert messages["forked_from"]["ledger"] == read_ledger_history(log, "parent").ledger_state.end
    assert finish(log, "kid", roles=ROLES)["weights"]["digest"] == parent["weights"]["digest"]
    own = read_ledger_history(log, "kid")
    assert own.ledger_state.manifests[0].digest == steps[AT - 1].digest
    ours, theirs = ([(entry.digest, entry.loss_bits, entry.metrics["lr"]) for entry in of] for of in (own.steps, steps[AT:]))
    assert ours == theirs
    client = MlflowClient(tracking_uri=parent["mlflow"])
    experiment = client.get_experiment_by_name("penstock")
    (found,) = client.search_runs([experiment.experiment_id], filter_string="tags.`penstock.run` = 'kid'")
    assert found.data.tags["penstock.forked_from"] == "parent"
    assert client.get_run(found.data.tags["mlflow.parentRunId"]).data.tags["penstock.run"] == "parent"
    capsys.readouterr()
    assert main(["replay", "train", "kid", "--bootstrap", HERE, "--json"]) == 0
    replayed = json.loads(capsys.readouterr().out)
    assert (replayed["steps"], replayed["matching_steps"]) == (STEPS - AT, STEPS - AT)


@pytest.mark.usefixtures("parent")
def test_a_fork_may_change_what_follows_and_says_where_it_begins(log: MemoryLog, capsys: pytest.CaptureFixture[str]) -> None:
    messages = forked(capsys, "--from-step", "3", "--run-id", "other", "--set", "run.steps=9", "--set", "trainer.lr=1e-4")
    record = find(log, "other")
    assert record is not None
    config = from_json(record.config)
    before = from_json((find(log, "parent") or record).config)
    planned = [one.group for entry in read_ledger_history(log, "parent").steps[:3] for one in entry.plan]
    assert (config.run.steps, config.trainer.lr, config.trainer.initial_steps) == (9, 1e-4, 3)
    assert config.data.first_group == max(planned) + 1
    assert config.algorithm.reference == before.model.path
    assert json.loads(record.info)["forked_from"] == messages["forked_from"]
    directory = run_directory("other") / "start"
    assert (config.model.path, config.trainer.initial_state) == (str(directory / "model"), str(directory / "backend"))
    assert (directory / "model" / "config.json").is_file()
    assert list((directory / "backend").iterdir())


@pytest.mark.usefixtures("parent")
def test_a_fork_that_is_not_told_where_begins_after_the_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert forked(capsys, "--run-id", "longer", "--set", "run.steps=2")["forked_from"]["step"] == STEPS


@pytest.mark.usefixtures("parent")
@pytest.mark.parametrize(
    ("words", "status", "why"),
    [
        (["--from-step", "2", "--run-id", "No Run"], 2, "--run-id: run id 'No Run'"),
        (["--from-step", "5"], 2, "has only 4 committed steps"),
        (["--from-step", "4"], 2, "plans no steps after step 4; fork earlier with --from-step S, or"),
        ([], 2, "plans no steps after step 4"),
        (["--from-step", "2", "--set", "trainer.dtype=bfloat16"], 2, "which depends on trainer.dtype"),
        (["--from-step", "2", "--set", "model.path=/m"], 2, "model.path of a fork follows from --from-step"),
        (["--from-step", "2", "--run-id", "parent"], 2, "exists already"),
    ],
)
def test_what_a_fork_cannot_do_is_refused_before_anything_is_trained(
    capsys: pytest.CaptureFixture[str], words: list[str], status: int, why: str
) -> None:
    assert main(["fork", "parent", "--bootstrap", HERE, *words]) == status
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param({"backend": "deepspeed", "zero_stage": 2}, id="DeepSpeed", marks=pytest.mark.slow),
        pytest.param({"lora_rank": 4}, id="LoRA", marks=pytest.mark.slow),
    ],
)
def test_a_fork_goes_on_with_its_parents_optimizer(
    run_id: str, log: MemoryLog, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], trainer: dict[str, Any]
) -> None:
    trainer = {"lr_schedule": "linear", **trainer}
    config = config_of(tiny_model, tmp_path, run={"steps": STEPS, "seed": 7}, rollout={"workers": 1}, trainer=trainer)
    complete(log, run_id, config)
    kid = f"{run_id}-kid"
    assert main(["fork", run_id, "--bootstrap", HERE, "--from-step", str(AT), "--run-id", kid]) == 0
    finish(log, kid)
    ours, theirs = ([entry.digest for entry in read_ledger_history(log, run).steps] for run in (kid, run_id))
    assert ours == theirs[AT:]
    capsys.readouterr()
    assert main(["replay", "train", kid, "--bootstrap", HERE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["matching_steps"] == STEPS - AT
