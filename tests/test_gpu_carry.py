"""`make gpu-carry`: packages of the lock by digest, jars without foreign libraries, and their use where nothing is installed."""

import importlib.util
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from penstock.gpu_check import carried
from tests.support.paths import ROOT

LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def carry() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_carry", ROOT / ".ci" / "gpu_carry.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_package_that_travels_is_in_the_lock_with_its_digests(carry: Any) -> None:
    text = carry.requirements(LOCK)
    assert re.findall(r"^([a-z0-9-]+)==", text, re.MULTILINE) == list(carry.CARRIED)
    assert text.count("--hash=sha256:") >= len(carry.CARRIED)
    assert f"\n{carry.BUILT_HERE}==" in LOCK


def test_the_packages_of_every_role_travel_or_are_expected_there(carry: Any) -> None:
    needed = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert needed is not None
    names = set(re.findall(r'^\s*"([a-z0-9-]+)', needed[1], re.MULTILINE))
    assert names - {*carry.CARRIED, *carry.PRESENT} == set()


def test_a_jar_travels_without_libraries_of_other_systems(carry: Any, tmp_path: Path) -> None:
    names = {
        "a/B.class": True,
        "linux/amd64/libzstd-jni-1.so": True,
        "org/x/native/Linux/x86_64/libsnappyjava.so": True,
        "org/x/native/Linux-musl/x86_64/libsnappyjava.so": False,
        "linux/aarch64/libzstd-jni-1.so": False,
        "win/amd64/libzstd-jni-1.dll": False,
        "darwin/x86_64/libzstd-jni-1.dylib": False,
    }
    with zipfile.ZipFile(tmp_path / "a.jar", "w", zipfile.ZIP_DEFLATED) as jar:
        for name in names:
            jar.writestr(name, name * 100)
    carry.repack(tmp_path / "a.jar", tmp_path / "deep" / "a.jar")
    with zipfile.ZipFile(tmp_path / "deep" / "a.jar") as jar:
        assert jar.namelist() == [name for name, travels in names.items() if travels]
        assert all(jar.read(name) == name.encode() * 100 for name in jar.namelist())


USE = """
import os
from pathlib import Path
from penstock.gpu_check import carried
if {missing}:
    carried.find_spec = lambda name: None
carried.use(Path({folder!r}))
try:
    import only_carried
    print("imported", os.environ["PENSTOCK_JARS"])
except ImportError:
    print("not used", os.environ.get("PENSTOCK_JARS"))
"""


@pytest.mark.parametrize("missing", [True, False])
def test_an_archive_is_used_only_where_kafka_python_is_missing(missing: bool, tmp_path: Path) -> None:
    folder = tmp_path / "gpu-carry"
    folder.mkdir()
    (tmp_path / "only_carried.py").write_text("", encoding="utf-8")
    with tarfile.open(folder / f"{sys.implementation.cache_tag}.tar.xz", "w:xz") as tar:
        tar.add(tmp_path / "only_carried.py", "site/only_carried.py")
    code = USE.format(missing=missing, folder=str(folder))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].startswith("imported" if missing else "not used")
    assert (tmp_path / "gpu-carried").exists() == missing


def test_without_an_archive_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried, "find_spec", lambda _: None)
    before = list(sys.path)
    carried.use(tmp_path)
    assert sys.path == before
