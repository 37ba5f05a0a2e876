"""A record that was in hand when its reader was killed is known to the next process of that name, and not read a fourth time."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.pipeline.runtime.dead_letters import MAX_CRASHES, Attempts
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record
from tests.support.signals import signal_self

RECORD = Record(topic="demo.groups", partition=3, offset=2**40, timestamp_ms=0, key=None, headers=(), value=b"")
OTHER = replace(RECORD, topic="demo.rollouts", partition=0, offset=7)


def killed_while_reading(path: Path, *records: Record) -> None:
    """In a process of its own: read all records but the last to their end, and die by SIGKILL in the middle of that one."""
    pid = os.fork()
    if not pid:
        attempts = Attempts(path)
        for record in records[:-1]:
            with attempts.reading(record):
                pass
        with attempts.reading(records[-1]):
            signal_self(signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def read(attempts: Attempts, record: Record) -> None:
    with attempts.reading(record):
        pass


def test_a_record_that_killed_three_times_is_refused_by_the_fourth_process_and_by_all_after_it(tmp_path: Path) -> None:
    path = tmp_path / "attempts" / "trainer"
    for crashes in range(MAX_CRASHES):
        assert Attempts(path).crashes.get((RECORD.topic, 3, 2**40), 0) == crashes
        killed_while_reading(path, OTHER, RECORD)
    for _ in range(2):
        attempts = Attempts(path)
        with pytest.raises(Unusable, match="3 processes of this worker crashed") as error:
            read(attempts, RECORD)
        assert error.value.kind == "poison"
        read(attempts, OTHER)
        read(attempts, replace(RECORD, offset=RECORD.offset + 1))


def test_a_record_that_was_read_to_the_end_after_all_is_forgiven(tmp_path: Path) -> None:
    path = tmp_path / "scorer-0"
    for _ in range(MAX_CRASHES - 1):
        killed_while_reading(path, RECORD)
    read(Attempts(path), RECORD)
    assert not Attempts(path).crashes
    killed_while_reading(path, RECORD)
    assert list(Attempts(path).crashes.values()) == [1]


def test_each_record_answers_for_its_own_deaths(tmp_path: Path) -> None:
    path = tmp_path / "scorer-0"
    for _ in range(MAX_CRASHES):
        killed_while_reading(path, RECORD)
    with pytest.raises(Unusable):
        read(Attempts(path), RECORD)
    killed_while_reading(path, OTHER)
    attempts = Attempts(path)
    assert sorted(attempts.crashes.values()) == [1, 3]
    read(attempts, OTHER)
    assert list(Attempts(path).crashes.values()) == [3]


def test_a_payload_that_is_refused_and_an_orderly_end_leave_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trainer"
    attempts = Attempts(path)
    with pytest.raises(Unusable), attempts.reading(RECORD):
        raise Unusable("not Arrow", kind="undecodable")
    attempts.close()
    assert not Attempts(path).crashes


def test_an_error_that_ends_the_process_counts_as_a_death(tmp_path: Path) -> None:
    path = tmp_path / "trainer"
    with pytest.raises(RecursionError), Attempts(path).reading(RECORD):
        raise RecursionError
    assert list(Attempts(path).crashes.values()) == [1]


@pytest.mark.parametrize("spoiled", [b"", b"\xff" * 5000, b"\x01" * 40])
def test_files_that_hold_anything_are_no_reason_to_stop(tmp_path: Path, spoiled: bytes) -> None:
    (tmp_path / "trainer").write_bytes(spoiled)
    (tmp_path / "trainer.json").write_bytes(spoiled)
    read(Attempts(tmp_path / "trainer"), RECORD)


def test_without_a_place_to_write_it_works_and_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (None, tmp_path / "file" / "trainer"):
        attempts = Attempts(path)
        read(attempts, RECORD)
        with pytest.raises(ZeroDivisionError), attempts.reading(RECORD):
            raise ZeroDivisionError
        assert not Attempts(path).crashes
