"""Looking into topics: what is listed, tailed and shown, on the in-memory log and once through the command line on the real broker."""

import json
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Log
from penstock.infra.memory.log import MemoryLog
from penstock.infra.paths import run_directory
from penstock.pipeline import cli
from penstock.pipeline.config.load import ConfigError
from penstock.pipeline.inspect.live.view import LiveView
from penstock.pipeline.inspect.records import browse, runs
from penstock.pipeline.inspect.records.runs import list_runs
from penstock.topics import rollouts, weights
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, TOPICS, topics_of
from penstock.topics.weights import Chunk
from penstock.topics.wire.record import Outgoing
from tests.support.a_run import RUN, RecordBuilder, outgoing, stored
from tests.support.examples import manifest_of
from tests.support.page_records import write
from tests.support.strategies import a_rollout

PARTITIONS = 2


def write_records(log: Log, records: Iterable[Outgoing], *, run: str = RUN) -> None:
    log.create_topics({RUNS_TOPIC: RUNS_SPEC, **topics_of(run, partitions=PARTITIONS)})
    write(log, records)


@pytest.fixture
def log() -> Log:
    made = MemoryLog()
    write_records(made, RecordBuilder(steps=3).whole())
    return made


def foreign(topic: str, value: bytes, *, run: str = RUN) -> Outgoing:
    """A record that no worker of ours would write."""
    return Outgoing(topic=f"{run}.{topic}", partition=1, key=b"\xff", headers=(("run", b"\x01"),), value=value)


def test_the_topics_of_a_run_are_listed_in_the_order_of_a_samples_life(log: Log) -> None:
    rows = browse.list_topics(log, RUN)
    assert tuple(row.topic for row in rows) == TOPICS
    found = {row.topic: (row.partitions, row.offsets) for row in rows}
    assert {row.topic: row.records for row in rows}["weights"] is None
    assert {row.topic: row.records for row in rows}["prompts"] == 8
    assert found["prompts"] == (PARTITIONS, 8)  # two a step, one filtered, one unused
    assert found["ledger"] == (1, 1 + 3 + 4 + 1)  # opened, steps, versions, closed
    assert browse.list_topics(log, "another") == []


def test_runs_are_listed_with_their_steps(log: Log) -> None:
    assert [(row["run"], row["status"], row["steps_done"], row["steps"]) for row in list_runs(log)] == [(RUN, "created", 3, 3)]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (60, "1 min"), (3600, "1 h"), (90000, "1 d")])
def test_an_age_has_one_unit(seconds: float, text: str) -> None:
    assert runs.age(seconds) == text


def test_a_tail_gives_the_newest_records_of_all_partitions_and_ends(log: Log) -> None:
    log.producer().send(foreign("rollouts", b"x"))
    found = list(browse.tail(log, RUN, "rollouts", count=3, follow=False))
    assert len(found) == 3
    assert found[-1].partition == 1
    assert [record.offset for record in found[:-1]] == [30, 31]
    assert list(browse.tail(log, RUN, "rollouts", count=0, follow=False)) == []


def test_a_tail_finds_enough_records_behind_the_markers_of_transactions(log: Log) -> None:
    writer = log.transactions("t")
    for group in range(60):
        writer.commit([Outgoing(topic=f"{RUN}.groups", partition=1, key=None, headers=(), value=b"%d" % group)])
    found = list(browse.tail(log, RUN, "groups", count=40, follow=False))
    assert [record.value for record in found] == [b"%d" % group for group in range(20, 60)]


def test_a_sample_without_a_reward_has_none_in_its_groups_line(log: Log) -> None:
    for record in RecordBuilder(steps=3).group([0.5, None], version=0, outcome="filtered"):
        log.producer().send(record)
    record = next(iter(browse.tail(log, RUN, "groups", count=1, follow=False)))
    assert browse.as_line(record, run=RUN).endswith("  because · 0.5 '5' none '5'")


def test_a_followed_tail_goes_on_with_new_records(log: Log) -> None:
    records = browse.tail(log, RUN, "prompts", count=1, follow=True, wait_s=0.05)
    assert next(records).offset == 7
    log.producer().send(foreign("prompts", b"new"))
    assert next(records).value == b"new"


