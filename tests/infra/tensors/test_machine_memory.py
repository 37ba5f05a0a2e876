"""Memory that a machine's workers share: one writes, and another one takes its place, whatever ends it."""

import os
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.infra.errors import LogError
from penstock.infra.tensors import machine_memory
from penstock.infra.tensors.host_memory import NONE, is_supported
from penstock.infra.tensors.machine_memory import MachineMemory
from penstock.infra.tensors.weight_copy import WeightCopy

pytestmark = pytest.mark.skipif(not is_supported(), reason="shared memory needs Linux")
LAYOUT = {"names": ["a", "b"], "dtypes": ["int8", "int8"], "shapes": [(3,), (2,)]}
WRITER = """
import sys
from penstock.infra.tensors.machine_memory import MachineMemory
from penstock.infra.tensors.weight_copy import WeightCopy
memory = MachineMemory(sys.argv[1])
assert memory.claim()
copy = WeightCopy(memory)
copy.allocate(names=["a", "b"], dtypes=["int8", "int8"], shapes=[(3,), (2,)])
copy.data[:] = b"abcde"
copy.hold(3, "digest")
if sys.argv[2] == "changing":
    copy.change(lambda data: None)
print("here", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def writer(name: str) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a process that writes version 3, or is in the middle of changing it."""
    started = list[subprocess.Popen[str]]()

    def start(state: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", WRITER, name, state], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def attached(name: str) -> tuple[MachineMemory, WeightCopy]:
    """A process's end that sees what the writer has."""
    memory = MachineMemory(name)
    copy = WeightCopy(memory)
    copy.lay_out(**LAYOUT)
    assert not memory.claim()
    file = memory.request_file()
    assert file is not None
    assert stat.S_IMODE(os.fstat(file).st_mode) == 0o600
    memory.map(file)
    return memory, copy


def content(copy: WeightCopy) -> tuple[int, bytes]:
    with copy.reading() as (version, tensors):
        return version, b"".join(bytes(tensor.data) for tensor in tensors)


def test_what_one_process_writes_others_see_and_a_killed_writer_is_followed_by_one_of_them(
    name: str, writer: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = writer("whole")
    memory, copy = attached(name)
    assert (content(copy), copy.digest) == ((3, b"abcde"), "digest")
    assert memory.request_file() is None  # it is mapped already
    process.kill()
    process.wait()
    assert memory.claim()
    assert content(copy) == (3, b"abcde")
    copy.change(lambda data: data.__setitem__(slice(0, 1), b"z"))
    assert content(copy) == (NONE, b"")
    copy.hold(4, "next")
    _, other = attached(name)
    assert content(other) == content(copy) == (4, b"zbcde")
    assert not [path for path in Path("/dev/shm").iterdir() if "penstock" in path.name]
    memory.close()


def test_a_writer_that_is_killed_while_it_changes_a_version_leaves_none(name: str, writer: Callable[[str], subprocess.Popen[str]]) -> None:
    process = writer("changing")
    memory, copy = attached(name)
    process.kill()
    process.wait()
    assert memory.claim()
    assert content(copy) == (NONE, b"")
    memory.close()


def test_a_frozen_writer_is_found_out(name: str, writer: Callable[[str], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_memory, "RESPONSE_TIMEOUT_S", 0.1)
    process = writer("whole")
    process.send_signal(signal.SIGSTOP)
    while "\nState:\tT" not in Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8"):
        time.sleep(0.01)
    memory = MachineMemory(name)
    assert not memory.claim()
    with pytest.raises(TimeoutError):
        memory.request_file()


def test_a_writer_leaves_the_memory_to_a_reader_that_does_not_end_and_begins_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_memory, "READERS_S", 0.05)
    memory = MachineMemory(name)
    assert memory.claim()
    copy = WeightCopy(memory)
    copy.allocate(**LAYOUT)
    copy.data[:] = b"abcde"
    copy.hold(1, "first")
    reader, frozen = attached(name)
    with frozen.reading() as (version, tensors):
        with pytest.raises(LogError, match="is written to other memory"):
            copy.change(lambda _: None)
        assert (version, bytes(tensors[0].data)) == (1, b"abc")
        copy.allocate(**LAYOUT)
        copy.data[:] = b"fghij"
        copy.hold(2, "second")
        assert bytes(tensors[0].data) == b"abc"
    assert content(frozen) == (NONE, b"")
    file = reader.request_file()
    assert file is not None
    reader.map(file)
    assert content(frozen) == content(copy) == (2, b"fghij")
    memory.close()


def test_another_user_gets_nothing(name: str, writer: Callable[[str], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    writer("whole")
    memory = MachineMemory(name)
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    with pytest.raises(PermissionError, match="another user"):
        memory.request_file()
