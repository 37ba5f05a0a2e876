"""The reader of a run's topics: what counts, what is passed over, and where a reading ends."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.infra.errors import LogError
from penstock.infra.log import POLL_S, drain
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.inspect.run_view import read_view
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.topic_reader import RunReader, scan
from penstock.topics import dead_letters, groups, rollouts
from penstock.topics.wire.record import Outgoing, Record
from tests.support.a_run import RUN, RecordBuilder, outgoing, with_group
from tests.support.page_records import log_with, write


def letter_about(topic: str, offset: int, *, kind: str) -> Outgoing:
    record = Record(topic=f"{RUN}.{topic}", partition=0, offset=offset, timestamp_ms=0, key=b"0", headers=(), value=b"?")
    letter = dead_letters.from_record(record, kind=kind, reason="three processes died", worker="scorer-0", time_ns=1)
    return outgoing(dead_letters, letter)


def parts_of(built: list[Outgoing]) -> list[Outgoing]:
    """The outcome among a group's records, written as one part for each sample."""
    whole = next(sent for sent in built if sent.topic.endswith(".groups"))
    return with_group(whole, groups.decode(bytes(whole.value)), max_bytes=1)


def outcomes(log: MemoryLog, **how: Any) -> list[tuple[int, list[int], bool]]:
    """(group, offsets of its parts, whether it repeats) of every outcome that can be read."""
    reads = RunReader(log, RUN).groups(**how)
    return [(read.payload.group, [record.offset for record in read.records], read.repeats) for read in reads if read.payload is not None]


def test_of_records_that_say_the_same_the_first_counts() -> None:
    built = RecordBuilder().group([0.0, 1.0], version=0)
    log = log_with([*built, *built])
    reader = RunReader(log, RUN)
    assert [read.record.offset for read in reader.prompts()] == [0]
    assert [(read.payload.sample, read.record.offset) for read in reader.samples() if read.payload] == [(0, 0), (1, 1)]
    assert outcomes(log) == [(0, [0], False)]
    assert [read.repeats for read in reader.samples(repeats=True)] == [False, False, True, True]
    assert outcomes(log, repeats=True) == [(0, [0], False), (0, [1], True)]


def test_each_sample_of_a_record_of_several_counts_on_its_own() -> None:
    built = [sent for sent in RecordBuilder().group([0.0, 0.5, 1.0], version=0) if sent.topic.endswith(".rollouts")]
    drawn = [rollouts.decode(bytes(sent.value)) for sent in built]
    log = log_with([built[1], outgoing(rollouts, *drawn[:2]), built[2], built[0]])
    reads = list(RunReader(log, RUN).samples())
    assert [(read.record.offset, read.payload and read.payload.sample) for read in reads] == [(0, 1), (1, 0), (2, 2)]
    assert [read.headers and (read.headers.sample, read.headers.tokens) for read in reads] == [(1, 3), (0, 3), (2, 3)]
    assert [read.repeats for read in RunReader(log, RUN).samples(repeats=True)] == [False, False, True, False, True]
    view = read_view(RunReader(log, RUN))
    assert view.samples == {0: {0: 3, 1: 3, 2: 3}}


def test_a_record_that_cannot_be_decoded_does_not_count_and_says_why() -> None:
    built = RecordBuilder().group([0.0], version=0)
    (sample,) = [sent for sent in built if sent.topic.endswith(".rollouts")]
    log = log_with([replace(sample, value=sample.value[:40]), sample])
    torn, whole = RunReader(log, RUN).samples()
    assert torn.payload is None and torn.problem is not None and torn.problem.kind == "checksum"
    assert whole.payload is not None and not whole.repeats


def test_a_group_counts_once_all_its_parts_are_here() -> None:
    builder = RecordBuilder()
    first, second = parts_of(builder.group([0.0, 1.0], version=0)), parts_of(builder.group([1.0, 0.0, 1.0], version=0))
    assert len(first) == 2
    log = log_with([first[0], second[0], first[0], second[1]])
    assert outcomes(log) == []
    write(log, [second[2], first[1], *second])
    assert outcomes(log) == [(1, [1, 3, 4], False), (0, [0, 5], False)]
    assert outcomes(log, repeats=True)[2:] == [(1, [6, 7, 8], True)]


def test_parts_that_do_not_follow_each_other_are_never_put_together() -> None:
    builder = RecordBuilder()
    first = parts_of(builder.group([0.0, 1.0], version=0))
    builder.next_group = 0
    other = parts_of(builder.group([1.0, 1.0], version=0))
    log = log_with([first[0], other[1], first[0], first[1]])
    found = [(read.records[-1].offset, read.problem and read.problem.kind) for read in RunReader(log, RUN).groups()]
    assert found == [(1, "mismatch"), (2, "mismatch"), (3, None)]


