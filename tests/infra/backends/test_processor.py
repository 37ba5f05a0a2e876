"""A processor's vendor and instructions; memory and cores that a process may use."""

import os
from pathlib import Path

import psutil
import pytest

from penstock.infra.backends import hardware
from penstock.infra.backends.hardware import Cpu, described, this_cpu


def test_this_machine_s_processor_is_read() -> None:
    assert this_cpu().cores >= 1


def test_instructions_for_bfloat16_are_looked_for_among_the_flags_alone() -> None:
    assert described("processor : 0\nflags\t\t: fpu amx_bf16 amx_tile\n", cores=1).bfloat16
    assert described("Features : fp asimd bf16\n", cores=1).bfloat16
    assert not described("model name : avx512_bf16\nflags : fpu avx512f\n", cores=1).bfloat16


def test_a_processor_has_its_vendor_or_none_that_is_known() -> None:
    assert described("processor\t: 0\nvendor_id\t: GenuineIntel\n", cores=2) == Cpu(cores=2, bfloat16=False, vendor="GenuineIntel")
    assert described("", cores=2).vendor == "unknown"


VERSION_1 = {
    "memory/memory.limit_in_bytes": 4000,
    "memory/memory.usage_in_bytes": 1500,
    "memory/memory.stat": "cache 0\ntotal_inactive_file 500",
    "cpu/cpu.cfs_quota_us": 150_000,
    "cpu/cpu.cfs_period_us": 100_000,
}
VERSION_2 = {
    "job/memory.max": 4000,
    "job/memory.current": 1500,
    "job/memory.stat": "anon 1000\ninactive_file 500",
    "job/cpu.max": "150000 100000",
    "job/step/memory.max": "max",
    "job/step/memory.current": 1,
}
UNLIMITED = {
    "memory.max": "max",
    "memory.current": 4096,
    "cpu.max": "max 100000",
    "memory/memory.limit_in_bytes": 2**63 - 4096,
    "memory/memory.usage_in_bytes": 4096,
    "cpu/cpu.cfs_quota_us": -1,
    "cpu/cpu.cfs_period_us": 100_000,
}


@pytest.mark.parametrize(("own", "files"), [("9:memory:/on/the/host\n3:cpu,cpuacct:/on/the/host", VERSION_1), ("0::/job/step", VERSION_2)])
def test_memory_and_cores_are_those_of_a_container_or_a_slurm_job(
    own: str, files: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _machine(tmp_path, {**files, "self": own}, monkeypatch)
    assert hardware.this_memory() == hardware.Memory(total=4000, available=3000)
    assert this_cpu().cores == 2


@pytest.mark.parametrize("own", ["1:name=systemd:/", "0::/", "4:memory:/own\n1:cpu:/"])
def test_a_process_without_limits_has_the_machine_s_memory_and_cores(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(tmp_path, {**UNLIMITED, "self": own}, monkeypatch)
    assert hardware.this_memory().total == psutil.virtual_memory().total
    assert this_cpu().cores == 64


def _machine(folder: Path, files: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 64 cores whose kernel shows these files of cgroups."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{content}\n", encoding="utf-8")
    monkeypatch.setattr(hardware, "CGROUPS", folder)
    monkeypatch.setattr(hardware, "OWN_CGROUPS", folder / "self")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
