"""Headers are checked before payloads are opened, and both must tell the same."""

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.topics import dead_letters, groups, rollouts, runs, weights
from penstock.topics.rollouts import Turn, reward_of
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.headers import Headers
from tests.support.strategies import EXAMPLES, MODULES, a_group, a_prompt, a_rollout, group_records, record_of, refused

NAMES = sorted(MODULES)


def written(name, **changes):
    module = MODULES[name]
    return record_of(replace(module.headers(EXAMPLES[name], run="r"), **changes), module.encode(EXAMPLES[name]))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read(name):
    headers, found = MODULES[name].read(written(name), run="r")
    assert found == EXAMPLES[name]
    assert headers == MODULES[name].headers(EXAMPLES[name], run="r") == MODULES[name].check(written(name), run="r")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("changes", "kind"), [({"run": "other"}, "foreign-run"), ({"schema": "x/9"}, "schema-version")])
def test_a_record_of_another_run_or_schema_is_refused_before_its_payload_is_decoded(name, changes, kind):
    assert refused(MODULES[name].read, replace(written(name, **changes), value=b"never opened"), run="r").kind == kind


@pytest.mark.parametrize("name", NAMES)
def test_a_record_without_headers_is_refused(name):
    assert refused(MODULES[name].read, replace(written(name), headers=()), run="r").kind == "missing-header"


LIES = [
    ("prompts", {"group": 4}),
    ("prompts", {"policy_version_min": 5}),
    ("rollouts", {"group": 4}),
    ("rollouts", {"sample": 0}),
    ("rollouts", {"policy_version_min": 5}),
    ("rollouts", {"policy_version_max": 6}),
    ("rollouts", {"outcome": "length"}),
    ("rollouts", {"worker": "rollout-1"}),
    ("rollouts", {"tokens": 21}),
    ("calls", {"turn": 3}),
    ("calls", {"sha256": "0" * 64}),
    ("calls", {"policy_version_min": 5}),
    ("replies", {"attempt": 1}),
    ("replies", {"sha256": "0" * 64}),
    ("replies", {"policy_version_max": 9}),
    ("replies", {"outcome": "length"}),
    ("weights", {"policy_version_min": 3}),
    ("ledger", {"outcome": "stale"}),
    ("ledger", {"policy_version_min": 3}),
    ("metrics", {"worker": "scorer-1"}),
    ("metrics", {"outcome": "final"}),
    ("dead-letters", {"outcome": "mismatch"}),
    ("runs", {"outcome": "failed"}),
    ("state", {"worker": "feeder"}),
]


@pytest.mark.parametrize(("name", "lie"), LIES)
def test_a_header_that_contradicts_the_payload_is_a_mismatch(name, lie):
    record = written(name, **lie)
    MODULES[name].check(record, run="r")
    assert refused(MODULES[name].read, record, run="r").kind == "mismatch"


@pytest.mark.parametrize("name", ["rollouts", "ledger", "metrics", "runs"])
def test_an_outcome_nobody_knows_is_a_bad_header(name):
    found = refused(MODULES[name].check, written(name, outcome="what"), run="r")
    assert found.kind == "bad-header" and "expected one of" in str(found)


def test_a_sample_says_its_oldest_and_newest_version_on_its_outside():
    rollout = a_rollout()
    assert (rollout.version_min, rollout.version_max) == (4, 5)
    headers = rollouts.headers(rollout, run="r", attempt=2)
    assert (headers.policy_version_min, headers.policy_version_max, headers.attempt, headers.tokens) == (4, 5, 2, 20)


SEVERAL = tuple(
    a_rollout(sample=number, tokens=tokens, finish=finish) for number, tokens, finish in [(0, 20, "stop"), (2, 4, "length"), (5, 0, "stop")]
)


def of_several(*samples, **changes):
    value = rollouts.encode(*samples)
    return record_of(replace(rollouts.headers(*samples, run="r"), **changes), value)


