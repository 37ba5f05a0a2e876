"""A restarted trainer reads the end of the ledger, and goes on exactly as one that has read everything."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.log import Partition, Start
from penstock.infra.memory.log import MemoryLog
from penstock.infra.memory.state import MemoryTail
from penstock.pipeline.scheduling.resume_point import ResumePoint, resume_point_of, without_resume_point
from penstock.pipeline.scheduling.rules import Order, preset
from penstock.pipeline.scheduling.step_selector import Candidate, Selector
from penstock.topics.ledger import Entry
from penstock.topics.wire.record import Outgoing, Record
from penstock.workers.trainer.resuming import ResumeOffsets, read_resumed
from tests.support.trainer_alone import config_for, group_of, killed, stopped_after, trained, write_groups, written
from tests.support.worker_set import records_of

OUTCOMES = ("scored", "filtered", "failed", "abandoned")


def candidate(group: int, outcome: str, *, version: int, offset: int) -> Candidate:
    return Candidate(group=group, outcome=outcome, policy_version_min=version, partition=0, offset=offset, sha256="")


@given(
    outcomes=st.permutations(range(12)).flatmap(
        lambda order: st.tuples(*(st.tuples(st.just(n), st.sampled_from(OUTCOMES), st.integers(0, 1)) for n in order))
    ),
    stopped=st.integers(0, 12),
    taken=st.integers(0, 12),
    order=st.sampled_from(["submission", "arrival"]),
)
def test_a_selector_that_resumes_hands_out_the_same_groups_and_counts_the_same_drops(
    outcomes: tuple[tuple[int, str, int], ...], stopped: int, taken: int, order: Order
) -> None:
    schedule = preset("one_step_off", prompts_per_step=2, samples_per_prompt=2, steps_per_version=1, order=order)
    records = [candidate(group, outcome, version=version, offset=at) for at, (group, outcome, version) in enumerate(outcomes)]
    first = Selector(schedule)
    for record in records[:stopped]:
        first.add(record)
    for _ in range(taken):
        first.take(learner_version=1)
    second = Selector(schedule)
    second.resume(below=first.below, settled=first.settled, drops=first.drops_to_resume)
    begin = min((offset for _, offset in first.locations.values()), default=stopped)
    for record in records[begin:stopped]:
        if record.group >= first.below:
            second.add(record)
    ends = []
    for selector in (first, second):
        for record in records[stopped:]:
            selector.add(record)
        rest = iter(lambda chosen=selector: chosen.take(learner_version=2), None)
        ends.append(([one.group for one in rest], selector.drops, selector.below))
    assert ends[0] == ends[1]
    assert len(first.outcomes) <= 12 - first.below


@pytest.mark.usefixtures("checkpoints_at_once")
def test_a_trainer_that_reads_only_the_end_of_the_ledger_ends_in_the_same_run(tiny_model: Path, tmp_path: Path) -> None:
    outcomes, too_old = {3: "filtered", 6: "failed", 9: "filtered"}, (8, 11)
    mixed = [group_of(number, version=0 if number in too_old else 6, outcome=outcomes.get(number, "scored")) for number in range(30)]
    log, config = MemoryLog(), config_for(tiny_model, tmp_path, schedule={"max_lag": 1}, trainer={"checkpoint_dir": str(tmp_path)})
    written(log, "whole", config, mixed)
    plain = trained(log, "whole")
    assert plain["stale"], "the test wants stale groups, too"
    for number, deaths in enumerate((["ledger.step.after:5"], ["ledger.stale.after:1", "ledger.step.before:2"], ["checkpoint.some:2"])):
        written(log, f"end-{number}", config, mixed)
        assert trained(log, f"end-{number}", *deaths) == plain
    step = next(record for record in records_of(log, "end-0.ledger") if record.key == b"step")
    log.producer().send(Outgoing(topic=step.topic, partition=0, key=step.key, headers=step.headers, value=step.value))  # as a broker may
    resumed = read_resumed(log, "end-0", saved=[6, 4])
    assert resumed.resume_point is not None
    assert (resumed.past.first_step, resumed.past.ledger_state.newest_version) == (4, 6)
    assert [entry.step for entry in resumed.past.steps] == [4, 5]
    assert read_resumed(log, "end-0", saved=[1]).past.first_step == 0, "an older checkpoint needs the whole ledger"


class NotingLog(MemoryLog):
    """Notes where the trainer's tails begin, as its thread is called, and the groups that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.restart_offsets: list[Mapping[Partition, Start]] = []
        self.given: list[Record] = []

    def tail(self, starts: Mapping[Partition, Start], **options: Any) -> MemoryTail:
        tail = super().tail(starts, **options)
        if threading.current_thread().name == "trainer":
            self.restart_offsets.append(dict(starts))
            poll = tail.poll

            def noting(*arguments: Any, **named: Any) -> list[Record]:
                records = poll(*arguments, **named)
                self.given += [record for record in records if record.topic.endswith(".groups")]
                return records

            tail.poll = noting  # type: ignore[method-assign]
        return tail


