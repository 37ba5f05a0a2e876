"""Export, import, delete and SQL on the real broker, with a run that is told record by record, gaps of every kind included."""

import io
import json
import random
import re
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from penstock.infra.errors import LogError, RecordMissing
from penstock.infra.kafka.bulk import BulkWriter
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.paths import run_directory
from penstock.infra.sandbox import parquet
from penstock.pipeline.archive import export as exporting
from penstock.pipeline.archive.archived_log import ArchivedLog, ArchivedSource
from penstock.pipeline.archive.delete import delete, plan_deletion
from penstock.pipeline.archive.export import export, follow
from penstock.pipeline.archive.files import UNFINISHED, Archive, find_archive
from penstock.pipeline.archive.import_run import import_run
from penstock.pipeline.archive.layout import KINDS, Kind
from penstock.pipeline.archive.sql import ArchivedTables, LiveTables, ask
from penstock.pipeline.cli import main
from penstock.pipeline.config.load import ConfigError
from penstock.pipeline.inspect.records.runs import Note, note_of
from penstock.pipeline.inspect.report.summary import collect, summarise
from penstock.pipeline.inspect.run_view import load
from penstock.pipeline.inspect.tables.timeline import timeline
from penstock.pipeline.runtime.registration.run_registry import all_runs, find
from penstock.pipeline.runtime.topic_reader import scan
from penstock.topics import runs
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, TOPICS, topics_of
from penstock.topics.wire.record import Outgoing, Record
from tests.support.a_run import RecordBuilder
from tests.support.bare_clients import c_client
from tests.support.full_read import FullRead
from tests.support.refusals import one_line

STEPS = 3


def tell(log: KafkaLog, run: str, built: list[Outgoing], *, seed: int = 0) -> None:
    """Write records alone or in transactions, with aborted transactions and strangers' records between them."""
    log.create_topics({RUNS_TOPIC: RUNS_SPEC})
    log.create_topics(topics_of(run, partitions=2))
    rng, producer, transactions = random.Random(seed), log.producer(), log.transactions(f"{run}.test")
    aborting = Producer({**c_client(log.bootstrap), "transactional.id": f"{run}.aborting"})
    aborting.init_transactions()
    left = list(built)
    while left:
        some = [left.pop(0) for _ in range(min(len(left), rng.randint(1, 12)))]
        if some[0].topic == RUNS_TOPIC or rng.random() < 0.5:
            for sent in [producer.send(record) for record in some]:
                sent.offset(30.0)
        else:
            keyless = [replace(record, partition=0, key=None, headers=()) for record in some if record.topic != RUNS_TOPIC]
            transactions.commit([*some, *rng.choices(keyless, k=rng.randint(0, 2))])
        if rng.random() < 0.4:
            aborting.begin_transaction()
            aborting.produce(f"{run}.groups", partition=1, value=b"never")
            aborting.produce(some[-1].topic if some[-1].topic != RUNS_TOPIC else f"{run}.ledger", partition=0, value=b"never")
            aborting.flush()
            aborting.abort_transaction()
    producer.close()
    transactions.close()


def everything(log: KafkaLog | ArchivedLog, run: str) -> dict[str, list[Record]]:
    """All records by place."""
    return {topic: sorted(scan(log, f"{run}.{topic}"), key=lambda r: (r.partition, r.offset)) for topic in TOPICS}  # type: ignore[arg-type]


def deleted(log: KafkaLog, run: str) -> None:
    delete(log, plan_deletion(log, run))
    while log.topics(f"{run}."):
        time.sleep(0.05)


@pytest.fixture(scope="module")
def told(broker: str) -> Iterator[str]:
    """A finished run on the broker, which tests export and do not change."""
    log, run = KafkaLog(broker, client_id="test"), f"t{uuid.uuid4().hex[:10]}"
    tell(log, run, list(RecordBuilder(run, steps=STEPS).whole()))
    yield run
    deleted(log, run)
    log.close()