def test_several_samples_of_a_group_are_one_record_whose_headers_name_each_of_them():
    record = of_several(*SEVERAL)
    headers, found = rollouts.read_all(record, run="r")
    assert found == SEVERAL
    assert dict(record.headers)["sample-tokens"] == b"0:20,2:4,5:0"
    assert headers == rollouts.check(record, run="r") == Headers(
        run="r", schema="rollouts/2", group=3, policy_version_min=4, policy_version_max=5, worker="rollout-0",
        samples=3, tokens=24, sample_tokens=((0, 20), (2, 4), (5, 0)),
    )  # fmt: skip
    assert rollouts.tokens_of(headers) == {0: 20, 2: 4, 5: 0}
    assert len(record.value) < 2 * len(rollouts.encode(SEVERAL[0])) - 3000
    assert "3 samples, expected one" in str(refused(rollouts.read, record, run="r"))


def test_a_record_of_one_sample_is_as_it_always_was():
    record = written("rollouts")
    assert dict(record.headers)["schema"] == b"rollouts/1"
    assert rollouts.read_all(record, run="r")[1] == (EXAMPLES["rollouts"],)
    assert rollouts.tokens_of(rollouts.check(record, run="r")) == {1: 20}


LIES_ABOUT_SEVERAL = [
    {"group": 4}, {"policy_version_min": 5}, {"policy_version_max": 6}, {"outcome": "stop"}, {"worker": "x"}, {"samples": 2},
    {"tokens": 21}, {"sample_tokens": ((0, 20), (2, 5), (5, 0))}, {"sample_tokens": ((0, 20), (2, 4))},
    {"schema": "rollouts/1", "sample": 0},
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES_ABOUT_SEVERAL)
def test_a_header_that_contradicts_one_of_several_samples_is_a_mismatch(lie):
    record = of_several(*SEVERAL, **lie)
    rollouts.check(record, run="r")
    assert refused(rollouts.read_all, record, run="r").kind == "mismatch"


@pytest.mark.parametrize("odd", [{"sample_tokens": ((2, 4), (0, 20), (5, 0))}, {"sample_tokens": ((0, 20), (0, 20))}, {"sample": 0}])
def test_several_samples_that_are_named_twice_or_out_of_order_are_a_bad_header(odd):
    assert refused(rollouts.check, of_several(*SEVERAL, **odd), run="r").kind == "bad-header"


@pytest.mark.parametrize(
    "samples",
    [(), SEVERAL[::-1], (SEVERAL[0], a_rollout(group=4, sample=2)), (SEVERAL[0],) * 2, (SEVERAL[0], replace(SEVERAL[1], worker="x"))],
)
def test_samples_that_do_not_belong_together_are_neither_written_nor_read(samples, monkeypatch):
    with pytest.raises(ValueError, match="sample"):
        rollouts.encode(*samples)
    if samples:
        monkeypatch.setattr("penstock.topics.rollouts._unlike", lambda _: None)
        value = rollouts.encode(*samples)
        monkeypatch.undo()
        with pytest.raises(Unusable):
            rollouts.decode_all(value)


def test_samples_are_cut_into_records_by_number_and_size_and_none_is_lost():
    samples = [a_rollout(sample=number, tokens=100) for number in range(150)]
    cut = list(rollouts.batches(samples))
    assert [len(batch) for batch in cut] == [64, 64, 22]
    assert [sample for batch in cut for sample in batch] == samples
    small = list(rollouts.batches(samples, max_bytes=12_000))
    assert len(small) > 3
    assert max(len(rollouts.encode(*batch)) for batch in small) < 12_000 + len(rollouts.CODEC.schema.serialize()) + 2000
    assert [sample for batch in small for sample in batch] == samples
    assert [len(batch) for batch in rollouts.batches(samples[:2], max_bytes=1)] == [1, 1]
    assert list(rollouts.batches([])) == []


def test_chunks_have_a_schema_of_their_own_and_share_memory_with_their_record():
    chunk = EXAMPLES["weights-chunk"]
    record = record_of(weights.chunk_headers(chunk, run="r"), weights.encode_chunk(chunk))
    headers, found = weights.read_chunk(record, run="r")
    assert (headers.schema, headers.part, found) == ("weights-chunk/1", 1, chunk)
    assert np.shares_memory(np.frombuffer(found.data, np.uint8), np.frombuffer(record.value, np.uint8))
    assert refused(weights.check, record, run="r").kind == "schema-version"
    lie = record_of(replace(weights.chunk_headers(chunk, run="r"), part=2), record.value)
    assert "'part' is 2" in str(refused(weights.read_chunk, lie, run="r"))