def test_a_mistyped_topic_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'rollouts'"):
        browse.kafka_topic(RUN, "rolouts")
    assert browse.kafka_topic(RUN, f"{RUN}.groups") == browse.kafka_topic(RUN, "groups") == f"{RUN}.groups"


@pytest.mark.parametrize("topic", [topic for topic in (*TOPICS, RUNS_TOPIC) if topic not in ("weights", "dead-letters")])
def test_a_record_of_each_topic_is_shown_with_headers_and_payload(log: Log, topic: str) -> None:
    found = browse.view(browse.record_at(log, RUN, topic, partition=0, offset=0), run=RUN)
    assert found["unusable"] is None
    assert found["headers"]["run"] == RUN
    page = browse.as_page(found)
    assert all(name in page for name in found["payload"])
    json.dumps(found)


def test_weights_are_shown_without_their_bytes(log: Log) -> None:
    data = bytes(range(256)) * 64
    chunk = Chunk(version=3, index=0, data=data)
    manifest = manifest_of(3, nbytes=len(data), shapes=((64, 64),), chunk_sizes=(len(data),))
    topic, producer = f"{RUN}.weights", log.producer()
    for partition, headers, value in (
        (1, weights.chunk_headers(chunk, run=RUN), weights.encode_chunk(chunk)),
        (0, weights.headers(manifest, run=RUN), weights.encode(manifest)),
    ):
        producer.send(Outgoing(topic=topic, partition=partition, key=b"3", headers=headers.encode(value), value=value)).offset(5.0)
    shown = browse.view(browse.record_at(log, RUN, "weights", partition=1, offset=0), run=RUN)
    assert shown["payload"]["data"].startswith(f"{len(data)} bytes, 0001")
    assert "16384 bytes, chunks: 1" in browse.as_line(browse.record_at(log, RUN, "weights", partition=0, offset=0), run=RUN)


@pytest.mark.parametrize("topic", TOPICS)
@pytest.mark.parametrize("value", [b"", b"\x00" * 5000, b"ARROW1 and then nonsense"], ids=["empty", "zeros", "text"])
def test_a_record_nobody_can_decode_is_shown_with_the_reason(topic: str, value: bytes) -> None:
    record = stored(foreign(topic, value), 7)
    found = browse.view(record, run=RUN)
    assert found["payload"] is None
    assert found["unusable"].startswith("foreign-run: ")
    assert found["key"] == "0xff"
    assert "unusable: foreign-run" in browse.as_page(found)
    assert "UNUSABLE" in browse.as_line(record, run=RUN)
    json.loads(json.dumps(browse.view(record, run=RUN)))


def test_long_lists_are_cut_short_on_a_page_and_whole_in_json(log: Log) -> None:
    write_records(log, RecordBuilder("long-1").group([1.0], version=0, tokens=100), run="long-1")
    found = browse.view(browse.record_at(log, "long-1", "rollouts", partition=0, offset=0), run="long-1")
    assert len(found["payload"]["token_ids"]) == 100
    assert "… 100 in all" in browse.as_page(found)


def test_every_sample_of_a_record_is_shown() -> None:
    samples = a_rollout(sample=0), a_rollout(sample=2, tokens=4, finish="length")
    record = stored(outgoing(rollouts, *samples), 7)
    found = browse.view(record, run=RUN)
    assert [(sample["sample"], len(sample["token_ids"])) for sample in found["payload"]["samples"]] == [(0, 20), (2, 4)]
    assert "samples[1]" in browse.as_page(found)
    assert browse.as_line(record, run=RUN).endswith("  stop after 20 tokens, length after 4 tokens")


def test_a_line_shows_what_was_written_and_how_it_was_judged() -> None:
    _, sample, _, outcome = RecordBuilder(steps=1).group([0.5, 1.0], version=0)

    class Texts:
        def completion(self, ids: list[int]) -> str:
            return f"{len(ids)} words"

    drawn, judged = (browse.as_line(stored(sent, 7), run=RUN, texts=Texts()) for sent in (sample, outcome))  # type: ignore[arg-type]
    assert drawn.endswith("  '3 words' stop after 3 tokens")
    assert judged.endswith("  0.5 '5' 1 '5'")
    assert "crc32" not in drawn + judged
    assert "worker=rollout-0" in drawn


