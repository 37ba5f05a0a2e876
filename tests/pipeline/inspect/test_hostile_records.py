"""What lies in the log of a run is shown, whatever it is: no record ends a command."""

from pathlib import Path
from typing import Any

import pytest

from penstock.pipeline.archive.files import NOTE, Archive
from penstock.pipeline.inspect.records.browse import as_line, as_page, clock, view
from penstock.topics import dead_letters
from penstock.topics.wire.record import Record
from tests.support.a_run import outgoing, stored
from tests.support.strategies import EXAMPLES


def letter_record(letter: dead_letters.DeadLetter, **changes: Any) -> Record:
    return stored(outgoing(dead_letters, letter, run="r"), **changes)


@pytest.mark.parametrize("timestamp_ms", [-(2**63), -1, 0, 10**13, 2**55, 2**63 - 1])
def test_a_record_of_any_time_is_shown(timestamp_ms: int) -> None:
    record = letter_record(EXAMPLES["dead-letters"], timestamp_ms=timestamp_ms)
    assert "0/0" in as_line(record, run="r")
    assert as_page(view(record, run="r"))
    assert clock("%Y", 2.0**60).endswith(" s")


def test_dead_letters_about_dead_letters_are_shown_without_end() -> None:
    record = letter_record(EXAMPLES["dead-letters"])
    for _ in range(300):
        record = letter_record(dead_letters.from_record(record, kind="checksum", reason="x", worker="tracker", time_ns=1))
    assert as_page(view(record, run="r"))


NOTES = ["[]", "1", "no", "[" * 100_000, "{}", '{"format": 1}', '{"format": 1, "run": "../x", "created_ns": 1, "partitions": {}}']


@pytest.mark.parametrize("text", NOTES, ids=lambda text: text[:30])
def test_an_archive_whose_note_is_anything_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / NOTE).write_text(text)
    with pytest.raises(ValueError, match=NOTE) as refused:
        Archive(folder.parent, "r").note()
    assert len(str(refused.value).splitlines()) == 1