def test_a_runs_record_is_found_by_its_key_when_no_run_is_asked_for():
    assert runs.read(written("runs"))[1] == EXAMPLES["runs"]
    assert refused(runs.read, replace(written("runs"), key=b"other")).kind == "foreign-run"


def test_a_dead_letter_holds_the_record_whole():
    record = record_of((("run", b"\xff"), ("run", b""), ("x", None)), b"\0\xff" * 9, key=None)
    letter = dead_letters.from_record(record, kind="undecodable", reason="caf\udce9", worker="scorer-0", time_ns=7)
    found = dead_letters.decode(dead_letters.encode(letter))
    assert (found.headers, found.value, found.key, found.offset) == (record.headers, record.value, None, 5)
    assert found.reason == "caf?"


def test_records_with_arrays_are_equal_by_value():
    assert a_prompt() == a_prompt()
    assert a_prompt() != a_prompt(group=4)
    assert a_rollout() != a_rollout(tokens=4)
    assert a_rollout() != 3
    rollout = a_rollout()
    rollout.token_ids[0] = 9
    assert rollout != a_rollout()


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(group=group_records(max_samples=6), max_bytes=st.integers(1, 40_000))
def test_a_group_comes_back_from_any_number_of_parts(group, max_bytes):
    parts = groups.encode_parts(group, run="r", worker="scorer-0", max_bytes=max_bytes)
    assert groups.decode_parts([value for _, value in parts]) == group
    headers, found = groups.read([record_of(*part) for part in parts], run="r")
    assert found == group
    assert headers == parts[0][0]


def test_the_mean_of_rewards_near_the_largest_double_is_one_of_them():
    assert groups.mean([1.6e308] * 4) == 1.6e308
    assert groups.mean([0.1, 0.2, 0.3]) == pytest.approx(0.2)


def test_a_small_group_is_one_record_and_its_headers_are_over_all_its_samples():
    ((headers, value),) = groups.encode_parts(a_group(), run="r", worker="scorer-0")
    assert headers == Headers(
        run="r",
        schema="groups/1",
        group=3,
        policy_version_min=4,
        policy_version_max=5,
        outcome="scored",
        worker="scorer-0",
        part=0,
        parts=1,
        samples=3,
        tokens=60,
        reward_mean=math.fsum([0, 1 / 3, 2 / 3]) / 3,
        sha256=hashlib.sha256(value).hexdigest(),
    )
    assert groups.read(record_of(headers, value), run="r") == (headers, a_group())
    assert groups.decode(groups.encode(a_group())) == a_group()


def test_a_group_without_samples_claims_no_versions_and_no_mean():
    group = a_group(samples=0)
    ((headers, value),) = groups.encode_parts(group, run="r", worker="scorer-0")
    assert headers.policy_version_min is headers.policy_version_max is headers.reward_mean is None
    assert headers.samples == headers.tokens == 0
    assert groups.read(record_of(headers, value), run="r")[1] == group


def test_a_large_group_is_split_between_samples_under_the_limit_and_all_parts_name_one_digest():
    group = a_group(samples=40, tokens=500)
    limit = 60_000
    parts = groups.encode_parts(group, run="r", worker="scorer-0", max_bytes=limit)
    assert len(parts) > 3
    assert max(len(value) for _, value in parts) <= limit
    assert min(len(value) for _, value in parts[:-1]) > limit / 2
    assert [headers.part for headers, _ in parts] == list(range(len(parts)))
    assert {headers.sha256 for headers, _ in parts} == {hashlib.sha256(b"".join(value for _, value in parts)).hexdigest()}
    assert {(headers.parts, headers.samples, headers.tokens) for headers, _ in parts} == {(len(parts), 40, 20_000)}
    assert groups.read([record_of(*part) for part in parts], run="r")[1] == group


