"""Images: each role as process 1 of a container that may write to its volume only, and a kill of each of them and of the broker."""

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.infra.errors import LogUnreachable
from tests.support.paths import EXAMPLES, ROOT
from tests.support.podman import Podman, podman
from tests.support.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(shutil.which("podman") is None, reason="podman is not installed"),
    pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="mmdebstrap, which makes the base image, is not installed"),
]
LIGHT, TRACKER = "localhost/penstock:light", "localhost/penstock:tracker"
LIMIT_S = 900.0
SECURITY = {
    "security_protocol": "SASL_PLAINTEXT",
    "sasl_mechanism": "SCRAM-SHA-256",
    "sasl_plain_username": "penstock",
    "sasl_plain_password": "of this test",
}
LOGIN = f"--env=PENSTOCK_SECURITY={json.dumps(SECURITY)}"
PACKAGES = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
NUMA = next(Path("/usr/lib").rglob("libnuma.so.1"), None)
TORCH = (
    f"--volume={ROOT}:{ROOT}:ro",
    f"--volume={ROOT / '.venv' / PACKAGES}:/opt/penstock/{PACKAGES}:ro",
    *([f"--volume={NUMA}:{NUMA}:ro"] if NUMA else []),
)
"""The checkout's packages instead of the image's: those of the image `cpu`, which takes gigabytes."""
WORKERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "feeder": (LIGHT, ()),
    "scorer": (LIGHT, ()),
    "tracker": (TRACKER, ()),
    "rollout": (LIGHT, TORCH),
    "trainer": (LIGHT, TORCH),
    "evaluator": (LIGHT, TORCH),
}
"""Role -> its image, and further options of its container."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """Podman with the images that `make image` builds on a base of Debian's packages."""
    folder = tmp_path_factory.mktemp("images") / "podman"
    with podman(folder) as opened:
        if (base := opened.make("image-base")).returncode:
            pytest.skip(f"no base image: {base.stderr.strip().splitlines()[-1:]}")
        built = opened.make("image", "BASE=localhost/penstock-base:bookworm")
        assert built.returncode == 0, built.stderr
        yield opened
    assert str(folder) not in Path("/proc/self/mountinfo").read_text()


def kafka_image(engine: Podman) -> str:
    return engine("images", "--filter=reference=localhost/penstock-kafka", "--format={{.Repository}}:{{.Tag}}").strip()


def test_an_image_is_small_compiled_and_runs_under_any_user_id(engine: Podman) -> None:
    assert int(engine("image", "inspect", "--format={{.Size}}", LIGHT)) < 600e6
    counted = (
        "import pathlib; p = [f.suffix for f in pathlib.Path('/opt/penstock/lib').rglob('*.py*')]; print(p.count('.py'), p.count('.pyc'))"
    )
    for image in (LIGHT, TRACKER, kafka_image(engine)):
        assert engine("image", "inspect", "--format={{.User}}", image).strip() == "10001"
        sources, compiled = engine.once(image, "-c", counted, options=["--entrypoint=python"]).split()
        assert int(compiled) > 0.98 * int(sources)
        assert "penstock" in engine.once(image, "--version", options=["--entrypoint=penstock", "--user=4711:0"])


