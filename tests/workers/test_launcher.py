"""`penstock run` on real processes: it sees a run through whatever dies, stops it so that it can go on, and says when it gives up."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.infra.broker import embedded
from penstock.infra.errors import Fenced, PenstockError
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.inspect.run_view import load
from penstock.pipeline.launch import launcher
from penstock.pipeline.launch.create import create
from penstock.pipeline.launch.supervisor import Supervisor as WorkersOfARun
from penstock.pipeline.launch.supervisor import Worker
from penstock.pipeline.runtime.leases import SILENT_S, WriterLease, new_token
from penstock.pipeline.runtime.registration.run_registry import find
from penstock.topics.metrics import meaning_of
from tests.support.children import end_in_time
from tests.support.launched import launched, pids, toml_of
from tests.support.paths import ROOT
from tests.support.worker_set import WorkerSet, complete, config_of, same_run

LIMIT_S = 400.0
SLOW_UNTIL_TOLD = """
import time
from pathlib import Path

def share(prompts, completions, **columns):
    if not Path(__file__).with_name("quick").exists():
        time.sleep(1.5)
    return [sum(c.isdigit() for c in text) / 8 for text in completions]
"""
"""A reward that takes long until a file is there: a run is interrupted before its end."""


def holding(text: str, *places: Path) -> list[str]:
    """Files below these places in which a text stands."""
    found = subprocess.run(["grep", "-rlaF", text, *map(str, places)], capture_output=True, text=True, check=False)
    return found.stdout.split()


def open_to_others(place: Path) -> list[Path]:
    """Files and directories below a place that other users may look into."""
    return [path for path in place.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o077]


def test_ctrl_c_leaves_a_run_that_resume_finishes_with_the_same_weights_and_keeps_its_password_to_itself(
    broker, run_id, tiny_model, tmp_path: Path, penstock_home: Path, monkeypatch: pytest.MonkeyPatch
):
    password = f"hush-{run_id}"
    monkeypatch.setenv("PENSTOCK_SECURITY", json.dumps({"security_protocol": "PLAINTEXT", "sasl_plain_password": password}))
    sections = {"run": {"steps": 5, "seed": 7}, "rollout": {"workers": 1, "engine": "toy"}, "kafka": {"bootstrap": broker, "partitions": 8}}
    config = config_of(tiny_model, tmp_path, **sections)
    (tmp_path / "digits.py").write_text(SLOW_UNTIL_TOLD)
    quick = tmp_path / "quick"
    quick.touch()
    plain = complete(MemoryLog(), f"{run_id}-plain", config)
    quick.unlink()
    run = f"{run_id}-cli"
    with (
        WorkerSet(broker, run) as watching,
        launched(str(toml_of(config, tmp_path)), "--bootstrap", broker, "--run-id", run, "--json") as process,
    ):
        watching.wait(lambda: run_exists(watching, run) and watching.report()["steps"] >= 1)
        workers = pids(penstock_home, run)
        assert password not in "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in workers.values())
        process.send_signal(signal.SIGINT)
        _, records = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130
        assert re.search(rf"^stopped after \d+ of 5 steps; continue: penstock run --resume {run}$", records, re.MULTILINE)
        assert end_in_time(*workers.values())
        assert watching.report()["status"] == "stopped"
    quick.touch()
    with launched("--resume", run, "--json", "--bootstrap", broker, "--set", "trainer.checkpoint_every=1") as process:
        printed, records = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, records
    assert json.loads((penstock_home / "runs" / run / "config.json").read_text())["trainer"]["checkpoint_every"] == 1
    report = json.loads(printed)
    assert report["status"] == "finished"
    same_run(report, plain)
    lines = [json.loads(line) for line in (penstock_home / "runs" / run / "metrics.jsonl").read_text().splitlines()]
    places = [(line["from"], line["number"]) for line in lines]
    assert len(places) == len(set(places))
    fields = {"kind", "step", "time", "from", "number", "worker", "version", "source", "examples"}
    assert {name for line in lines for name in set(line) - fields if meaning_of(name) is None} == set()
    assert holding(run, penstock_home / "broker", penstock_home / "runs")
    assert not holding(password, penstock_home, tmp_path)
    assert (penstock_home.stat().st_mode & 0o777, open_to_others(penstock_home / "runs" / run)) == (0o700, [])


@pytest.mark.slow
def test_a_killed_worker_and_a_killed_broker_cost_a_run_nothing_but_time(
    new_home: Callable[[], Path], tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    home = new_home()
    monkeypatch.setenv("PENSTOCK_HOME", str(home))
    config = config_of(tiny_model, tmp_path, run={"steps": 10, "seed": 7}, rollout={"workers": 1})
    broker = embedded.start().bootstrap
    plain = complete(broker, "plain", config)
    with WorkerSet(broker, "killed") as watching, launched(str(toml_of(config, tmp_path)), "--run-id", "killed", "--json") as process:
        watching.wait(lambda: run_exists(watching, "killed") and watching.report()["steps"] >= 2)
        os.kill(pids(home, "killed")["rollout-0"], signal.SIGKILL)
        dead = embedded.status().pid
        assert dead is not None
        os.kill(dead, signal.SIGKILL)
        printed, records = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, records
    report = json.loads(printed)
    same_run(report, plain)
    assert "rollout-0 was killed by SIGKILL and is restarted (start 2)" in records
    assert "the broker was killed: its log contains no error; restarting it" in records
    assert f"the broker at {broker} was restarted" in records


def test_a_run_whose_worker_cannot_be_helped_is_given_up_in_its_own_words_and_can_be_resumed(
    broker, run_id, tiny_model, tmp_path: Path, penstock_home: Path, monkeypatch: pytest.MonkeyPatch
):
    config = config_of(tiny_model, tmp_path, kafka={"bootstrap": broker, "partitions": 8})
    said: list[str] = []
    monkeypatch.setattr(launcher, "Supervisor", StaleWorkerSet)
    log = KafkaLog(broker)
    try:
        record = create(config, log=log, run_id=run_id, notify=said.append)
        with pytest.raises(PenstockError, match=rf"run {run_id} failed: scorer-0: reward: no such function. Fix"):
            launcher.watch(log, record, config, notify=said.append, live=False, quiet=True)
        status = find(log, run_id)
    finally:
        log.close()
    assert not any("last words" in line for line in said)
    assert status is not None
    assert status.status == "stopped"
    assert not (penstock_home / "runs" / run_id / "workers.json").exists()


class StaleWorkerSet(WorkersOfARun):
    """Cheap processes; the scorer's ends with a person's mistake."""

    def _worker(self, role: str, slot: int) -> Worker:
        worker = super()._worker(role, slot)
        program = "print('reward: no such function'); raise SystemExit(2)" if role == "scorer" else "import time; time.sleep(600)"
        worker.command = [sys.executable, "-c", program]
        return worker


def test_a_second_launcher_on_another_machine_ends_before_it_starts_a_worker(
    broker, run_id, new_home: Callable[[], Path], tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = config_of(tiny_model, tmp_path, kafka={"bootstrap": broker, "partitions": 2})
    home, said = new_home(), list[str]()
    monkeypatch.setattr(launcher, "Supervisor", StaleWorkerSet)
    log = KafkaLog(broker)
    first = WriterLease(log=log, run=run_id, writer="launcher", token=new_token(), watch_s=SILENT_S, first_wins=True)
    try:
        record = create(config, log=log, run_id=run_id, notify=said.append)
        first.acquire().close()
        monkeypatch.setenv("PENSTOCK_HOME", str(home))
        with pytest.raises(Fenced, match=f"launcher of run {run_id} is already running"):
            launcher.watch(log, record, config, notify=said.append, live=False, quiet=True)
    finally:
        first.release()
        log.close()
    assert not (home / "runs" / run_id / "logs").exists(), "a worker writes its log there"
    assert not any("starting its workers" in line for line in said)


@pytest.mark.slow
def test_a_machine_that_was_switched_off_resumes_with_the_same_weights(
    new_home: Callable[[], Path], tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    home = new_home()
    monkeypatch.setenv("PENSTOCK_HOME", str(home))
    config = config_of(tiny_model, tmp_path, run={"steps": 12, "seed": 7}, rollout={"workers": 1})
    broker = embedded.start().bootstrap
    plain = complete(broker, "plain", config)
    with WorkerSet(broker, "off") as watching, launched(str(toml_of(config, tmp_path)), "--run-id", "off", "--json") as process:
        watching.wait(lambda: run_exists(watching, "off") and watching.report()["steps"] >= 2)
        left = pids(home, "off")
        process.kill()  # the launcher alone at first: its workers go on
        process.wait(60)
    with WorkerSet(broker, "off") as watching, launched("--resume", "off", "--json") as process:
        begun = watching.report()["steps"]
        watching.wait(lambda: watching.report()["steps"] >= begun + 2)
        assert end_in_time(*left.values())
        with launched("--resume", "off") as second:
            assert "already has a launcher, process" in second.communicate(timeout=LIMIT_S)[1]
            assert second.returncode == 1
        running = embedded.status().pid
        assert running is not None
        for pid in (process.pid, running, *pids(home, "off").values()):
            os.kill(pid, signal.SIGKILL)
        process.wait(60)
    with launched("--resume", "off", "--json") as process:
        printed, records = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, records
    report = json.loads(printed)
    same_run(report, plain)


def run_exists(worker_set: WorkerSet, run: str) -> bool:
    """True once the run's record can be read; its topics are made before it."""
    return worker_set.log.partitions(f"{run}.metrics") is not None and load(worker_set.log, run).record is not None


@pytest.mark.slow
def test_the_demo_learns(broker, run_id, tmp_path: Path):
    """The shipped demo, from the tiny model on: reward up by 0.3 at least, to 0.7 at least."""
    model, console = tmp_path / "tiny", "import sys; from penstock.pipeline.cli import main; sys.exit(main(sys.argv[1:]))"
    subprocess.run([sys.executable, "-c", console, "model", "tiny", str(model)], check=True, cwd=ROOT)
    settings = ["--set", f"model.path={model}", "--set", f"kafka.bootstrap={broker}", "--run-id", run_id, "--json"]
    with launched(str(ROOT / "examples" / "demo.toml"), *settings) as process:
        printed, records = process.communicate(timeout=600)
    assert process.returncode == 0, records
    report = json.loads(printed)
    assert report["reward"]["last"] >= 0.7
    assert report["reward"]["last"] - report["reward"]["first"] >= 0.3
    assert {entry["version"] for entry in report["eval"]} >= {0, 100}