def test_parts_that_are_missing_swapped_or_of_another_group_are_refused():
    parts = [value for _, value in groups.encode_parts(a_group(samples=40, tokens=500), run="r", worker="s", max_bytes=60_000)]
    others = [value for _, value in groups.encode_parts(a_group(samples=40, tokens=500, group=4), run="r", worker="s", max_bytes=60_000)]
    for wrong in (parts[:-1], parts[1:], parts[::-1], [], [*parts[:-1], others[-1]]):
        assert refused(groups.decode_parts, wrong).kind == "undecodable"


def test_a_group_whose_headers_contradict_it_is_a_mismatch():
    ((headers, value),) = groups.encode_parts(a_group(), run="r", worker="scorer-0")
    lies = {"group": 4, "outcome": "filtered", "policy_version_min": 3, "samples": 2, "tokens": 61, "reward_mean": 0.5, "sha256": "0" * 64}
    for field, lie in lies.items():
        assert refused(groups.read, record_of(replace(headers, **{field: lie}), value), run="r").kind == "mismatch", field
    found = refused(groups.check, record_of(replace(headers, part=1), value), run="r")
    assert found.kind == "bad-header" and "part number 1 of 1" in str(found)


@pytest.mark.parametrize("rewards", [(math.inf, -math.inf), (0.0, math.inf), (math.nan, 1.0)])
def test_a_group_with_a_reward_that_is_not_finite_is_refused_by_whoever_reads_it(rewards):
    sound = a_group()
    (headers, _), *_ = groups.encode_parts(sound, run="r", worker="scorer-0")
    samples = tuple(replace(sample, reward=reward) for sample, reward in zip(sound.samples, rewards, strict=False))
    value = groups.encode(replace(sound, samples=samples))
    with pytest.raises(Unusable, match=r"the reward of a sample is (-?inf|nan), which is not finite"):
        groups.read(record_of(replace(headers, sha256=groups.digest([value])), value), run="r")


def test_a_sample_of_another_group_is_not_written():
    group = replace(a_group(), group=4)
    with pytest.raises(ValueError, match="group 4: sample 0 belongs to group 3"):
        groups.encode(group)


def a_trajectory(**changed):
    turns = (Turn(start=0, end=4, source="prompt"), Turn(start=4, end=9, source="model", finish="stop", reward=0.5))
    mask = np.arange(20) >= 4
    return replace(
        a_rollout(), loss_mask=mask, behaviour_logprobs=np.where(mask, np.float32(-1), np.float32("nan")),
        **{"segments": ((0, 12, 0), (12, 20, 3)), "turns": turns, "messages": '[{"role": "user"}]', "environment": "tiny:lake",
           "environment_version": "1", "environment_seed": 2**40, **changed},
    )  # fmt: skip


def test_a_trajectory_comes_back_as_it_was_beside_single_completions_and_in_a_group() -> None:
    single, trajectory = a_rollout(sample=0), a_trajectory()
    assert rollouts.decode_all(rollouts.encode(single, trajectory)) == (single, trajectory)
    group = a_group()
    group = replace(group, samples=(replace(group.samples[0], rollout=a_trajectory(sample=0)), *group.samples[1:]))
    assert groups.decode(groups.encode(group)) == group
    assert (reward_of(trajectory.turns), trajectory.broken) == (0.5, None)


def test_a_trajectory_that_its_environment_broke_says_why() -> None:
    cause = "environment-step: took longer than 1 s and was killed"
    assert a_trajectory(finish="abort", turns=(Turn(start=20, end=20, source="environment", finish=cause),)).broken == cause


@pytest.mark.parametrize("changed", [
    {"segments": ((0, 12, 0),)}, {"segments": ((0, 12, 0), (13, 20, 3))}, {"segments": ((0, 12, 0), (12, 20, 9))},
    {"turns": (Turn(start=4, end=21, source="model"),)},
])  # fmt: skip
def test_segments_and_turns_that_do_not_fit_the_tokens_are_refused(changed) -> None:
    with pytest.raises(ValueError, match=r"segment|turn"):
        rollouts.encode(a_trajectory(**changed))