def test_only_wanted_groups_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = RecordBuilder()
    log = log_with([*builder.group([0.0], version=0), *builder.group([1.0], version=0)])
    decoded: list[int] = []
    original = rollouts.decode_all
    monkeypatch.setattr(rollouts, "decode_all", lambda value: decoded.append(1) or original(value))
    assert [read.payload.group for read in RunReader(log, RUN).samples(only={1}) if read.payload] == [1]
    assert len(decoded) == 1
    assert [read.headers.sample for read in RunReader(log, RUN).samples(decode=False) if read.headers] == [0, 0]
    assert len(decoded) == 1


def test_a_poison_record_is_not_decoded_and_its_outcome_counts_by_its_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    built = RecordBuilder().group([0.0], version=0)
    log = log_with([*built, built[-1], letter_about("groups", 0, kind="poison"), letter_about("rollouts", 0, kind="undecodable")])
    monkeypatch.delattr(groups, "decode_parts")  # whoever decodes an outcome fails
    (killer,) = RunReader(log, RUN).groups()
    assert killer.payload is None and killer.headers is not None
    assert killer.problem is not None and killer.problem.kind == "poison"
    assert [read.payload is not None for read in RunReader(log, RUN).samples()] == [True]  # refused for another reason: it may be tried


def test_the_ledger_is_told_without_repetitions_and_gaps() -> None:
    builder = RecordBuilder()
    opened, version, step = builder.opened(), builder.version(0), builder.step(0, [0, 1], begun_s=0.0)
    builder.seq += 5
    log = log_with([opened, version, version, builder.step(7, [2], begun_s=0.0), step])
    reader, story = RunReader(log, RUN), LedgerState(RUN)
    assert [(entry.seq, entry.kind) for entry in reader.entries()] == [(0, "run-opened"), (1, "version"), (2, "step")]
    assert len(list(reader.history(story))) == 3
    assert (story.last_seq, story.steps) == (2, 1)


def test_letters_about_the_same_record_repeat_the_first() -> None:
    built = [letter_about("groups", offset, kind="undecodable") for offset in (0, 1, 0)]
    assert [read.repeats for read in RunReader(log_with(built), RUN).dead_letters()] == [False, False, True]


def test_everything_is_read_up_to_the_ends_that_the_topics_had_at_the_first_call() -> None:
    builder = RecordBuilder()
    log = log_with(builder.group([0.0], version=0))
    reader = RunReader(log, RUN)
    assert len(list(reader.prompts())) == 1
    write(log, builder.group([1.0], version=0))
    assert [len(list(reads)) for reads in (reader.prompts(), reader.samples(), reader.groups())] == [1, 1, 1]
    assert len(list(RunReader(log, RUN).groups())) == 2


def test_what_is_asked_before_each_batch_may_end_a_reading() -> None:
    def no_more() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        next(RunReader(log_with(RecordBuilder().group([0.0], version=0)), RUN, alive=no_more).prompts())


def test_a_topic_that_does_not_exist_has_no_records() -> None:
    assert list(scan(MemoryLog(), "nothing.prompts")) == []
    assert list(RunReader(MemoryLog(), RUN).samples()) == []


class Tail:
    """A tail that gives a record after some empty polls each time, of a partition with so many records."""

    outage_s = 0.0

    def __init__(self, silences: list[int]) -> None:
        self.silences, self.offset = silences, 0

    def poll(self, timeout_s: float, *, max_records: int = 500) -> list[Record]:
        if self.silences[self.offset] > 0:
            self.silences[self.offset] -= 1
            return []
        self.offset += 1
        return [Record(topic="t", partition=0, offset=self.offset - 1, timestamp_ms=0, key=None, headers=(), value=b"")]

    def position(self, partition: tuple[str, int]) -> int:
        return self.offset


def test_silence_is_limited_and_not_how_long_a_reading_takes() -> None:
    few = int(1.0 / POLL_S) - 1
    patient: Any = Tail([few] * 20)
    assert len(list(drain(patient, {("t", 0): 20}, silence_s=1.0))) == 20
    silent: Any = Tail([0, few + 1])
    with pytest.raises(LogError, match="no record arrived for 1 s, but these partitions were not read to their end: t/0"):
        list(drain(silent, {("t", 0): 2}, silence_s=1.0))
