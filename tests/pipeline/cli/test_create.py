"""`penstock create` where a run exists already, where its topics were made by somebody else, and as a container's first process."""

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from penstock.infra.engines.vllm import start
from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline import cli
from penstock.pipeline.cli.app import INTERRUPTED, OK, USAGE
from penstock.pipeline.config.load import load
from penstock.pipeline.launch.create import specs_of
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC
from tests.support.containers import contained, containers_work
from tests.support.light_model import light_model


def config_file(broker: str, folder: Path) -> Path:
    rows, file = folder / "rows.jsonl", folder / "run.toml"
    rows.write_text("".join(json.dumps({"prompt": f"{number}+1=", "answer": str(number + 1)}) + "\n" for number in range(8)))
    file.write_text(
        f'[run]\nsteps = 2\n[model]\npath = "{light_model(folder / "model", context=2048)}"\n[data]\nsource = "rows.jsonl"\n'
        f'[reward]\nfunctions = ["exact_match"]\n[rollout]\nengine = "toy"\n[kafka]\nbootstrap = "{broker}"\n'
    )
    return file


def test_each_topic_that_others_made_wrong_is_one_line_and_none_is_created(
    broker: str, log: KafkaLog, run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["create", str(config_file(broker, tmp_path)), "--run-id", run_id, "--topics", "existing"]
    log.create_topics({RUNS_TOPIC: RUNS_SPEC})
    assert cli.main(command) == USAGE
    *lines, last = capsys.readouterr().err.splitlines()
    specs = specs_of(load(tmp_path / "run.toml"), run_id)
    assert last == f"penstock: --topics existing: {len(specs)} topics of {run_id} are missing or differ; see the lines above"
    settings = "cleanup.policy=delete retention.ms=-1 retention.bytes=-1 max.message.bytes=16842752 compression.type=uncompressed"
    assert lines[1] == f"topic {run_id}.prompts is missing: create it with 8 partitions, 1 replicas, {settings}"
    assert log.topics(f"{run_id}.") == []

    wrong = {
        f"{run_id}.groups": {"partitions": 2, "retention.ms": "60000", "max.message.bytes": "1048588"},
        f"{run_id}.ledger": {"cleanup.policy": "compact"},
        f"{run_id}.weights": {"segment.bytes": str(1 << 30), "max.message.bytes": str(18 << 20)},
    }
    for name, spec in specs.items():
        settings_of = dict(wrong.get(name, {}))
        partitions = int(settings_of.pop("partitions", spec.partitions))
        log.create_topics({name: replace(spec, partitions=partitions, configs={**spec.configs, **settings_of})})
    assert cli.main(command) == USAGE
    assert capsys.readouterr().err.splitlines() == [
        f"topic {run_id}.groups has 2 partitions, expected 8; retention.ms=60000, expected -1; "
        "max.message.bytes=1048588, expected at least 16842752",
        f"topic {run_id}.ledger has cleanup.policy=compact, expected delete",
        f"penstock: --topics existing: 2 topics of {run_id} are missing or differ; see the lines above",
    ]
    log.delete_topics([f"{run_id}.groups", f"{run_id}.ledger"])
    log.create_topics({name: specs[name] for name in (f"{run_id}.groups", f"{run_id}.ledger")})
    assert cli.main(command) == OK


def test_a_run_is_created_once_and_a_configuration_that_differs_is_refused_with_its_keys(
    broker: str, run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_file(broker, tmp_path)
    rows = tmp_path / "rows.jsonl"

    def create(*options: str) -> tuple[int, str]:
        status = cli.main(["create", str(file), *options])
        return status, capsys.readouterr().err

    own = ("--run-id", run_id)
    assert create("--if-absent") == (USAGE, "penstock: --if-absent needs --run-id RUN: a generated id is always new\n")
    assert create(*own, "--if-absent", "--wait-broker", "60")[0] == OK
    assert create(*own)[0] == USAGE
    status, text = create(*own, "--if-absent", "--set", "trainer.checkpoint_every=7")
    assert (status, "keeps its trainer.checkpoint_every = " in text) == (OK, True), text
    status, text = create(*own, "--if-absent", "--set", "trainer.lr=0.5", "--set", "run.seed=9")
    refusal = f"penstock: run '{run_id}' already exists with other values: run.seed = 0 (here 9), trainer.lr = "
    assert status == USAGE and refusal in text, text
    rows.write_text(rows.read_text().replace("3+1=", "4+1="))
    status, text = create(*own, "--if-absent")
    assert (status, f"with other values: data.source {rows}; use another --run-id" in text) == (USAGE, True), text


def test_the_machine_that_creates_a_run_needs_neither_its_engine_nor_its_gpus(
    broker: str, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(start, "find_spec", lambda _: None)
    sizes = {"rollout.engine": "vllm", "rollout.gpus_per_worker": 1, "rollout.workers": 16, "trainer.gpus": 1, "trainer.device": "cuda"}
    settings = [word for key, value in sizes.items() for word in ("--set", f"{key}={value}")]
    command = [str(config_file(broker, tmp_path)), *settings]
    assert cli.main(["run", *command, "--dry-run"]) == USAGE
    assert cli.main(["create", *command, "--run-id", run_id]) == OK, capsys.readouterr().err


@pytest.mark.skipif(not containers_work(), reason="no PID namespaces here")
def test_a_command_that_is_a_container_s_first_process_ends_at_sigterm(tmp_path: Path) -> None:
    program = "import sys; from penstock.pipeline.cli import console; sys.exit(console())"
    words = ["create", str(config_file("127.0.0.1:9", tmp_path)), "--wait-broker", "300"]
    with contained([sys.executable, "-c", program, *words]) as process:
        assert process.stdout is not None
        assert "waiting for a broker" in process.stdout.readline()
        (first,) = psutil.Process(process.pid).children()
        first.send_signal(signal.SIGTERM)
        assert process.wait(60) == INTERRUPTED
