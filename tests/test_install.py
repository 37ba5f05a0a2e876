"""What a user installs has one name, `penstock`: modules of the user's own may be called like our folders."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import EXAMPLES, ROOT

OURS = ("topics", "infra", "pipeline", "workers")


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
    """Build the wheel of this checkout as `uv build` does."""
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
