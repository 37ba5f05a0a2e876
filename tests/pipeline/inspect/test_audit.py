"""The audit's own parts: what it imports, how it reads a broker, how it recomputes a digest, how it states the rules."""

import gc
import hashlib
import json
import subprocess
import sys
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from confluent_kafka import Producer
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.checkpoints import State
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.tensors import stream
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.inspect.audit import chunk_digests, facts
from penstock.pipeline.inspect.audit.facts import of_folder
from penstock.pipeline.inspect.audit.kafka_reader import KafkaSource
from penstock.pipeline.inspect.audit.report import Audit, as_table, as_text, audit, summary
from penstock.pipeline.inspect.audit.rules import LAG_OF_MODE, oldest_trained, terms_of
from penstock.pipeline.inspect.audit.source import Unreadable
from penstock.pipeline.inspect.metrics import Line
from penstock.pipeline.scheduling import rules
from penstock.pipeline.scheduling.rules import MODES, preset
from penstock.topics import groups, rollouts, weights
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, topics_of
from penstock.topics.weights import Chunk, Manifest
from penstock.topics.wire.record import Outgoing, Record
from penstock.workers.tracker.metrics_file import MetricsFile
from tests.support.a_run import RUN, RecordBuilder, as_records, outgoing, stored
from tests.support.bare_clients import c_client
from tests.support.listed_records import Listed
from tests.support.page_records import write
from tests.support.paths import ROOT
from tests.support.strategies import a_rollout


def test_a_full_temporary_folder_is_one_line_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "SCHEMA", f"PRAGMA max_page_count = 12; {facts.SCHEMA}")
    refusal = r"cannot write a temporary file \(database or disk is full\): set TMPDIR to a directory with more space$"
    with pytest.raises(Unreadable, match=refusal):
        audit(Listed(RUN, a_story()))