def test_a_restarted_trainer_reads_the_groups_from_the_first_that_has_not_ended(tiny_model: Path, tmp_path: Path) -> None:
    log, run = NotingLog(), "noted"
    config = config_for(tiny_model, tmp_path, trainer={"checkpoint_dir": str(tmp_path)})
    written(log, run, config, [group_of(number, version=6, outcome="filtered" if number == 4 else "scored") for number in range(16)])
    killed(log, run, "ledger.step.after:5")
    assert len(log.given) == 16
    log.restart_offsets.clear()
    log.given.clear()
    assert trained(log, run)["status"] == "finished"
    # Group n stands in partition n % 2 at n // 2; ten were trained in five steps and one was filtered: the first of the others is 11.
    restart_offsets = [begin for tail in log.restart_offsets for (topic, _), begin in sorted(tail.items()) if topic == f"{run}.groups"]
    read = sorted(int(record.key or b"") for record in log.given)
    assert (restart_offsets, read) == ([6, 5], list(range(11, 16)))


@pytest.mark.usefixtures("checkpoints_at_once")
@pytest.mark.parametrize("fault", ["ledger.step.after:5", pytest.param("checkpoint.renamed:2", marks=pytest.mark.slow), None])
def test_a_trainer_needs_no_group_that_ended_before_its_newest_checkpoint(tiny_model: Path, tmp_path: Path, fault: str | None) -> None:
    every = {"checkpoint_dir": str(tmp_path), "checkpoint_every": 2 if fault else 50}
    log, config = MemoryLog(), config_for(tiny_model, tmp_path, trainer=every)
    mixed = [group_of(number, version=6, outcome="filtered" if number in (3, 6) else "scored") for number in range(14)]
    written(log, "whole", config, mixed)
    plain = trained(log, "whole")
    written(log, "short", config, mixed[: 12 if fault else 10])
    if fault is None:  # an orderly stop, which writes a checkpoint
        stopped_after(log, "short", steps=4)
    else:
        killed(log, "short", fault)
    write_groups(log, "short", mixed[12 if fault else 10 :], partitions=2)
    # Group n stands in partition n % 2 at n // 2: with the two that were filtered, four steps took ten.
    log.delete_records({("short.groups", 0): 5, ("short.groups", 1): 5})
    assert {**trained(log, "short"), "groups": plain["groups"]} == plain


def test_details_that_are_no_mark_are_passed_over() -> None:
    places = {"positions": {"groups/0": 7}, "checkpoints": ((4, 9),), "manifests": 2}
    made = ResumePoint(below=3, settled=(5,), drops=1, dropped=2, version=1, rebased=None, **places)  # type: ignore[arg-type]
    entry = Entry(seq=1, kind="step", time_ns=1, step=4, details=made.to_json())
    assert resume_point_of(entry) == made
    for details in (None, "", "{}", "[]", '{"resume": {}}', '{"resume": {"below": 1}}', '{"resume": 3}'):
        assert resume_point_of(Entry(seq=1, kind="step", time_ns=1, details=details)) is None


@given(st.dictionaries(st.text(max_size=5), st.integers(), max_size=3), st.booleans())
def test_an_imported_entry_has_the_other_details_of_the_original_and_no_resume_point(others: dict[str, int], has_one: bool) -> None:
    others.pop("resume", None)
    details = json.dumps({**({"resume": {"below": 1}} if has_one else {}), **others}, separators=(",", ":"))
    assert json.loads(without_resume_point(details) or "") == others
    assert without_resume_point("no JSON") == "no JSON" and without_resume_point(None) is None


def test_places_are_forgotten_below_the_oldest_checkpoint_and_anchor() -> None:
    places = ResumeOffsets(steps={n: 10 * n for n in range(1, 9)}, anchors={n: 5 * n for n in range(9)})
    assert places.checkpoints([8, 6, 4]) == ((8, 80), (6, 60))
    assert min(places.steps) == 6
    assert places.anchor(6) == (5, 25)
    assert min(places.anchors) == 5