def test_an_archive_reads_as_the_run_and_an_import_gives_the_same_report(log: KafkaLog, run_id: str, tmp_path: Path) -> None:
    tell(log, run_id, [*RecordBuilder(run_id, steps=STEPS).whole()])
    before, report = everything(log, run_id), collect(log, run_id)
    done = export(log, run_id, tmp_path)
    assert done.rows == {kind: count for kind, count in done.rows.items() if count}
    assert sum(done.rows.values()) - done.rows["runs"] == sum(map(len, before.values()))
    archived = ArchivedLog(find_archive(tmp_path))
    assert everything(archived, run_id) == before
    assert summarise(load(archived, run_id)) == report  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="already exists on this broker"):
        import_run(log, find_archive(tmp_path))
    deleted(log, run_id)
    imported = import_run(log, find_archive(tmp_path / run_id))
    assert imported.records == {topic: len(records) for topic, records in before.items()}
    after = everything(log, run_id)
    for topic in ("prompts", "rollouts", "groups", "metrics"):  # these refer to no offset
        assert [replace(record, offset=0) for record in after[topic]] == [replace(record, offset=0) for record in before[topic]]
    assert collect(log, run_id) == report

    other = f"{run_id}-b"
    import_run(log, find_archive(tmp_path), becomes=other)
    assert {**collect(log, other), "run": run_id} == report
    registered = [record for record in scan(log, RUNS_TOPIC) if record.key == other.encode()]
    assert [runs.read(record, run=other)[1].config for record in registered] == [runs.NOTHING]


