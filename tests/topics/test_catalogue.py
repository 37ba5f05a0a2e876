"""A run's topics are the same for everybody, and every setting is one a broker takes."""

import pytest

from penstock.topics import groups
from penstock.topics.catalogue import (
    CONTROL,
    DELETED_SEGMENT_BYTES,
    KEPT_SEGMENT_BYTES,
    MAX_RECORD_BYTES,
    RUNS_SPEC,
    RUNS_TOPIC,
    STATE,
    TOPICS,
    check_run_id,
    topic_name,
    topics_of,
)


def test_a_run_owns_fifteen_topics_in_a_fixed_order_under_its_own_prefix():
    specs = topics_of("demo-1", partitions=8)
    assert list(specs) == [f"demo-1.{topic}" for topic in (*TOPICS, *CONTROL, STATE)]
    assert all(name == spec.name for name, spec in specs.items())
    assert [spec.partitions for spec in specs.values()] == [1, 8, 8, 8, 3, 1, 1, 1, *[1] * len(CONTROL), 1]
    assert sum(spec.partitions for spec in specs.values()) == 38
    assert topic_name("demo-1", "groups") in specs


def test_nothing_that_flows_in_a_run_is_ever_deleted_or_compacted_by_the_broker():
    specs = topics_of("r", partitions=1)
    assert {specs.pop(f"r.{topic}").configs["cleanup.policy"] for topic in (*CONTROL, STATE)} == {"compact"}
    for spec in specs.values():
        assert (spec.configs["cleanup.policy"], spec.configs["retention.ms"], spec.configs["retention.bytes"]) == ("delete", "-1", "-1")


def test_a_segment_holds_the_largest_record_and_a_dead_letter_any_other_record():
    specs = topics_of("r", partitions=1)
    assert specs["r.weights"].configs["segment.bytes"] == str(KEPT_SEGMENT_BYTES)
    short = topics_of("r", partitions=1, weight_segment_bytes=DELETED_SEGMENT_BYTES)["r.weights"].configs
    deleted = topics_of("r", partitions=1, sample_segment_bytes=DELETED_SEGMENT_BYTES)
    assert {name for name, spec in deleted.items() if spec.configs != specs[name].configs} == {"r.prompts", "r.rollouts", "r.groups"}
    assert int(deleted["r.groups"].configs["max.message.bytes"]) <= int(deleted["r.groups"].configs["segment.bytes"])
    assert int(specs["r.weights"].configs["max.message.bytes"]) <= int(short["segment.bytes"]) < KEPT_SEGMENT_BYTES
    assert int(specs["r.dead-letters"].configs["max.message.bytes"]) > MAX_RECORD_BYTES + (1 << 20)
    assert groups.MAX_PART_BYTES * 2 <= MAX_RECORD_BYTES


def test_two_runs_share_no_settings_object():
    first, second = topics_of("a", partitions=1), topics_of("b", partitions=1)
    first["a.weights"].configs["segment.bytes"] = "1"
    assert second["b.weights"].configs["segment.bytes"] != "1"
    assert first["a.ledger"].configs is not first["a.metrics"].configs


def test_the_topic_of_all_runs_is_compacted():
    assert (RUNS_SPEC.name, RUNS_SPEC.partitions, RUNS_SPEC.configs["cleanup.policy"]) == (RUNS_TOPIC, 1, "compact")


@pytest.mark.parametrize("run", ["", "A", "a.b", "a" * 65, "a\n", "ä", "a_b", "-rf", "--yes", "-", "latest", "nul\0", "~", "a/b"])
def test_a_run_id_that_cannot_be_a_prefix_is_refused(run):
    with pytest.raises(ValueError, match="run id"):
        topics_of(run, partitions=1)


def test_a_run_id_is_up_to_64_small_letters_digits_and_dashes():
    assert check_run_id("a-0" + "z" * 61) == "a-0" + "z" * 61
    for run in ("0", "latest-1", "not-latest", "a-", "con"):
        assert check_run_id(run) == run


@pytest.mark.parametrize(("partitions", "weight_partitions"), [(0, 2), (1, 1)])
def test_too_few_partitions_are_refused(partitions, weight_partitions):
    with pytest.raises(ValueError, match="at least"):
        topics_of("r", partitions=partitions, weight_partitions=weight_partitions)
