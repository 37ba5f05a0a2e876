"""A whole run through an export: SQL gives the report's rewards, an import on the broker gives the same report, digests and audit."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.infra.errors import Unrecoverable
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Log
from penstock.infra.sandbox import parquet
from penstock.pipeline.archive.archived_log import ArchivedLog, ArchivedSource
from penstock.pipeline.archive.export import Exported, export
from penstock.pipeline.archive.files import find_archive
from penstock.pipeline.archive.import_run import import_run
from penstock.pipeline.archive.layout import KINDS
from penstock.pipeline.archive.sql import ArchivedTables, LiveTables, Tables, ask
from penstock.pipeline.inspect.audit.kafka_reader import KafkaSource
from penstock.pipeline.inspect.audit.report import audit
from penstock.pipeline.inspect.report.summary import collect
from penstock.pipeline.inspect.tables.timeline import timeline
from penstock.pipeline.learner.ledger_history import read_ledger_history, read_planned
from penstock.pipeline.runtime.weights.read import fetch
from penstock.pipeline.scheduling.resume_point import without_resume_point
from tests.support.bare_clients import c_client
from tests.support.recorded_run import RecordedRun


@pytest.fixture(scope="module")
def archive(recorded: RecordedRun, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Exported]:
    directory = tmp_path_factory.mktemp("archive")
    log = KafkaLog(recorded.bootstrap, client_id="test")
    done = export(log, recorded.run, directory)
    log.close()
    return directory, done


def test_nothing_of_a_run_of_our_own_is_kept_twice(archive: tuple[Path, Exported]) -> None:
    directory, done = archive
    found = find_archive(directory)
    assert set(done.rows) == set(KINDS)
    for kind in KINDS.values():
        for partition in found.partitions(kind):
            for table in (parquet.rows(group.path, group.number) for group in found.row_groups(kind, partition)):
                assert [table[name].null_count for name in ("headers", "raw", "problem")] == [len(table)] * 3, kind.name


def same_rewards(tables: Tables, recorded: RecordedRun) -> None:
    report = recorded.report
    ends = "(select sum(reward_trained * samples) / sum(samples) from (select * from steps order by step{} limit 1))"
    query = f"""
        with trained as (select step as trained_at, unnest(groups) as group_id, reward_trained from steps),
        by_step as (
            select trained_at, round(avg(s.reward), 12) as asked, round(any_value(reward_trained), 12) as recorded
            from trained join samples s using (group_id) where s.reward is not null group by trained_at
        ),
        fates as (select status, count(*) as n from groups group by 1)
        select (select list(reward order by version) from rewards) as curve,
            (select list([trained_at, asked, recorded] order by trained_at) from by_step) as by_step,
            {ends.format("")} as first, {ends.format(" desc")} as last,
            (select list({{'status': status, 'n': n}}) from fates) as fates
    """  # in one, as each question is computed in a process of its own
    (found,) = ask(tables, query).to_pylist()
    assert found["curve"] == report["reward"]["curve"]
    assert [step for step, _, _ in found["by_step"]] == list(range(recorded.config.run.steps or 0))
    assert all(asked == trained for _, asked, trained in found["by_step"])
    ended = report["reward_trained"]
    assert (found["first"], found["last"]) == (ended["first"], ended["last"])  # a tenth of eight steps is one
    fates = {row["status"]: row["n"] for row in found["fates"]}
    assert fates == {name: count for name, count in report["groups"].items() if count and name not in ("admitted", "open")}


def test_rewards_asked_in_sql_are_those_of_the_report(recorded: RecordedRun, archive: tuple[Path, Exported], log: KafkaLog) -> None:
    same_rewards(ArchivedTables(ArchivedLog(find_archive(archive[0]))), recorded)
    same_rewards(LiveTables(log, recorded.run), recorded)


def test_the_timeline_holds_what_every_worker_did(recorded: RecordedRun, archive: tuple[Path, Exported], log: KafkaLog) -> None:
    found = timeline(log, recorded.run)
    assert timeline(cast(Log, ArchivedLog(find_archive(archive[0]))), recorded.run) == found
    rows = found.to_pylist()
    for row in rows:
        assert row["started"] <= row["ended"], row
    counts = {what: sum(row["what"] == what for row in rows) for what in set(found["what"].to_pylist())}
    assert counts["rollout"] == recorded.report["samples"]
    assert counts["train"] == recorded.report["steps"] == 8
    assert counts["publish"] == recorded.report["versions"] + 1
    assert counts["checkpoint"] == 2
    assert counts["load"] and counts["start"] >= 4
    for worker in ("rollout-0", "rollout-1"):
        # A rollout worker waits exactly where it draws nothing and loads nothing.
        mine = sorted((row["started"], row["ended"], row["what"]) for row in rows if row["worker"] == worker and row["what"] != "start")
        waits = [(started, ended) for started, ended, what in mine if what == "wait"]
        assert waits
        for began, ended in waits:
            assert not [one for one in mine if one[2] == "rollout" and one[0] < ended and one[1] > began]


def test_an_imported_run_gives_the_same_report_groups_weights_and_audit(
    recorded: RecordedRun, archive: tuple[Path, Exported], log: KafkaLog, run_id: str
) -> None:
    import_run(log, find_archive(archive[0]), becomes=run_id)
    assert {**collect(log, run_id), "run": recorded.run} == collect(log, recorded.run)
    there, here = read_ledger_history(log, recorded.run), read_ledger_history(log, run_id)
    assert [replace(entry, plan=(), previous=None) for entry in here.entries] == [
        replace(entry, plan=(), previous=None, details=without_resume_point(entry.details)) for entry in there.entries
    ]
    for original, entry in zip(there.steps, here.steps, strict=True):
        assert [(planned.group, planned.sha256) for planned in entry.plan] == [(p.group, p.sha256) for p in original.plan]
        assert read_planned(log, run_id, entry.plan) == read_planned(log, recorded.run, original.plan)
    for version, manifest in here.ledger_state.manifests.items():
        assert manifest.digest == there.ledger_state.manifests[version].digest
        fetch(log, here.ledger_state.manifests, version, run=run_id)  # raises for another digest
    archived = audit(ArchivedSource(ArchivedLog(find_archive(archive[0]))))
    assert archived.clean, archived
    judged = audit(KafkaSource(recorded.bootstrap, run_id, settings=c_client(recorded.bootstrap)))
    assert judged.clean, judged


def test_a_planted_token_is_read_and_differs_from_the_plan(
    recorded: RecordedRun, archive: tuple[Path, Exported], log: KafkaLog, run_id: str, tmp_path: Path
) -> None:
    shutil.copytree(archive[0], tmp_path / "planted")
    found = find_archive(tmp_path / "planted")
    entry = read_ledger_history(log, recorded.run).steps[5]
    planned = entry.plan[2]
    for path in found.files(KINDS["groups"], planned.partition):
        table = pq.read_table(path)
        if planned.offset in table["offset"].to_pylist():
            break
    rows = table.to_pylist()
    row = next(row for row in rows if row["offset"] == planned.offset)
    row["samples"][0]["token_ids"][0] ^= 1
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema).replace_schema_metadata(pq.read_metadata(path).metadata), path)
    import_run(log, found, becomes=run_id)
    for step in read_ledger_history(log, run_id).steps:
        if step.step == 5:
            line = rf"group {planned.group} .* the ledger records group {planned.group} \({planned.sha256[:16]}"
            with pytest.raises(Unrecoverable, match=line):
                read_planned(log, run_id, step.plan)
        else:
            read_planned(log, run_id, step.plan)