def test_an_archive_reads_only_the_row_groups_that_hold_an_offset(
    log: KafkaLog, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.pipeline.archive.files.ROW_GROUP_ROWS", 1)
    monkeypatch.setattr("penstock.infra.kafka.bulk.BLOCK_RECORDS", 1)
    export(log, told, tmp_path)
    archive, taken = find_archive(tmp_path), list[int]()
    whole = parquet.rows

    def noted(path: Path, number: int) -> pa.Table:
        taken.append(number)
        return whole(path, number)

    monkeypatch.setattr(parquet, "rows", noted)
    records = [record for record in everything(log, told)["groups"] if record.partition == 0]
    assert len(list(archive.row_groups(KINDS["groups"], 0))) == len(records) > 3
    wanted = [records[3], records[1]]
    archived = ArchivedLog(archive)
    assert archived.read(f"{told}.groups", 0, [record.offset for record in wanted]) == wanted
    assert taken == [1, 3]
    assert archived.read(f"{told}.groups", 0, [records[3].offset]) == [records[3]]
    assert taken == [1, 3]
    with pytest.raises(RecordMissing, match=r"groups/0 has no record at offset 9000 in "):
        archived.read(f"{told}.groups", 0, [9000])


def test_an_export_follows_a_run_until_it_is_closed_and_ctrl_c_leaves_an_archive_that_can_be_read(
    log: KafkaLog, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "LEAST_PAUSE_S", 0.5)
    monkeypatch.setattr(exporting, "SETTLE_S", 0.1)
    built = [*RecordBuilder(run_id, steps=STEPS).whole()]
    tell(log, run_id, built[: len(built) // 2])
    rounds = follow(log, run_id, tmp_path)
    assert next(rounds).rows["ledger"]
    assert everything(ArchivedLog(find_archive(tmp_path)), run_id) == everything(log, run_id)
    assert next(rounds).rows == {}
    rounds.close()  # as Ctrl-C does
    assert everything(ArchivedLog(find_archive(tmp_path)), run_id) == everything(log, run_id)
    rounds = follow(log, run_id, tmp_path)
    assert next(rounds).rows == {}
    tell(log, run_id, built[len(built) // 2 :], seed=1)
    assert sum(done.rows.get("ledger", 0) for done in rounds)
    assert everything(ArchivedLog(find_archive(tmp_path)), run_id) == everything(log, run_id)


def test_a_second_export_adds_what_is_new_and_a_third_nothing(log: KafkaLog, run_id: str, tmp_path: Path) -> None:
    built = [*RecordBuilder(run_id, steps=STEPS).whole()]
    tell(log, run_id, built[: len(built) // 2])
    export(log, run_id, tmp_path)
    first = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")}
    tell(log, run_id, built[len(built) // 2 :], seed=1)
    export(log, run_id, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in first} == first
    assert everything(ArchivedLog(find_archive(tmp_path)), run_id) == everything(log, run_id)
    again = export(log, run_id, tmp_path)
    assert (again.rows, again.files) == ({}, 0)


def test_an_export_of_one_topic_says_what_an_import_would_miss(log: KafkaLog, told: str, run_id: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no topic 'rolouts'"):
        export(log, told, tmp_path, topics=["rolouts"])
    assert set(export(log, told, tmp_path, topics=["rollouts"]).rows) == {"runs", "run", "rollouts"}
    with pytest.raises(ValueError, match=r"is incomplete, the topics prompts, groups, .* are missing: repeat `penstock topics export`"):
        import_run(log, find_archive(tmp_path), becomes=f"{run_id}-b")
    export(log, told, tmp_path)
    assert everything(ArchivedLog(find_archive(tmp_path)), told) == everything(log, told)


def test_an_interrupted_export_leaves_whole_files_only_and_the_next_one_completes_it(
    log: KafkaLog, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, kinds = exporting.read_tables, list[str]()

    def interrupted(reader: Any, kind: Kind, partition: int, **between: Any) -> Iterator[tuple[pa.Table, int]]:
        yield from read(reader, kind, partition, **between)
        kinds.append(kind.name)
        if kind.name == "groups":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(exporting, "read_tables", interrupted)
        with pytest.raises(KeyboardInterrupt):
            export(log, told, tmp_path)
    assert not list(tmp_path.rglob(f"*{UNFINISHED}")) and not list(tmp_path.rglob("groups/*/*.parquet"))
    killed = tmp_path / told / "groups" / "partition=0" / f"x.parquet{UNFINISHED}"
    killed.parent.mkdir(parents=True, exist_ok=True)
    killed.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="is incomplete"):
        import_run(log, find_archive(tmp_path), becomes=f"{told}-b")
    assert {name for name, kind in KINDS.items() if Archive(tmp_path, told).partitions(kind)} == set(kinds) - {"groups"} != set()
    export(log, told, tmp_path)
    assert not killed.exists()
    assert everything(ArchivedLog(find_archive(tmp_path)), told) == everything(log, told)


def test_another_run_of_the_same_id_is_not_added_to_an_export(log: KafkaLog, run_id: str, tmp_path: Path) -> None:
    tell(log, run_id, [RecordBuilder(run_id, steps=1).record()])
    export(log, run_id, tmp_path)
    deleted(log, run_id)
    tell(log, run_id, [RecordBuilder(run_id, steps=1, created_s=1_690_000_000.0).record()])
    with pytest.raises(ValueError, match="is the archive of an earlier run"):
        export(log, run_id, tmp_path)


def test_what_an_import_that_was_killed_has_left_is_named_and_can_be_deleted(
    log: KafkaLog, told: str, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, other = everything(log, told), f"{run_id}-b"
    export(log, told, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(BulkWriter, "flush", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            import_run(log, find_archive(tmp_path), becomes=other)
    assert find(log, other) is None
    with pytest.raises(ConfigError, match=f"delete them .penstock topics delete {other} --yes., or import with"):
        import_run(log, find_archive(tmp_path), becomes=other)
    deleted(log, other)
    import_run(log, find_archive(tmp_path), becomes=other)
    assert [len(records) for records in everything(log, other).values()] == [len(records) for records in before.values()]


def remove_below(log: KafkaLog, topic: str, partition: int, offset: int) -> None:
    admin = AdminClient(c_client(log.bootstrap))
    for future in admin.delete_records([TopicPartition(topic, partition, offset)]).values():
        future.result(30)


def test_records_that_were_deleted_are_named_with_the_first_one_that_is_kept(
    log: KafkaLog, broker: str, run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(log, run_id, [*RecordBuilder(run_id, steps=STEPS).whole()])
    topic = f"{run_id}.rollouts"
    offsets = [record.offset for record in scan(log, topic) if record.partition == 0]
    export(log, run_id, tmp_path)
    remove_below(log, topic, 0, offsets[4])
    refusal = rf"^{topic}/0: the records at offsets 0 to 1, .* were deleted, the first existing one is {offsets[4]}$"
    with pytest.raises(LogError, match=refusal):
        log.read(topic, 0, [0, 1, offsets[3], offsets[5]])
    with pytest.raises(LogError, match=rf"{topic}/0 has no committed record at offset 9000"):
        log.read(topic, 0, [offsets[5], 9000])
    assert main(["sql", run_id, "select count(*) n from rollouts", "--json", "--bootstrap", broker]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == [{"n": len(offsets) - 4}]
    first, second = said.err.splitlines()[-2:]
    assert first == "some records were deleted, and the result does not include them:"
    assert second == f"{topic}/0: the records at offsets 0 to {offsets[4] - 1} were deleted"
    assert main(["sql", run_id, "select count(*) n from metrics", "--json", "--bootstrap", broker]) == 0
    assert "deleted" not in capsys.readouterr().err
    # What an export has is not lost, what a new one cannot have an import has not.
    assert export(log, run_id, tmp_path).gone == []
    export(log, run_id, tmp_path / "late")
    other = f"{run_id}-b"
    import_run(log, find_archive(tmp_path / "late"), becomes=other)
    assert [record.offset for record in everything(log, other)["rollouts"] if record.partition == 0] == list(range(len(offsets) - 4))


def test_a_row_of_another_run_in_an_archive_changes_nothing_of_that_run(log: KafkaLog, told: str, run_id: str, tmp_path: Path) -> None:
    victim, other = told, f"{run_id}-b"
    tell(log, run_id, list(RecordBuilder(run_id, steps=1).whole()))
    export(log, run_id, tmp_path)
    (path,) = find_archive(tmp_path).files(KINDS["runs"], 0)
    table = pq.read_table(path)
    record = replace(runs.decode(RecordBuilder(victim, steps=1).record().value), status="failed", updated_ns=2**62)
    value = runs.encode(record)
    crafted = table.slice(0, 1).to_pylist()[0] | {
        "offset": table["offset"][0].as_py() - 1,
        "key": victim.encode(),
        "headers": [{"name": name, "value": text} for name, text in runs.headers(record).encode(value)],
        "raw": value,
        "problem": None,
    }
    pq.write_table(pa.concat_tables([pa.Table.from_pylist([crafted], schema=table.schema), table]), path)
    before, registered = find(log, victim), [r for r in scan(log, RUNS_TOPIC) if r.key == victim.encode()]
    import_run(log, find_archive(tmp_path), becomes=other)
    assert find(log, victim) == before
    assert [r for r in scan(log, RUNS_TOPIC) if r.key == victim.encode()] == registered


def test_an_import_that_is_refused_after_its_first_records_registers_nothing_and_says_what_removes_them(
    log: KafkaLog, told: str, run_id: str, tmp_path: Path
) -> None:
    export(log, told, tmp_path)
    path = find_archive(tmp_path).files(KINDS["groups"], 0)[0]
    pq.write_table(pq.read_table(path).drop_columns(["partition"]), path)
    refusal = rf"'partition' is missing; the run was not registered. .*: penstock topics delete {run_id}-b --yes"
    with pytest.raises(ValueError, match=refusal):
        import_run(log, find_archive(tmp_path), becomes=f"{run_id}-b")
    assert find(log, f"{run_id}-b") is None
    assert log.topics(f"{run_id}-b.")


@pytest.mark.parametrize("count", [10**9, 0, "8", None])
def test_an_archive_that_claims_any_number_of_partitions_is_refused_in_one_line(
    tmp_path: Path, count: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "export.json").write_text(json.dumps({"run": "x", "created_ns": 1, "partitions": {"groups": count}, "format": 1}))
    for command in (["audit", str(tmp_path)], ["report", str(tmp_path)], ["sql", str(tmp_path), "select 1"]):
        assert main(command) != 0
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(f"export.json: partitions of groups is {count!r}, expected 1 to 10000")


def test_what_was_deleted_between_two_exports_is_known_to_the_audit_of_the_archive(log: KafkaLog, run_id: str, tmp_path: Path) -> None:
    built = [*RecordBuilder(run_id, steps=STEPS).whole()]
    tell(log, run_id, built[: len(built) // 2])
    export(log, run_id, tmp_path)
    archive, topic = find_archive(tmp_path), f"{run_id}.rollouts"
    source = ArchivedSource(ArchivedLog(archive))
    assert source.start_offset("rollouts", 0) == 0
    exported = archive.next_offset(KINDS["rollouts"], 0)
    assert exported
    tell(log, run_id, built[len(built) // 2 :], seed=1)
    later = [record.offset for record in scan(log, topic) if record.partition == 0 and record.offset >= exported]
    remove_below(log, topic, 0, later[2])
    (gone,) = export(log, run_id, tmp_path).gone
    assert gone == f"{topic}/0: offsets {exported} to {later[2] - 1} were deleted before they were exported"
    assert source.start_offset("rollouts", 0) == later[2]
    assert source.start_offset("rollouts", 1) == source.start_offset("groups", 0) == 0
    kept = [record.offset for record in ArchivedSource(ArchivedLog(archive)).read("rollouts", [0])]
    assert any(offset < exported for offset in kept) and later[2] in kept


def test_a_run_is_deleted_with_its_record_once_it_is_at_rest(
    log: KafkaLog, broker: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    builder = RecordBuilder(run_id, steps=1, created_s=time.time())
    tell(log, run_id, [builder.record("running"), builder.opened(), builder.measured_by("trainer")])
    done, producer = threading.Event(), log.producer()

    def report() -> None:
        while not done.wait(0.1):
            builder.now_s -= 86_400  # nobody's clock is believed
            producer.send(builder.measured_by("trainer"))

    reports = threading.Thread(target=report)
    reports.start()
    with pytest.raises(ValueError, match=f"run {run_id} cannot be deleted while trainer is running: stop the run first"):
        plan_deletion(log, run_id)
    done.set()
    reports.join()
    producer.close()
    tell(log, run_id, [builder.measured_by("trainer", "final")])
    found = plan_deletion(log, run_id)
    assert found.offsets[f"{run_id}.metrics"] > 1
    folder = run_directory(run_id)
    (folder / "logs").mkdir(parents=True)
    assert main(["runs", "note", run_id, "a try", "--name", "baseline", "--tag", "short", "--bootstrap", broker]) == 0
    assert note_of(run_id) == Note(name="baseline", text="a try", tags=("short",))
    assert main(["runs", "--bootstrap", broker]) == 0
    assert re.search(rf"{run_id} +baseline .* short +a try", capsys.readouterr().out)
    command = ["topics", "delete", run_id, "--bootstrap", broker]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert f"{run_id}.metrics" in shown and f"{folder}: the run's directory would be deleted" in shown and "nothing was deleted" in shown
    assert find(log, run_id) is not None and folder.is_dir()
    assert main([*command, "--yes"]) == 0
    assert run_id not in [record.run for record in all_runs(log)] and not folder.exists()
    with pytest.raises(ValueError, match=f"no run '{run_id}' on this broker"):
        plan_deletion(log, run_id)


@pytest.mark.slow
def test_views_say_what_the_tables_and_the_report_say_live_and_archived(log: KafkaLog, run_id: str, tmp_path: Path) -> None:
    built = [*RecordBuilder(run_id, steps=STEPS).whole()]
    again = next(record for record in built if record.topic.endswith(".rollouts"))
    tell(log, run_id, [*built, again, replace(again, headers=(("run", b"other"),), value=b"?")])
    export(log, run_id, tmp_path)
    report = collect(log, run_id)
    live = LiveTables(log, run_id)
    for tables in (live, ArchivedTables(ArchivedLog(find_archive(tmp_path)))):
        for name, table, order in (
            ("samples", FullRead(log, run_id).samples(), "group_id, sample"),
            ("groups", FullRead(log, run_id).groups(), "group_id"),
            ("steps", FullRead(log, run_id).steps(), "step"),
        ):
            found = ask(tables, f"select * from {name} order by {order}")
            for column in table.column_names:
                if not pa.types.is_timestamp(table.schema.field(column).type):
                    asked = "group_id" if column == "group" else column  # which is a word of SQL
                    assert found[asked].to_pylist() == table[column].to_pylist(), column
        assert ask(tables, "select reward from rewards order by version")["reward"].to_pylist() == report["reward"]["curve"]
        assert ask(tables, "select * from timeline").num_rows == timeline(log, run_id).num_rows
        assert ask(tables, "select count(*) n, max(lag) m, min(age_s) a from lag").to_pylist() == [{"n": 8 * STEPS, "m": 0, "a": 1.0}]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("select * from sampels", 'Did you mean "samples"'),
        ("select 1; select 2", "one read-only statement"),
        ("select * from read_text('/etc/passwd')", "file system operations are disabled"),
        pytest.param("select rewrd from samples", 'Candidate bindings: "reward"', marks=pytest.mark.slow),
        pytest.param("selec 1", "syntax error", marks=pytest.mark.slow),
    ],
)
def test_a_question_that_cannot_be_answered_is_one_line(log: KafkaLog, run_id: str, query: str, message: str) -> None:
    with one_line(ValueError, match=message):
        ask(LiveTables(log, run_id), query)


def test_the_commands_export_import_and_answer_with_tables_json_and_csv(
    log: KafkaLog, broker: str, told: str, run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["topics", "export", told, str(tmp_path), "--bootstrap", broker, "--topics", "ledger,groups"]) == 0
    assert f"{tmp_path / told}: 1 runs, " in capsys.readouterr().out
    assert main(["topics", "import", str(tmp_path), "--bootstrap", broker]) == 1
    assert "is incomplete" in capsys.readouterr().err
    assert main(["topics", "export", told, str(tmp_path), "--bootstrap", broker, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"]["rollouts"] == len(everything(log, told)["rollouts"])
    assert main(["topics", "import", str(tmp_path), "--bootstrap", broker]) == 2
    assert main(["topics", "import", str(tmp_path), "--run-id", f"{run_id}-b", "--bootstrap", broker]) == 0
    assert f"run {run_id}-b: " in capsys.readouterr().out
    assert {**collect(log, f"{run_id}-b"), "run": told} == collect(log, told)

    def printed(*words: str) -> str:
        main(["sql", str(tmp_path), *words])
        found = capsys.readouterr()
        return found.out + found.err

    monkeypatch.setattr("sys.stdin", io.StringIO("select step, groups from steps"))
    assert json.loads(printed("-", "--json")) == [{"step": step, "groups": [2 * step + 1, 2 * step + 2]} for step in range(STEPS)]
    assert printed("select step, loss from steps limit 2", "--csv") == "step,loss\n0,1.0\n1,0.5\n"
    assert "0.3333" in printed("select loss from steps")
    columns = "samples: group_id BIGINT, sample BIGINT, step BIGINT, status VARCHAR, prompt VARCHAR, answer VARCHAR"
    assert columns in " ".join(printed().split())
    assert printed("select nothing from steps").startswith("penstock: Binder Error")
    listed = [row["name"] for row in json.loads(printed("show tables", "--json"))]
    assert {"samples", "groups", "steps", "turns", "lag", "ledger"} <= set(listed)
    assert not [name for name in listed if name.startswith("_")]


def test_a_table_of_every_topic_is_named(tmp_path: Path) -> None:
    assert {kind.topic for kind in KINDS.values()} == {RUNS_TOPIC, *TOPICS}
    with pytest.raises(ValueError, match="is not an export"):
        find_archive(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        find_archive(tmp_path / "mistyped")
    assert Archive(tmp_path, "x").note() is None
