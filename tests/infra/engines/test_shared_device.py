"""A device that processes share by turns: one is awake at a time, nobody is passed by, and a death frees what was held."""

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.infra.engines.shared_device import SharedDevice
from tests.support.children import child
from tests.support.paths import ROOT

HOLDER = """
import sys, time
from pathlib import Path
from penstock.infra.engines.shared_device import SharedDevice
device = SharedDevice(Path(sys.argv[1]))
print(device.acquire(), flush=True)
time.sleep(600)
"""


class Model:
    """Notes when it sleeps and wakes, and whether the device is free meanwhile."""

    def __init__(self, other: SharedDevice) -> None:
        self.other, self.done = other, list[str]()

    def sleep(self) -> None:
        assert not self.other.acquire()
        self.done.append("sleep")

    def wake(self) -> None:
        assert not self.other.acquire()
        self.done.append("wake")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[SharedDevice, SharedDevice]]:
    devices = SharedDevice(tmp_path), SharedDevice(tmp_path)
    yield devices
    for device in devices:
        device.close()


def test_one_has_the_device_and_who_waits_has_it_next_however_fast_the_other_asks_again(pair: tuple[SharedDevice, SharedDevice]) -> None:
    one, other = pair
    assert one.acquire() and one.acquire() and not one.contended
    assert not other.acquire() and one.contended
    one.release()
    assert not one.acquire(), "the other one was first"
    assert other.acquire() and other.owned and not one.owned


def test_a_place_in_the_queue_that_was_left_keeps_nobody_from_the_device(pair: tuple[SharedDevice, SharedDevice]) -> None:
    one, other = pair
    assert one.acquire() and not other.acquire()
    other.leave_queue()
    assert not one.contended
    one.release()
    assert one.acquire()
    stop = threading.Event()
    stop.set()
    assert not other.wait(stop, meanwhile=lambda: None) and not one.contended


def test_a_model_sleeps_before_the_device_is_handed_over_and_wakes_after_it_was_taken(pair: tuple[SharedDevice, SharedDevice]) -> None:
    one, other = pair
    one.model = model = Model(other)
    assert one.acquire()
    other.leave_queue()
    one.release()
    assert model.done == ["wake", "sleep"] and other.acquire()


@pytest.mark.parametrize("waits", [False, True])
def test_a_process_that_is_killed_while_it_holds_or_wants_the_device_leaves_it_to_the_others(tmp_path: Path, waits: bool) -> None:
    mine = SharedDevice(tmp_path)
    assert not waits or mine.acquire()
    with child([sys.executable, "-c", HOLDER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline().strip() == str(not waits)
        assert mine.contended if waits else not mine.acquire()
    assert not mine.contended if waits else mine.acquire()
    mine.close()


def test_of_two_that_always_want_it_each_has_every_other_turn(tmp_path: Path) -> None:
    had, over = list[tuple[str, float, float]](), threading.Event()

    def work(name: str) -> None:
        device = SharedDevice(tmp_path)
        while device.wait(over, meanwhile=lambda: None) and not over.is_set():
            began = time.monotonic()
            while not device.contended and not over.is_set():
                time.sleep(0.001)
            had.append((name, began, time.monotonic()))
            device.release()
            if len(had) >= 8:
                over.set()
        device.close()

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    assert all(before[2] <= after[1] and before[0] != after[0] for before, after in itertools.pairwise(had[:-1]))
    assert len(had) >= 8
