"""A view that forgets what has ended, and one that is read back from the topic `state`, say the same as one that holds everything."""

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.inspect.live import saved_view
from penstock.pipeline.inspect.live.frame import line
from penstock.pipeline.inspect.live.saved_view import ViewWriter, from_json, newest, to_json
from penstock.pipeline.inspect.run_status import group_statuses, status_counts
from penstock.pipeline.inspect.run_view import KEPT, RunView, read_view
from penstock.pipeline.inspect.stall import waiting_for
from penstock.pipeline.inspect.status import WATCHED, standing
from penstock.pipeline.runtime.topic_reader import RunReader
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.internal import state
from penstock.topics.wire.record import Outgoing, Record
from tests.support.a_run import RUN, RecordBuilder, as_records, interleaved
from tests.support.page_records import log_with, write

STEPS = 60
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]


@pytest.fixture(autouse=True)
def forgetting_early(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEPT:
        monkeypatch.setitem(KEPT, name, 24)


@cache
def recorded(seed: int = 0, *, steps: int = STEPS) -> tuple[Record, ...]:
    mixed = interleaved(as_records(RecordBuilder(steps=steps).whole()), seed)
    return tuple(record for record in mixed if not record.topic.endswith(".rollouts"))


def folded(records: Sequence[Record], view: RunView | None = None, *, forgets: bool = False) -> RunView:
    view = RunView(run=RUN) if view is None else view
    for number, record in enumerate(records):
        view.fold(record)
        if forgets and number % 7 == 0:
            view.forget()
    return view


def said(view: RunView) -> object:
    """What people are told of it."""
    now_s = 1_700_001_000.0
    outcomes = Counter(facts.outcome for facts in view.groups.values()) + view.past.outcomes
    numbers = view.progress, view.steps_done, outcomes, view.version, len(view.admitted), view.repeated, waiting_for(view)
    return standing(view, now_s=now_s), line(view, now_s=now_s), numbers


@pytest.mark.parametrize("seed", SEEDS)
def test_a_view_that_forgets_says_what_a_whole_one_says(seed: int) -> None:
    records = recorded(seed)
    for end in (len(records) // 3, len(records) // 2, len(records)):
        whole, forgetful = folded(records[:end]), folded(records[:end], forgets=True)
        assert said(forgetful) == said(whole)
        open_groups = {group: status for group, status in group_statuses(whole).items() if status == "open"}
        assert {group: status for group, status in group_statuses(forgetful).items() if status == "open"} == open_groups


@pytest.mark.parametrize("seed", SEEDS)
def test_a_view_that_was_saved_goes_on_as_if_it_had_not_been(seed: int) -> None:
    records, draw = recorded(seed), random.Random(seed)
    cut = draw.randrange(len(records))
    register = [record for record in records if record.topic in (RUNS_TOPIC, f"{RUN}.run")]
    first = folded(records[:cut], forgets=True)
    restored = folded([*register, *records[cut:]], from_json(RUN, to_json(first)), forgets=True)
    assert said(restored) == said(folded(records))


def test_a_view_that_forgets_holds_no_more_of_a_long_run_than_of_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_view, "REWARDS", 24)
    held = []
    for steps in (40, 120):
        view = folded(recorded(steps=steps), forgets=True)
        assert status_counts(view).total() == len(view.admitted)
        held.append((len(view.steps), len(view.groups), len(view.versions), len(view.stale), len(to_json(view))))
    assert all(long <= 2 * 24 for long in held[1][:4])
    assert held[1][4] < 1.2 * held[0][4]


def test_a_record_that_was_forgotten_changes_nothing_when_it_comes_again() -> None:
    records = recorded()
    view = folded(records, forgets=True)
    before = said(view)
    assert all(view.fold(record) is None for record in records if record.topic not in (RUNS_TOPIC, f"{RUN}.run"))
    assert said(view) == before


def save(log: MemoryLog) -> None:
    """What the tracker does."""
    partitions = [(f"{RUN}.{topic}", 0) for topic in WATCHED]
    ends = log.end_offsets(partitions)
    view = read_view(RunReader(log, RUN), topics=WATCHED)
    view.forget()
    ViewWriter(log, log.producer(), "tracker").write(view, ends)


def look(log: MemoryLog) -> tuple[RunView, int]:
    """The run as `status` sees it, and how many records it took for that."""
    view, since = newest(log, RUN)
    read: list[Record] = []
    return read_view(RunReader(log, RUN), topics=WATCHED, also=lambda _, record: read.append(record), view=view, since=since), len(read)


def test_who_looks_reads_what_came_after_the_newest_saved_view_and_no_more() -> None:
    records = recorded()
    cut = len(records) - 40
    log = log_with(records[:cut])
    save(log)
    write(log, records[cut:])
    view, read = look(log)
    assert said(view) == said(folded(records))
    assert read <= 40 + 4  # and the register


@pytest.mark.parametrize("value", [b"noise", state.encode(state.State(worker="w", positions='{"ledger/0": 3}', view='{"format": 99}'))])
def test_without_a_usable_saved_view_everything_is_read(value: bytes) -> None:
    log = log_with(recorded())
    headers = state.headers(state.State(worker="w", positions="{}", view="{}"), run=RUN).encode(value)
    write(log, [Outgoing(topic=f"{RUN}.state", partition=0, key=state.KEY, headers=headers, value=value)])
    assert said(look(log)[0]) == said(folded(recorded()))


def test_a_saved_view_that_has_seen_what_the_log_has_lost_is_not_used() -> None:
    log = log_with(recorded())
    save(log)
    assert newest(log, RUN)[1]
    log.truncate((f"{RUN}.ledger", 0), 20)
    assert newest(log, RUN) == (RunView(run=RUN), {})
