"""Disk full under the broker: it says so in one line, and nothing that was acknowledged is missing once there is room."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.infra.broker import embedded
from tests.support.paths import ROOT


def may_mount() -> bool:
    """Whether this user may mount a small file system in a namespace of its own."""
    try:
        tried = subprocess.run(["unshare", "-rm", "sh", "-c", "mount -t tmpfs tmpfs /mnt"], capture_output=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 0


@pytest.mark.costly  # has a broker of its own
@pytest.mark.slow
def test_a_broker_without_disk_space_says_so_and_loses_nothing(tmp_path: Path) -> None:
    if not may_mount():
        pytest.skip("needs `unshare -rm` and mount: a disk that is full is imitated by a small file system")
    command = ["unshare", "-rm", sys.executable, "-m", "tests.support.full_disk", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["writer"].startswith("cannot write to a/0")
    assert not found["running"]
    for messages in (found["why"], found["start"]):
        assert f"the broker's disk is full ({found['home']}/broker): free some space, then start again" in messages
        assert "\n" not in messages
    assert found["same_address"]
    assert found["acknowledged"] > 10
    assert found["missing"] == 0
    assert (found["why_while_it_runs"], found["why_after_stop"]) == (None, None)


@pytest.mark.slow
def test_a_killed_broker_is_told_from_a_stopped_one(new_home: Callable[[], Path]) -> None:
    home = new_home()
    assert embedded.status(home).ended is None
    pid = embedded.start(home=home).pid
    assert pid is not None
    assert embedded.status(home).ended is None
    os.kill(pid, signal.SIGKILL)
    while embedded.status(home).running:
        pass
    assert embedded.status(home).ended == "the broker was killed: its log contains no error"
    assert not embedded.stop(home)
    assert embedded.status(home).ended is None
