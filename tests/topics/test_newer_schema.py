"""A record of a newer release stops its reader with one line: set aside as unusable, its work would be lost."""

from dataclasses import replace

import pytest

from penstock.pipeline.archive.archived_log import open_archive
from penstock.pipeline.archive.layout import KINDS, Kind
from penstock.pipeline.archive.relocation import signed
from penstock.pipeline.runtime.exit_status import MISTAKES, NO_RETRY, exit_status
from penstock.topics.wire.errors import NewerSchema, Unusable
from penstock.topics.wire.record import Record
from tests.support.paths import ROOT


def stored(kind: Kind) -> Record:
    """A record of an earlier release, from an export that is kept with the tests."""
    archived = open_archive(str(ROOT / "tests" / "data" / "archive_format_1"))
    assert archived is not None
    partitions = range(archived.partitions(kind.kafka_name(archived.run)) or 0)
    return next(record for partition in partitions for record in archived.records(kind, partition))


def as_version(record: Record, version: str, *, sign: bool = True) -> Record:
    headers = tuple((name, text.rpartition(b"/")[0] + version.encode() if name == "schema" else text) for name, text in record.headers)
    return replace(record, headers=signed(headers, record.value) if sign else headers)


@pytest.mark.parametrize("name", ["runs", "metrics", "ledger", "groups", "rollouts", "prompts", "weights", "chunks"])
def test_a_stored_record_is_read_and_one_of_a_newer_schema_stops_its_reader(name: str) -> None:
    kind = KINDS[name]
    record = stored(kind)
    run = dict(record.headers)["run"].decode()
    assert kind.read(record, run=run)
    with pytest.raises(
        NewerSchema, match=r"has schema [a-z-]+/9, and this release reads up to [a-z-]+/\d: install the newer release"
    ) as newer:
        kind.read(as_version(record, "/9"), run=run)
    assert not isinstance(newer.value, Unusable)
    assert exit_status(newer.value) == NO_RETRY
    assert isinstance(newer.value, MISTAKES)


def test_a_damaged_or_foreign_record_that_names_a_newer_schema_is_only_unusable() -> None:
    record = stored(KINDS["prompts"])
    run = dict(record.headers)["run"].decode()
    for wrong, reader in (
        (as_version(record, "/9", sign=False), run),
        (as_version(record, "/9"), "other"),
        (as_version(record, "/0"), run),
    ):
        with pytest.raises(Unusable):
            KINDS["prompts"].read(wrong, run=reader)
