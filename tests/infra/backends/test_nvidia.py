"""The NVIDIA driver: its version is read from the kernel's file, and one too old for a CUDA release is refused in one line."""

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.infra.backends.hardware import driver_problem, driver_version, library_cuda, torch_cuda
from tests.support.paths import ROOT

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 03:50:37 UTC 2025\nGCC version:  gcc version 12.3.0\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (dvs-builder@U22)  Tue Sep 1 2026\n"
ABSENT = Path("/nonexistent")


@pytest.mark.parametrize(("text", "version"), [(CLOSED, "570.86.15"), (OPEN, "580.159.04"), ("", None)])
def test_the_version_is_that_of_the_kernel_module(tmp_path: Path, text: str, version: str | None) -> None:
    (tmp_path / "version").write_text(text)
    assert driver_version(tmp_path / "version", ("false",)) == version


def test_without_the_kernels_file_the_drivers_own_tool_is_asked() -> None:
    assert driver_version(ABSENT, (sys.executable, "-c", "print('580.65.06')")) == "580.65.06"
    assert driver_version(ABSENT, (sys.executable, "-c", "print('NVIDIA-SMI has failed'); raise SystemExit(9)")) is None
    assert driver_version(ABSENT, ("/nonexistent/nvidia-smi",)) is None


def test_a_driver_that_is_too_old_or_absent_is_refused_with_the_one_that_would_do() -> None:
    assert driver_problem("13.0", "570.86.15") == (
        "driver 570.86.15 is too old for CUDA 13: install 580 or newer, or NVIDIA's forward-compatibility package"
    )
    assert "install 580 or newer" in str(driver_problem("13.0", None))
    assert "install 525 or newer" in str(driver_problem("12.8", "470.256.02"))


@pytest.mark.parametrize(("cuda", "driver", "library"), [("13.0", "580.65.06", 13), ("12.8", "570.86.15", 12), ("13.2", "570.86.15", 13)])
def test_a_driver_that_is_new_enough_or_has_a_forward_compatible_library_is_taken(cuda: str, driver: str, library: int) -> None:
    assert driver_problem(cuda, driver, library) is None


def test_a_lock_is_checked_against_the_driver_by_a_python_without_packages(tmp_path: Path) -> None:
    (tmp_path / "version").write_text(CLOSED)
    (tmp_path / "lock").write_text("nvidia-cuda-runtime==12.8.90\n")
    command = [sys.executable, "-S", "-m", "penstock.infra.backends.hardware"]
    for lock, status in ((tmp_path / "lock", 0), (ROOT / "requirements-gpu.lock", 1)):
        done = subprocess.run([*command, str(lock), str(tmp_path / "version")], cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, len(done.stderr.splitlines())) == (status, status), done.stderr


def test_without_the_drivers_library_no_release_of_cuda_is_supported() -> None:
    assert library_cuda("libnowhere.so.1") == 0


@pytest.mark.costly
def test_the_release_of_torch_is_read_without_importing_it() -> None:
    import torch

    assert torch_cuda() == torch.version.cuda
