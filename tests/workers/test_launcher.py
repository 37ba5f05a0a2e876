"""`penstock run` on real processes: it sees a run through, stops it so that it can go on, and says loudly when a worker dies."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from crew import Crew, complete, config_of

from pipeline.config import Config, to_json

LIMIT_S = 150.0


def toml_of(config: Config, directory: Path) -> Path:
    """The configuration as a file that `penstock run` reads."""
    file = directory / "run.toml"
    lines = []
    for section, values in json.loads(to_json(config)).items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items() if value not in (None, {})]
    file.write_text("\n".join(lines) + "\n")
    return file


@contextmanager
def launched(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """`penstock run ...` as a process of its own; it is ended with the block."""
    command = [sys.executable, "-c", "import sys; from pipeline.cli import main; sys.exit(main(sys.argv[1:]))", "run", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(60)


def pids(home: Path, run: str) -> dict[str, int]:
    """The launcher's worker processes."""
    return json.loads((home / "runs" / run / "workers.json").read_text())["workers"]


def test_ctrl_c_leaves_a_run_that_resume_finishes_with_the_same_weights(broker, run_id, tiny_model, tmp_path: Path, penstock_home: Path):
    config = config_of(tiny_model, tmp_path, run={"steps": 12, "seed": 7}, kafka={"bootstrap": broker, "partitions": 8})
    plain = complete(broker, f"{run_id}-plain", config)
    run = f"{run_id}-cli"
    with Crew(broker, run) as watching, launched(str(toml_of(config, tmp_path)), "--run-id", run, "--json") as process:
        watching.wait(lambda: run_exists(watching, run) and watching.report()["steps"] >= 2)
        workers = pids(penstock_home, run)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130
        assert f"penstock run --resume {run}" in told
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())
        assert watching.report()["status"] == "stopped"
    with launched("--resume", run, "--json", "--bootstrap", broker) as process:
        printed, told = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, told
    report = json.loads(printed)
    assert report["status"] == "finished"
    assert report["weights"]["digest"] == plain["weights"]["digest"]
    assert report["groups"] == plain["groups"]
    lines = [json.loads(line) for line in (penstock_home / "runs" / run / "metrics.jsonl").read_text().splitlines()]
    places = [(line["from"], line["number"]) for line in lines]
    assert len(places) == len(set(places))


def test_a_worker_that_dies_ends_the_run_with_its_name_and_its_last_words(broker, run_id, tiny_model, tmp_path: Path, penstock_home: Path):
    config = config_of(tiny_model, tmp_path, run={"steps": 400, "seed": 7}, kafka={"bootstrap": broker, "partitions": 8})
    with Crew(broker, run_id) as watching, launched(str(toml_of(config, tmp_path)), "--run-id", run_id, "--plain") as process:
        watching.wait(lambda: run_exists(watching, run_id) and watching.report()["steps"] >= 1)
        workers = pids(penstock_home, run_id)
        os.kill(workers["scorer-0"], signal.SIGKILL)
        printed, told = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "scorer-0 died" in told
    assert "joined run" in printed + told
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in workers.values()):
        assert time.monotonic() < deadline, "a worker is left behind"
        time.sleep(0.05)


def run_exists(crew: Crew, run: str) -> bool:
    """Whether the run's topics are there."""
    return crew.log.partitions(f"{run}.metrics") is not None


@pytest.mark.slow
def test_the_demo_learns(broker, run_id, tmp_path: Path):
    """The shipped demo, from the tiny model on: reward up by 0.3 at least, to 0.7 at least."""
    root = Path(__file__).resolve().parents[2]
    model = tmp_path / "tiny"
    make = [sys.executable, "-c", "import sys; from pipeline.cli import main; sys.exit(main(sys.argv[1:]))", "model", "tiny", str(model)]
    subprocess.run(make, check=True, cwd=root)
    settings = ["--set", f"model.path={model}", "--set", f"kafka.bootstrap={broker}", "--run-id", run_id, "--json"]
    with launched(str(root / "examples" / "demo.toml"), *settings) as process:
        printed, told = process.communicate(timeout=600)
    assert process.returncode == 0, told
    report = json.loads(printed)
    assert report["reward"]["last"] >= 0.7
    assert report["reward"]["last"] - report["reward"]["first"] >= 0.3
    assert {entry["version"] for entry in report["eval"]} >= {0, 100}