def test_the_audit_imports_nothing_of_ours_but_topics_and_no_client_that_a_worker_uses() -> None:
    code = """
import importlib, pkgutil, sys
import penstock.pipeline.inspect.audit
for found in pkgutil.walk_packages(penstock.pipeline.inspect.audit.__path__, "penstock.pipeline.inspect.audit."):
    importlib.import_module(found.name)
from penstock.pipeline.inspect.audit import report
assert report.all_checks()
ours = [name for name in sys.modules if name.split(".")[0] in ("penstock", "kafka")]
allowed = ("penstock.pipeline.inspect.audit.", "penstock.topics.")
parents = ("penstock", "penstock.pipeline", "penstock.pipeline.inspect")
print(*[name for name in ours if name not in parents and not (name + ".").startswith(allowed)])
assert "confluent_kafka" in sys.modules and "penstock.topics.groups" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_a_broker_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.pipeline.inspect.audit.kafka_reader.RESPONSE_S", 1.0)
    with pytest.raises(Unreadable, match=r"cannot read 127\.0\.0\.1:1"):
        KafkaSource("127.0.0.1:1", "any")


@pytest.fixture
def run(broker: str, run_id: str) -> str:
    log = KafkaLog(broker, client_id="test")
    log.create_topics({RUNS_TOPIC: RUNS_SPEC, **topics_of(run_id, partitions=3)})
    log.close()
    return run_id


def test_a_run_whose_topics_are_gone_is_told_apart_from_a_clean_one(broker: str, run: str) -> None:
    with pytest.raises(Unreadable, match=r"run nowhere cannot be audited: topic 'nowhere\."):
        KafkaSource(broker, "nowhere", settings=c_client(broker))
    with pytest.raises(Unreadable, match="neither its registration nor its ledger"):
        audit(KafkaSource(broker, run, settings=c_client(broker)))


def test_what_a_transaction_has_not_committed_is_not_read_and_holds_nobody_up(broker: str, run: str) -> None:
    topic = f"{run}.groups"
    plain = Producer(c_client(broker))
    for number in range(5):
        plain.produce(topic, b"plain %d" % number, partition=number % 3, headers=[("run", b"r"), ("none", None)])
    assert plain.flush(30) == 0
    writer = Producer({**c_client(broker), "transactional.id": f"{run}.test"})
    writer.init_transactions(30)
    for end in ("commit", "abort", "leave open"):
        writer.begin_transaction()
        for number in range(6):
            writer.produce(topic, f"{end} {number}".encode(), partition=number % 3, key=b"k")
        assert writer.flush(30) == 0
        if end == "commit":
            writer.commit_transaction(30)
        elif end == "abort":
            writer.abort_transaction(30)
    source = KafkaSource(broker, run, settings=c_client(broker))
    plain.produce(topic, b"later", partition=0)
    assert plain.flush(30) == 0
    found = list(source.read("groups"))
    assert sorted(record.value for record in found) == sorted([b"plain %d" % n for n in range(5)] + [b"commit %d" % n for n in range(6)])
    assert {record.headers for record in found if record.value.startswith(b"plain")} == {(("run", b"r"), ("none", None))}
    for partition in range(3):
        offsets = [record.offset for record in found if record.partition == partition]
        assert offsets == sorted(offsets)
        assert [record.offset for record in source.read("groups", [partition])] == offsets
    writer.abort_transaction(30)
    del plain, writer


def test_the_foreign_reader_and_ours_deliver_the_same_records(broker: str, run: str) -> None:
    log = KafkaLog(broker, client_id="test")
    write(log, RecordBuilder(run, steps=3).whole())
    tail = log.tail({(f"{run}.{topic}", 0): "earliest" for topic in ("prompts", "rollouts", "groups", "ledger", "metrics")})
    ours = {(record.topic, record.partition, record.offset): record for record in tail.read_to_end(30.0)}
    tail.close()
    log.close()
    source = KafkaSource(broker, run, settings=c_client(broker))
    found = [record for topic in ("prompts", "rollouts", "groups", "ledger", "metrics") for record in source.read(topic)]
    assert {(record.topic, record.partition, record.offset): record for record in found} == ours
    assert ours


def test_what_was_deleted_on_a_broker_is_no_loss_and_what_lies_behind_it_is_judged(broker: str, run: str) -> None:
    log, builder, lost = KafkaLog(broker, client_id="test"), RecordBuilder(run, config=a_teller().config), 4
    built = [builder.made(), builder.opened(), *(record for _ in range(6) for record in builder.group([0.0, 1.0] * 2, version=0))]
    write(log, [record for record in built if not (record.topic.endswith(".prompts") and record.key == b"%d" % lost)])
    log.delete_records({(f"{run}.prompts", 0): 2, (f"{run}.rollouts", 0): 8})
    found = audit(KafkaSource(broker, run, settings=c_client(broker)))
    assert as_table(found)["deleted_below"] == {"prompts/0": 2, "rollouts/0": 8}
    assert accused(found, "prompt-numbers", "one-status", "group-samples") == {lost}, as_text(found)
    log.delete_records({(f"{run}.prompts", 0): 5})
    assert accused(audit(KafkaSource(broker, run, settings=c_client(broker))), "prompt-numbers", "one-status", "group-samples") == set()
    log.close()


def accused(found: Audit, *checks: str) -> set[int | None]:
    """The groups of which these checks report something."""
    return {violation.group for result in found.results if result.check.name in checks for violation in result.violations}


# --- digests -----------------------------------------------------------------------------------------------------------------------


@st.composite
def a_model(draw: st.DrawFn) -> list[TensorBytes]:
    names = draw(st.lists(st.text("abé.", min_size=1, max_size=4), min_size=1, max_size=5, unique=True))
    found = []
    for name in names:
        dtype = draw(st.sampled_from(["float32", "bfloat16", "int8", "bool", "float8_e4m3fn", "float64"]))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        size = stream.expected_nbytes(dtype, shape)
        found.append(TensorBytes(name=name, dtype=dtype, shape=shape, data=draw(st.binary(min_size=size, max_size=size))))
    return found


def published(model: list[TensorBytes], *, chunk_bytes: int, partitions: int, tree: bool) -> tuple[Manifest, list[Record]]:
    """A manifest and its chunks, dealt to partitions 1 to `partitions` in turn behind a chunk that belongs to nobody."""
    ordered = sorted(model, key=lambda tensor: tensor.name)
    whole = b"".join(bytes(tensor.data) for tensor in ordered)
    chunks = [whole[start : start + chunk_bytes] for start in range(0, len(whole), chunk_bytes)]
    places = [(1 + index % partitions, 1 + index // partitions) for index in range(len(chunks))]
    records = [_chunk_record(Chunk(version=9, index=0, data=b"x"), partition, 0) for partition in range(1, partitions + 1)]
    records += [_chunk_record(Chunk(version=0, index=i, data=data), *places[i]) for i, data in enumerate(chunks)]
    manifest = Manifest(
        version=0,
        step=0,
        encoding="full",
        base_version=None,
        digest=stream.digest(model, "blake3" if tree else "sha256"),
        nbytes=sum(map(len, chunks)),
        names=tuple(tensor.name for tensor in ordered),
        dtypes=tuple(tensor.dtype for tensor in ordered),
        shapes=tuple(tensor.shape for tensor in ordered),
        chunk_partitions=tuple(partition for partition, _ in places),
        chunk_offsets=tuple(offset for _, offset in places),
        chunk_sizes=tuple(map(len, chunks)),
        chunk_sha256=tuple(hashlib.sha256(data).hexdigest() for data in chunks),
        created_ns=1,
    )
    return manifest, records


def _chunk_record(chunk: Chunk, partition: int, offset: int) -> Record:
    value = weights.encode_chunk(chunk)
    headers = weights.chunk_headers(chunk, run=RUN).encode(value)
    return Record(topic=f"{RUN}.weights", partition=partition, offset=offset, timestamp_ms=0, key=b"0", headers=headers, value=value)


def a_story(*more: Record) -> list[Record]:
    """A run that was opened, and more."""
    builder = a_teller()
    return [*as_records([*builder.start(), builder.version(0)]), *more]


def a_teller() -> RecordBuilder:
    """One that says all of the schedule."""
    return RecordBuilder(steps=2, config={"schedule": {**RecordBuilder().config["schedule"], "max_lag": None, "order": "submission"}})


@given(model=a_model(), chunk_bytes=st.integers(1, 40), partitions=st.integers(1, 3), turn=st.integers(0, 10**6), tree=st.booleans())
def test_the_digest_is_recomputed_from_chunks_however_they_were_cut_and_dealt(
    model: list[TensorBytes], chunk_bytes: int, partitions: int, turn: int, tree: bool
) -> None:
    manifest, chunks = published(model, chunk_bytes=chunk_bytes, partitions=partitions, tree=tree)
    found = audit(Listed(RUN, a_story(stored(outgoing(weights, manifest)), *chunks)))
    assert found.facts.recomputed[0].digest == manifest.digest, found.facts.recomputed[0]
    assert as_table(found)["duplicates"] == {"chunks of no manifest": partitions}
    if manifest.nbytes:
        whole = bytearray(b"".join(bytes(tensor.data) for tensor in sorted(model, key=lambda tensor: tensor.name)))
        whole[turn % len(whole)] ^= 1 << turn % 8
        assert chunk_digests.digest(manifest, iter([memoryview(whole)]), tree=tree) != manifest.digest
        with pytest.raises(ValueError, match="lack 1 bytes"):
            chunk_digests.digest(manifest, iter([memoryview(whole)[:-1]]), tree=tree)
    with pytest.raises(ValueError, match="more bytes"):
        chunk_digests.digest(manifest, iter([memoryview(bytes(manifest.nbytes + 1))]), tree=tree)


# --- rules -------------------------------------------------------------------------------------------------------------------------


@given(
    mode=st.sampled_from(sorted(MODES)),
    u=st.integers(1, 9),
    s=st.integers(1, 5),
    max_lag=st.none() | st.integers(0, 4),
    extra=st.integers(0, 6),
    slot=st.integers(0, 500),
    steps=st.integers(1, 60),
    done=st.integers(0, 60),
)
def test_the_rules_stated_anew_are_those_that_the_workers_apply(
    mode: str, u: int, s: int, max_lag: int | None, extra: int, slot: int, steps: int, done: int
) -> None:
    said = {"mode": mode, "prompts_per_step": u, "samples_per_prompt": 2, "steps_per_version": s, "max_lag": max_lag, "order": "arrival"}
    terms = terms_of({"schedule": said | {"oversample_groups": extra}}, {"steps": steps})
    chosen = preset(mode, prompts_per_step=u, samples_per_prompt=2, steps_per_version=s, max_lag=max_lag, oversample_groups=extra)
    assert terms.max_lag == chosen.max_lag
    assert terms.min_version(slot) == rules.min_version(chosen, slot=slot, newest_version=10**6)
    assert terms.learner_version(done) == rules.version_after(done, steps_per_version=s)
    assert terms.step_of(rules.versions_of(steps, steps_per_version=s)) == steps
    for newest in range(5):
        limit = rules.admission_limit(chosen, newest_version=newest, dropped=0, steps=10**6)
        assert (slot < limit) == (terms.needed_version(slot) <= newest)
        if slot < limit:
            assert max(0, terms.needed_version(slot)) <= rules.min_version(chosen, slot=slot, newest_version=newest)
    if done <= steps:
        out = [step for step in range(done) if rules.publishes(step, steps=steps, steps_per_version=s)]
        assert terms.newest_version(done) == len(out)
        assert [terms.step_of(version) for version in range(1, len(out) + 1)] == [step + 1 for step in out]


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.booleans(), max_size=4)), min_size=1, max_size=4), st.integers(1, 3))
def test_the_oldest_trained_version_is_stated_anew(spans: list[tuple[int, list[bool]]], copies: int) -> None:
    sizes = [len(mask) for _, mask in spans]
    fields = {
        "span_versions": np.array([version for version, _ in spans], np.int32),
        "span_starts": np.cumsum([0, *sizes[:-1]]).astype(np.int32),
        "loss_mask": np.array([bit for _, mask in spans for bit in mask], np.bool_),
        "token_ids": np.zeros(sum(sizes), np.int32),
        "behaviour_logprobs": np.zeros(sum(sizes), np.float32),
    }
    rollout = replace(a_rollout(), **fields)
    untrained = replace(rollout, loss_mask=np.zeros(sum(sizes), np.bool_), span_versions=np.zeros(len(spans), np.int32))
    assert oldest_trained([rollout]) == rollout.version_min
    assert oldest_trained([rollout] * copies + [untrained]) == groups.version_min([rollout] * copies + [untrained])
    assert oldest_trained([]) is None


def test_the_audit_finds_what_was_trained_too_old_although_its_headers_call_it_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "version_min", lambda rollouts: 1 if rollouts else None)
    builder = a_teller()
    built = [*builder.start(), builder.version(0)]
    for step in range(2):
        built += [*builder.group([0.0, 1.0, 0.0, 1.0], version=0), *builder.group([0.0, 1.0, 0.0, 1.0], version=0)]
        built += [builder.step(step, [2 * step, 2 * step + 1], begun_s=builder.now_s), builder.version(step + 1)]
    records = as_records(built)
    assert {groups.check(record, run=RUN).policy_version_min for record in records if record.topic.endswith(".groups")} == {1}
    found = {result.check.name: result.violations for result in audit(Listed(RUN, records)).results}
    assert [(one.group, one.version) for one in found["lag"]] == [(2, 0), (3, 0)]


def test_a_run_folder_says_how_far_the_ledger_had_come(tmp_path: Path) -> None:
    assert of_folder(tmp_path / "nowhere") == []
    (tmp_path / "checkpoints" / "step-00000006").mkdir(parents=True)
    state = State(run=RUN, steps=6, version=3, digest="d", seq=20)
    (tmp_path / "checkpoints" / "step-00000006" / "state.json").write_text(json.dumps(asdict(state)))
    (tmp_path / "checkpoints" / ".aside-x").mkdir()
    points = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(8):
        points.write(Line(source="ledger", number=step, kind="step", timestamp_ms=1, step=step, values={"train/loss": 0.0}))
    points.write(Line(source="metrics", number=0, kind="status", timestamp_ms=1, step=400, values={"system/x": 0.0}))
    points.flush()
    points.close()
    anchors = of_folder(tmp_path)
    assert [(anchor.name, anchor.steps) for anchor in anchors] == [("checkpoint step-00000006", 6), ("metrics.jsonl", 8)]
    found = audit(Listed(RUN, a_story()), anchors)
    assert "the ledger ends after 0 steps, but metrics.jsonl shows 8: the last entries are missing" in as_text(found)


def test_every_mode_has_its_lag_stated_anew() -> None:
    assert {name: mode.max_lag for name, mode in MODES.items()} == LAG_OF_MODE


@pytest.mark.parametrize("config", [{}, {"schedule": {"mode": "pipelined"}}, {"schedule": 3}])
def test_a_configuration_that_says_nothing_cannot_be_judged(config: Any) -> None:
    with pytest.raises(Unreadable, match="lacks"):
        terms_of(config, {"steps": 1})


# --- text --------------------------------------------------------------------------------------------------------------------------


def test_a_check_with_many_violations_shows_five_with_coordinates_and_counts_the_rest() -> None:
    records = a_story()
    entry = records[-1]
    records += [replace(entry, offset=entry.offset + number) for number in range(1, 3)]
    found = audit(Listed(RUN, records))
    assert as_table(found)["duplicates"] == {"ledger": 2}
    assert not found.clean  # version 0 has an entry and no manifest
    assert "version 0, ledger/0/1: version 0 has a ledger entry but no manifest" in as_text(found)
    counts = "1 violation, 0 groups, 0 steps, 0 versions, 2 duplicates, 0 dead letters, 0 groups open, the run is active"
    assert summary(found) == f"audit: {counts}"
    again = replace(found, results=tuple(replace(result, violations=result.violations * 7) for result in found.results))
    shown = as_text(again).splitlines()
    assert sum("no manifest" in line for line in shown) == 5
    assert "    and 2 more; --json lists them" in shown


def test_what_is_kept_of_a_sample_does_not_grow_with_its_tokens() -> None:
    assert abs(kept(groups=8, tokens=512) - kept(groups=8, tokens=4)) < 5000


def test_a_group_of_eight_samples_leaves_less_than_a_kilobyte() -> None:
    few, more = 5, 20
    assert (kept(groups=more) - kept(groups=few)) / (more - few) < 1000


def kept(*, groups: int, tokens: int = 4) -> int:
    """Bytes that are left allocated when a run of groups of eight samples was audited."""
    builder = RecordBuilder(steps=2, config={"schedule": {**a_teller().config["schedule"], "samples_per_prompt": 8}})
    built = builder.start()
    for _ in range(groups):
        prompt, *samples, outcome = builder.group([1.0, 0.0] * 4, version=0, tokens=tokens)
        built += [prompt, in_one(samples), outcome]
    source = Listed(RUN, as_records(built))
    gc.collect()
    tracemalloc.start()
    found = audit(source).facts
    gc.collect()
    own = [tracemalloc.Filter(inclusive=True, filename_pattern=f"*/{folder}/*") for folder in ("pipeline/inspect/audit", "topics")]
    held = tracemalloc.take_snapshot().filter_traces(own)  # without what other threads have allocated
    tracemalloc.stop()
    assert found.value("SELECT count(*) FROM samples") == 8 * groups
    return sum(trace.size for trace in held.traces)


def in_one(samples: list[Outgoing]) -> Outgoing:
    """The record of all samples of a group."""
    return outgoing(rollouts, *(rollouts.decode(sample.value) for sample in samples), key=samples[0].key)
