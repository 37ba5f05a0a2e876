"""`penstock create --if-absent`: what a job that is started again may call again."""

import json
from pathlib import Path

import pytest

from penstock.pipeline import cli
from penstock.pipeline.cli.app import OK, USAGE
from tests.support.light_model import light_model


def test_a_run_is_created_once_and_a_configuration_that_differs_is_refused_with_its_keys(
    broker: str, run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, file = tmp_path / "rows.jsonl", tmp_path / "run.toml"
    rows.write_text("".join(json.dumps({"prompt": f"{number}+1=", "answer": str(number + 1)}) + "\n" for number in range(8)))
    file.write_text(
        f'[run]\nsteps = 2\n[model]\npath = "{light_model(tmp_path / "model", context=2048)}"\n[data]\nsource = "rows.jsonl"\n'
        f'[reward]\nfunctions = ["exact_match"]\n[rollout]\nengine = "toy"\n[kafka]\nbootstrap = "{broker}"\n'
    )

    def create(*options: str) -> tuple[int, str]:
        status = cli.main(["create", str(file), *options])
        return status, capsys.readouterr().err

    own = ("--run-id", run_id)
    assert create("--if-absent") == (USAGE, "penstock: --if-absent needs --run-id RUN: an id that is made up is always new\n")
    assert create(*own, "--if-absent", "--wait-broker", "60")[0] == OK
    assert create(*own)[0] == USAGE
    status, text = create(*own, "--if-absent", "--set", "trainer.checkpoint_every=7")
    assert (status, "keeps trainer.checkpoint_every = " in text) == (OK, True), text
    status, text = create(*own, "--if-absent", "--set", "trainer.lr=0.5", "--set", "run.seed=9")
    assert (status, f"penstock: run '{run_id}' exists and differs: run.seed = 0 (here 9), trainer.lr = " in text) == (USAGE, True), text
    rows.write_text(rows.read_text().replace("3+1=", "4+1="))
    status, text = create(*own, "--if-absent")
    assert (status, f"differs: data.source {rows}; choose another --run-id" in text) == (USAGE, True), text
