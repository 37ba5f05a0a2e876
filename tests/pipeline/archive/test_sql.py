"""Questions in SQL read what they name, and that once."""

from contextlib import suppress
from typing import Any

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.archive.layout import KINDS
from penstock.pipeline.archive.sql import ask
from penstock.topics import groups
from tests.support.a_run import RUN, RecordBuilder
from tests.support.page_records import log_with

pytestmark = pytest.mark.costly  # starts processes

STEPS, GROUPS = 3, 8


class InMemory:
    """A run in memory; of the tables of `raw` it only says which were wanted."""

    def __init__(self) -> None:
        self.log: MemoryLog = log_with(RecordBuilder(steps=STEPS).whole())
        self.run, self.wanted = RUN, list[str]()

    def rows(self, name: str) -> Any:
        self.wanted.append(name)
        return KINDS[name].schema.empty_table()


def test_a_question_about_samples_decodes_each_group_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, read = list[int](), groups.read

    def counted(*records: Any, run: str) -> Any:
        found = read(*records, run=run)
        decoded.append(found[1].group)
        return found

    monkeypatch.setattr(groups, "read", counted)
    tables = InMemory()
    answer = ask(tables, "select status, count(*) n, count(reward) rewards from samples group by status order by status").to_pylist()
    assert [tuple(row.values()) for row in answer] == [("filtered", 4, 4), ("trained", 24, 24), ("unused", 4, 4)]
    assert sorted(decoded) == list(range(GROUPS))
    assert tables.wanted == []


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("select count(*) from raw.groups", ["groups"]),
        ("select * from ledger join raw.prompts p on true", ["prompts", "ledger"]),
        ("select * from groups g join Samples s using (group_id)", []),
        ("select 1", []),
        ('select count(*) from "raw" . "groups"', ["groups"]),
        ("select (select count(*) from RAW.Ledger), 'raw' as x", ["ledger"]),
    ],
)
def test_a_table_of_records_is_read_where_it_is_named(query: str, wanted: list[str]) -> None:
    tables = InMemory()
    with suppress(ValueError):  # the tables that it names are read, even if the rows are not
        ask(tables, query)
    assert tables.wanted == wanted
    assert ask(InMemory(), 'select count(*) n from "Groups"').to_pylist() == [{"n": GROUPS}]
