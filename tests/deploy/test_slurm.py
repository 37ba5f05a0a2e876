"""Runs as Slurm jobs: `deploy/slurm/` is what `penstock sbatch` writes, and a job that is stopped in any way loses nothing."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.pipeline import cli
from tests.support import slurm as support
from tests.support.paths import ROOT
from tests.support.slurm import Slurm

SCRIPTS = {"run.sbatch": [], "workers.sbatch": ["--bootstrap", "broker.example:9092"]}
STEPS = 60
CONFIG = """
[run]
name = "exact"
steps = {steps}
seed = 1
[model]
path = "{model}"
[data]
source = "tiny:successor"
size = 64
[reward]
functions = ["exact_match"]
[schedule]
prompts_per_step = 2
samples_per_prompt = 8
[sampling]
max_new_tokens = 6
[algorithm]
filter_zero_variance = false
[rollout]
workers = 2
[trainer]
checkpoint_every = 4
[mlflow]
enabled = false
"""


def test_the_scripts_in_deploy_are_what_penstock_sbatch_writes_for_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name, options in SCRIPTS.items():
        assert cli.main(["sbatch", "examples/demo.toml", *options]) == 0
        assert capsys.readouterr().out == (ROOT / "deploy" / "slurm" / name).read_text(encoding="utf-8")
        subprocess.run(["bash", "-n", str(ROOT / "deploy" / "slurm" / name)], check=True)


def test_each_worker_gets_its_node_and_gpus_and_a_trainer_on_two_nodes_its_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sizes = {"rollout.workers": 4, "rollout.gpus_per_worker": 2, "trainer.processes": 8, "trainer.gpus": 8, "trainer.backend": "deepspeed"}
    settings = [word for key, value in sizes.items() for word in ("--set", f"{key}={value}")]
    command = ["sbatch", str(ROOT / "examples" / "demo.toml"), *settings, "--trainer-nodes", "2", "--rollout-per-node", "2"]
    assert cli.main(command) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=4\n" in script
    assert "#SBATCH --gpus-per-node=6\n" in script
    assert re.search(r"^  OMP_NUM_THREADS=\d+ SPAN=2 TASKS=8 worker 0 trainer trainer$", script, re.MULTILINE)
    assert re.search(r"CUDA_VISIBLE_DEVICES=4,5 worker 0 evaluator evaluator$", script, re.MULTILINE)
    placed = re.findall(r"CUDA_VISIBLE_DEVICES=(\S+) worker (\d) rollout-(\d) rollout --slot \3$", script, re.MULTILINE)
    assert placed == [("0,1", "2", "0"), ("2,3", "2", "1"), ("0,1", "3", "2"), ("2,3", "3", "3")]
    assert cli.main([*command[:-4], "--trainer-nodes", "3"]) == 2
    assert "does not divide trainer.processes = 8" in capsys.readouterr().err


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Three nodes on this machine."""
    if reason := support.missing():
        pytest.skip(reason)
    with support.started(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture(scope="module")
def model(made_once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """A tiny model that has learned a little."""
    from penstock.pipeline.data.tiny.model import make_tiny_model

    return made_once("tiny-slurm", lambda folder: make_tiny_model(folder, steps=60))


@pytest.fixture(scope="module")
def config(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("config") / "exact.toml"
    file.write_text(CONFIG.format(steps=STEPS, model=model))
    return file


@pytest.fixture(scope="module")
def script(cluster: Slurm, config: Path) -> Path:
    """The script of its job, and the program `penstock` for it."""
    written = penstock("sbatch", str(config))
    file = cluster.folder / "run.sbatch"
    file.write_text(written)
    (cluster.folder / "penstock").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m penstock "$@"\n')
    (cluster.folder / "penstock").chmod(0o755)
    return file


@pytest.fixture(scope="module")
def digest(config: Path) -> str:
    """The weights in which the run ends without Slurm."""
    return str(json.loads(penstock("run", str(config), "--json"))["weights"]["digest"])


def penstock(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "penstock", *words], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def steps(home: Path) -> int:
    """The newest step of which the tracker has written measurements."""
    text = "".join(file.read_text() for file in home.glob("runs/*/metrics.jsonl"))
    return max(map(int, re.findall(r'"kind": "step", "step": (\d+)', text)), default=0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_steps_have_the_environment_of_the_script_whatever_sbatch_exports_and_in_a_folder_of_any_name(cluster: Slurm) -> None:
    program, home = cluster.folder / "printenv.sh", cluster.folder / "100%job of mine"
    program.write_text('#!/bin/sh\necho "$2: $PENSTOCK_HOME, $OMP_NUM_THREADS threads"\n')
    program.chmod(0o755)
    report = home / "runs" / "mine" / "report.json"
    report.parent.mkdir(parents=True)
    report.write_text(json.dumps({"status": "finished"}, indent=2))
    own = {"PENSTOCK": str(program), "PENSTOCK_HOME": str(home), "RUN": "mine"}
    job = cluster.submit(ROOT / "deploy" / "slurm" / "workers.sbatch", f"--export={','.join(own)}", **own)
    cluster.wait(lambda: cluster.state(job) in ("COMPLETED", "FAILED"), lambda: cluster.output(job))
    assert cluster.state(job) == "COMPLETED", cluster.output(job)
    assert (home / "logs" / "rollout-0.log").read_text() == f"rollout: {home}, 1 threads\n"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("end", ["scontrol requeue", "scancel", "--signal before the limit", "preemption", "none"])
def test_a_run_that_slurm_stops_in_any_way_ends_in_the_weights_that_it_has_without_slurm(
    end: str, cluster: Slurm, script: Path, digest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"run-{time.time_ns() % 10**6}"
    home = cluster.folder / run
    own = {"RUN": run, "PENSTOCK_HOME": str(home), "PENSTOCK": str(cluster.folder / "penstock"), "HEAD": "127.0.0.1"}
    before = ["--signal=B:USR1@90"] if end == "--signal before the limit" else []
    job = cluster.submit(script, *before, **own)

    def told() -> str:
        return cluster.output(job) + "".join(f"\n== {file.name}\n{file.read_text()[-2000:]}" for file in sorted((home / "logs").glob("*")))

    def await_state(*states: str) -> float:
        since = time.monotonic()
        cluster.wait(lambda: cluster.state(job) in states, lambda: f"{cluster.state(job)}\n{told()}", 900.0)
        return time.monotonic() - since

    await_state("RUNNING")
    started, stopped_s = time.monotonic(), 0.0
    if end != "none":
        cluster.wait(lambda: steps(home) >= STEPS // 10, told)
        if end == "preemption":
            urgent = cluster.folder / "urgent.sbatch"
            urgent.write_text("#!/bin/sh\n")
            cluster.submit(urgent, "--partition=urgent", "--nodes=3", "--exclusive")
        elif before:  # the limit, which is 30 to 90 s away; Slurm counts it in minutes
            cluster("scontrol", "update", f"JobId={job}", f"TimeLimit={int((time.monotonic() - started + 30) // 60) + 1}")
        else:
            cluster(*(["scancel", job] if end == "scancel" else ["scontrol", "requeue", job]))
        stopped_s = await_state("PENDING", "CANCELLED")
        if end == "scancel":
            time.sleep(3.0)
            assert cluster.state(job) == "CANCELLED"
            job = cluster.submit(script, **own)
        else:
            cluster.wait(lambda: cluster("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "3", told)
            time.sleep(1.0)  # Slurm takes a start in the second of the requeue for the old one, and fails the job
            cluster("scontrol", "update", f"JobId={job}", "StartTime=now", "TimeLimit=30")
    await_state("COMPLETED", "FAILED")
    assert cluster.state(job) == "COMPLETED", told()
    report = json.loads((home / "runs" / run / "report.json").read_text())
    log = (home / "logs" / "trainer.log").read_text()
    recovered = re.findall(r"recovered in .*", log)
    statuses = sorted(set(re.findall(r"status (\d+)", told())))
    with capsys.disabled():
        print(f"\n| {end} | stopped in {stopped_s:.0f} s; statuses {', '.join(statuses)} | {'; '.join(recovered) or '-'} |")
    assert report["weights"]["digest"] == digest, told()
    assert len(recovered) == (end != "none"), log
