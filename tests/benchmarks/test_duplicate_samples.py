"""Copies, needless copies and lost seconds of samples that were generated more than once."""

from benchmarks.support.duplicate_samples import NS, Generated, count


def sample_at(
    offset: int, *, sample: int = 0, worker: str = "rollout-0", started_s: float = 0.0, ended_s: float = 1.0, group: int = 3
) -> Generated:
    """A record of partition 0 that became visible when its sample ended."""
    return Generated(
        partition=0,
        offset=offset,
        group=group,
        sample=sample,
        worker=worker,
        started_ns=int(started_s * NS),
        ended_ns=int(ended_s * NS),
        visible_ms=int(ended_s * 1000),
    )


def test_a_sample_that_was_written_once_costs_nothing() -> None:
    found = count([sample_at(0), sample_at(1, sample=1), sample_at(2, group=4)])
    assert (found.samples, found.copies, found.needless, found.lost_s) == (3, 0, 0, 0.0)


def test_a_copy_started_before_the_sample_was_visible_is_a_copy_and_not_needless() -> None:
    found = count([sample_at(1, worker="rollout-1", started_s=0.5, ended_s=1.5), sample_at(0)])
    assert (found.samples, found.copies, found.needless) == (1, 1, 0)
    assert found.lost_s == 1.0


def test_a_copy_started_after_the_sample_was_visible_is_needless_in_any_order() -> None:
    late = sample_at(7, worker="rollout-1", started_s=1.25, ended_s=2.0)
    assert count([sample_at(0), late]).needless == count([late, sample_at(0)]).needless == 1


def test_a_copy_started_in_the_millisecond_of_the_writing_is_not_needless() -> None:
    assert count([sample_at(0, ended_s=1.0), sample_at(1, worker="rollout-1", started_s=1.0009, ended_s=2.0)]).needless == 0


def test_a_needless_copy_is_explained_by_a_stop_of_either_writer_in_between() -> None:
    records = [sample_at(0), sample_at(1, worker="rollout-1", started_s=9.0, ended_s=10.0)]
    for worker in ("rollout-0", "rollout-1"):
        found = count(records, stops={worker: [(int(0.5 * NS), int(8.5 * NS))]})
        assert (found.needless, found.needless_around_stops) == (0, 1)
    elsewhere = count(records, stops={"rollout-2": [(int(0.5 * NS), int(8.5 * NS))], "rollout-0": [(20 * NS, 28 * NS)]})
    assert (elsewhere.needless, elsewhere.needless_around_stops) == (1, 0)


def test_rows_of_a_group_are_generated_together_and_their_seconds_count_once() -> None:
    first = [sample_at(sample, sample=sample) for sample in range(4)]
    again = [sample_at(10 + sample, sample=sample, worker="rollout-1", started_s=0.5, ended_s=2.0 + sample) for sample in range(4)]
    assert count([*first, *again]).lost_s == 4.5
    useful = sample_at(20, sample=4, worker="rollout-1", started_s=0.5, ended_s=4.0)
    assert count([*first, *again, useful]).lost_s == 1.0  # until then the group had a useful sample
