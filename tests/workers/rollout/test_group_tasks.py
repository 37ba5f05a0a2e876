"""A rollout worker's groups: the first K samples that end are a group's, and a commit passes only what is acknowledged."""

from penstock.pipeline.runtime import offset_metadata
from penstock.pipeline.runtime.offset_metadata import RolloutOffsetMetadata
from penstock.topics.wire.record import Record
from penstock.workers.rollout.group_tasks import GroupTask, GroupTasks
from tests.support.examples import completion_of, prompt_of

SAMPLES = 3


def record_at(offset: int, *, partition: int = 0) -> Record:
    return Record(topic="t", partition=partition, offset=offset, timestamp_ms=0, key=None, headers=(), value=b"")


class Sent:
    """A record on its way, acknowledged when the test says where it is."""

    at: int | None = None

    def done(self) -> bool:
        return self.at is not None

    def offset(self, timeout_s: float | None = None) -> int:
        assert self.at is not None
        return self.at


def begun(*, oversample: int = 0) -> GroupTask:
    task = GroupTask(prompt_of(0, samples_per_prompt=SAMPLES), partition=0, offset=0)
    task.start(task.to_generate(oversample=oversample))
    return task


def test_of_an_oversampled_group_the_first_samples_that_end_are_kept() -> None:
    task = begun(oversample=2)
    assert task.generating == {0, 1, 2, 3, 4}
    for sample in (4, 1, 3, 0):
        task.take(completion_of(0, sample))
    assert sorted(task.completed) == [1, 3, 4]
    assert (task.needed, task.generating) == (0, {2})


def test_samples_that_others_published_take_the_place_of_the_highest_drawn_ones() -> None:
    task = begun(oversample=2)
    for sample in (0, 3, 4):
        task.take(completion_of(0, sample))
    task.note(1, 10)
    assert sorted(task.completed) == [0, 3]
    task.note(3, 11)
    assert sorted(task.completed) == [0]
    assert task.needed == 0
    task.note(2, 12)
    assert (task.completed, task.done) == ({}, True)


def test_a_sample_that_is_in_the_log_is_not_asked_for_again() -> None:
    task = GroupTask(prompt_of(0, samples_per_prompt=SAMPLES), partition=0, offset=0, published={1: 5})
    assert task.to_generate(oversample=0) == [0, 2]
    task.published |= {0: 6, 2: 7}
    assert task.to_generate(oversample=2) == []


def owned(*, offset: int = 0, groups: int = 3) -> GroupTasks:
    """One partition with some prompts delivered."""
    tasks = GroupTasks()
    tasks.assign(0, offset=offset, inherited_end=0, rollouts_end=0)
    for number in range(groups):
        assert tasks.add(record_at(offset + number), prompt_of(number, samples_per_prompt=SAMPLES))
    return tasks


def note_all(tasks: GroupTasks, group: int, *, first: int) -> None:
    for sample in range(SAMPLES):
        tasks.note(0, group, sample, first + sample)


def test_the_watermark_stops_at_the_first_group_that_is_not_acknowledged() -> None:
    tasks = owned()
    assert tasks.watermarks() == {0: (0, offset_metadata.encode(RolloutOffsetMetadata(0)))}
    note_all(tasks, 1, first=0)
    tasks.caught_up(0, 3)
    assert tasks.watermarks() == {}  # group 0 holds it, whose samples may come anywhere from offset 0 on
    note_all(tasks, 0, first=3)
    tasks.caught_up(0, 6)
    assert tasks.watermarks() == {0: (2, offset_metadata.encode(RolloutOffsetMetadata(6)))}
    assert list(tasks.tasks) == [2]


def test_a_record_that_is_no_prompt_does_not_hold_the_watermark() -> None:
    tasks = owned(groups=0)
    tasks.skip(record_at(4))
    assert tasks.watermarks()[0][0] == 5


def test_samples_that_come_before_their_prompt_are_known_when_it_is_delivered() -> None:
    tasks = owned(groups=0)
    note_all(tasks, 0, first=7)
    assert tasks.watermarks() == {0: (0, offset_metadata.encode(RolloutOffsetMetadata(7)))}
    tasks.add(record_at(0), prompt_of(0, samples_per_prompt=SAMPLES))
    assert tasks.waiting() == []
    assert tasks.watermarks()[0][0] == 1


def test_a_prompt_that_repeats_a_group_is_a_duplicate_and_passed() -> None:
    tasks = owned(groups=1)
    assert not tasks.add(record_at(1), prompt_of(0, samples_per_prompt=SAMPLES))
    note_all(tasks, 0, first=0)
    assert tasks.watermarks()[0][0] == 2
    assert not tasks.add(record_at(2), prompt_of(0, samples_per_prompt=SAMPLES))


def test_only_begun_groups_survive_a_rebalance_and_their_prompts_come_again() -> None:
    tasks = owned(offset=10)
    tasks.tasks[1].start([0, 1, 2])
    tasks.revoke()
    assert [task.group for task in tasks.groups_in_flight()] == [1]
    tasks.assign(0, offset=10, inherited_end=13, rollouts_end=0)
    assert tasks.watermarks()[0][0] == 10  # group 1 was not delivered again yet
    assert [tasks.add(record_at(10 + number), prompt_of(number, samples_per_prompt=SAMPLES)) for number in range(3)] == [True, True, True]
    assert sorted(task.group for task in tasks.waiting()) == [0, 2]
    assert tasks.tasks[0].inherited


def test_an_acknowledged_group_is_finished_and_a_gap_shows_that_others_write_too() -> None:
    tasks, sent = owned(groups=1), [Sent() for _ in range(SAMPLES)]
    task = tasks.tasks[0]
    task.start([0, 1, 2])
    for sample, pending in enumerate(sent):
        task.take(completion_of(0, sample))
        task.send([sample], pending)
    assert (tasks.acknowledge(), task.needed) == (0, 0)
    sent[0].at, sent[1].at = 0, 1
    assert tasks.acknowledge() == 0
    assert (tasks.partitions[0].rollouts_end, tasks.partitions[0].gap) == (2, False)
    sent[2].at = 5
    assert tasks.acknowledge() == 1
    assert (tasks.partitions[0].rollouts_end, tasks.partitions[0].gap) == (2, True)
    assert tasks.groups_in_flight() == []


def test_samples_in_one_record_are_acknowledged_together_and_end_at_one_offset() -> None:
    tasks, together, alone = owned(groups=1), Sent(), Sent()
    task = tasks.tasks[0]
    task.start([0, 1, 2])
    for sample in (0, 2, 1):
        task.take(completion_of(0, sample))
    task.send([0, 2], together)
    task.send([1], alone)
    assert (task.completed, task.sent) == ({}, {0: together, 2: together, 1: alone})
    together.at = 0
    assert (tasks.acknowledge(), task.published, task.sent) == (0, {0: 0, 2: 0}, {1: alone})
    assert (tasks.partitions[0].rollouts_end, tasks.partitions[0].gap) == (1, False)
    alone.at = 1
    assert (tasks.acknowledge(), task.published) == (1, {0: 0, 1: 1, 2: 0})
    assert (tasks.partitions[0].rollouts_end, tasks.partitions[0].gap) == (2, False)
    assert tasks.watermarks() == {0: (1, offset_metadata.encode(RolloutOffsetMetadata(2)))}