class Containers:
    """A run whose broker and workers are containers."""

    def __init__(self, engine: Podman, run: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.bootstrap = f"127.0.0.1:{free.getsockname()[1]}"
        self.engine, self.run = engine, run

    def start(self, config: Path, model: Path, *overrides: str) -> None:
        """Start the broker, every worker, and then the command that registers the run they wait for."""
        self.engine.start("broker", kafka_image(self.engine), f"--listen={self.bootstrap}", options=[LOGIN])
        shared = [LOGIN, f"--volume={model}:/model:ro", f"--volume={config.parent}:/config:ro"]
        common = [f"--run={self.run}", f"--bootstrap={self.bootstrap}", "--wait-broker=300"]
        for role, (image, options) in WORKERS.items():
            slot = ["--slot=0"] if role == "scorer" else []
            self.engine.start(role, image, "worker", role, *common, *slot, options=[*shared, *options])
        settings = [f"kafka.bootstrap={self.bootstrap}", "model.path=/model", *overrides]
        words = ["create", f"/config/{config.name}", f"--run-id={self.run}", "--wait-broker=300", "--if-absent"]
        for _ in range(2):  # as a job that is started again
            self.engine.once(LIGHT, *words, *(f"--set={setting}" for setting in settings), options=shared)

    def finished(self) -> bool:
        """True if every worker has exited with status 0; those that a fault has ended are started again, as Compose does it."""
        shown = self.engine("inspect", "--format={{.Name}} {{.State.Status}}-{{.State.ExitCode}}", *WORKERS)
        states = dict(line.split() for line in shown.splitlines())
        for name in WORKERS:
            if states[name] == "exited-1":
                self.engine("start", name)
        return all(states[name] == "exited-0" for name in WORKERS)

    def steps(self) -> int:
        """Committed steps; 0 while the broker starts."""
        self.finished()
        try:
            return int(self.report()["steps"])
        except LogUnreachable:
            return 0

    def report(self) -> dict[str, Any]:
        with penstock.open(self.run, bootstrap=self.bootstrap, security=SECURITY) as opened:
            return opened.report()

    def kill(self, name: str) -> None:
        """SIGKILL, and a new start of the same container."""
        self.engine("kill", "--signal=KILL", name)
        self.engine("wait", name)
        self.engine("start", name)

    def logs(self) -> str:
        return "\n".join(f"{name}: {self.engine('logs', '--tail=20', name, check=False)}" for name in ("broker", *WORKERS))

    def close(self) -> None:
        self.engine("rm", "--all", "--force", "--time=0")
        self.engine("volume", "prune", "--force")


@pytest.fixture
def containers(engine: Podman, run_id: str) -> Iterator[Containers]:
    opened = Containers(engine, run_id)
    yield opened
    opened.close()


def plain_report(config: Path, model: Path, *overrides: str) -> dict[str, Any]:
    settings = [f"--set={setting}" for setting in (f"model.path={model}", *overrides)]
    command = [sys.executable, "-m", "penstock", "run", str(config), "--json", *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("example", ["exact", "demo"])
def test_a_run_in_containers_that_are_all_killed_once_loses_nothing(containers: Containers, tmp_path: Path, example: str) -> None:
    config, model, steps = EXAMPLES / f"{example}.toml", tmp_path / "model", 40
    shutil.copytree(ROOT / ".penstock" / "tiny", model)
    tmp_path.chmod(0o755)
    for file in (model, *model.iterdir()):
        file.chmod(0o755 if file.is_dir() else 0o644)
    containers.start(config, model, f"run.steps={steps}", "eval.every=20")
    assert "penstock" in containers.engine("exec", "feeder", "cat", "/proc/1/cmdline")
    assert "Read-only" in containers.engine("exec", "feeder", "touch", "/opt/penstock/file", check=False)
    for count, name in enumerate(("broker", *WORKERS), start=1):
        until(lambda least=4 * count: containers.steps() >= least, containers.logs, limit_s=LIMIT_S, every_s=1.0)  # type: ignore[misc]
        containers.kill(name)
    until(containers.finished, containers.logs, limit_s=LIMIT_S, every_s=1.0)
    report = containers.report()
    assert (report["status"], report["steps"]) == ("finished", steps)
    containers.engine.once(
        LIGHT, "audit", containers.run, f"--bootstrap={containers.bootstrap}", options=[LOGIN]
    )  # its status is 1 on a violation
    if example == "exact":
        assert report["weights"]["digest"] == plain_report(config, model, f"run.steps={steps}", "eval.every=20")["weights"]["digest"]