def test_a_run_is_removed_only_when_that_is_said(broker: str, run_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    log = KafkaLog(broker, client_id="test")
    write_records(log, RecordBuilder(run_id, steps=1, created_s=time.time() - 600).whole(), run=run_id)
    folder = run_directory(run_id)
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "weights").write_bytes(b"x" * 100_000)
    (folder / "report.txt").write_text("done", encoding="utf-8")
    removed = ["runs", "rm", run_id, "--bootstrap", broker]
    assert cli.main(removed) == 0
    assert "would be freed; add --yes" in capsys.readouterr().out
    assert log.topics(f"{run_id}.")
    assert cli.main([*removed, "--yes", "--keep-model"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{run_id}: ") and said[0].endswith(" freed")
    assert not log.topics(f"{run_id}.")
    assert [path.name for path in folder.iterdir()] == ["model"]
    assert run_id not in {row["run"] for row in list_runs(log)}
    log.close()


def test_a_followed_status_ends_with_its_run(
    broker: str, run_id: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = KafkaLog(broker, client_id="test")
    records = list(RecordBuilder(run_id, steps=3, created_s=time.time()).whole())
    write_records(log, records[:-6], run=run_id)  # without its end
    shown, poll = threading.Event(), LiveView.poll

    def seen(view: LiveView, timeout_s: float) -> None:
        poll(view, timeout_s)
        if len(view.view.steps) == 3:
            shown.set()

    monkeypatch.setattr(LiveView, "poll", seen)
    with ThreadPoolExecutor(1) as pool:
        ends = pool.submit(lambda: shown.wait(30) and write_records(log, records[-6:], run=run_id))
        assert cli.main(["status", run_id, "-f", "--bootstrap", broker]) == 0
        ends.result(30)
    assert "step 3/3" in capsys.readouterr().out
    assert cli.main(["status", run_id, "-f", "--json", "--bootstrap", broker]) == 2
    assert "--follow and --json cannot be combined" in capsys.readouterr().err
    log.close()


def test_the_command_line_looks_into_the_topics_of_a_real_broker(broker: str, run_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    log = KafkaLog(broker, client_id="test")
    built = RecordBuilder(run_id, steps=3, created_s=time.time()).whole()
    write_records(log, [*built, foreign("prompts", b"junk", run=run_id)], run=run_id)
    log.close()
    at = ["--bootstrap", broker]

    def asked(*words: str) -> str:
        assert cli.main([*words, *at]) == 0
        return capsys.readouterr().out

    rows = {row["topic"]: row for row in json.loads(asked("topics", "list", run_id, "--json"))}
    assert rows["prompts"]["offsets"] == 9
    assert "rollouts" in asked("topics", "list", run_id[:8])
    lines = [json.loads(line) for line in asked("topics", "tail", run_id, "prompts", "-n", "100", "--json").splitlines()]
    assert len(lines) == 9
    assert [line["unusable"] is None for line in lines].count(False) == 1
    assert "'3 4'" in asked("topics", "tail", run_id, "prompts")
    shown = json.loads(asked("topics", "show", run_id, "ledger", "0", "0", "--json"))
    assert shown["payload"]["kind"] == "run-opened"
    assert run_id in {row["run"] for row in json.loads(asked("runs", "--json"))}
    assert run_id in asked("runs")
    state = json.loads(asked("status", run_id, "--json"))
    assert (state["status"], state["steps_done"], state["version"]) == ("finished", 3, 3)
    assert "step 3/3  reward 1.000" in asked("status", run_id, "-f")  # ends by itself, as the run is over
    assert {worker["worker"] for worker in state["workers"]} == {"feeder", "rollout-0", "scorer-0", "trainer", "evaluator"}
    assert run_id in asked("status", run_id)
    report = json.loads(asked("report", run_id, "--json"))
    assert report["groups"]["trained"] == 6
    assert run_id in asked("report", "latest")
    assert cli.main(["topics", "show", run_id, "ledger", "0", "999", *at]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
