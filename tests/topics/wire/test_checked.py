"""A value on which something is decided is checked where its record is decoded: one bad record is refused and ends nothing."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.topics import groups, ledger, rollouts, runs, weights
from penstock.topics.catalogue import check_run_id
from penstock.topics.internal import state
from penstock.topics.wire.checked import is_name, whole
from tests.support.strategies import EXAMPLES, MODULES, a_group, record_of, refused

DEEP = "[" * 100_000
NAMES = ["", ".", "..", "../x", "a/b", "/etc", "a b", "a\n", "\x1b[2J", "é", "x" * 200, "-rf"]

REFUSED: list[tuple[str, dict[str, Any]]] = [
    *(("runs", {"info": text}) for text in ("no", "[1]", "1", DEEP, '{"steps": {"a": 1}}', '{"steps": -1}', '{"steps": 1e999}')),
    *(("runs", {"info": text}) for text in ('{"forked_from": "x"}', '{"rescored_from": {"run": "../x"}}', '{"forked_from": {"run": 1}}')),
    *(("runs", {"info": text}) for text in ('{"prompts": "9"}', '{"steps": true}')),
    *(("runs", {"config": text}) for text in ("[]", "no", "1", '{"model": 1}', '{"model": {"path": 1}}', '{"run": []}', DEEP)),
    *(("runs", {"created_ns": number}) for number in (-1, -(2**63))),
    *(("metrics", {"worker": name, "role": name}) for name in NAMES),
    *(("metrics", {"incarnation": name}) for name in NAMES[:6]),
    *(("metrics", {"role": role}) for role in ("evaluator", "feeder", "", "rollou")),
    *(("metrics", {"values": values}) for values in ({"all_out": 1.0}, {"all_out": 1.0, "admitted": float("nan")})),
    *(("metrics", {"values": {"all_out": 1.0, "admitted": number}}) for number in (-1.0, 0.5, float("inf"), 1e300)),
    *(("metrics", {"values": {"greedy_accuracy": number}}) for number in (float("nan"), float("inf"), -float("inf"))),
    *(("metrics", {name: -1}) for name in ("seq", "time_ns", "version", "step")),
    *(("owners", {name: text}) for name in ("writer", "token") for text in NAMES),
    ("owners", {"time_ns": -1}),
    *(("ledger", {name: -1}) for name in ("seq", "time_ns", "step", "version")),
    *(("ledger", {"details": text}) for text in ("no", "[]", "1", '"x"', DEEP)),
    *(("ledger", {name: (3, -1)}) for name in ("boundaries", "groups")),
    ("ledger", {"plan": (ledger.Planned(group=1, sha256="0", partition=-1, offset=0),)}),
    *(("prompts", {name: -1}) for name in ("group", "slot", "min_version", "epoch", "row", "created_ns", "samples_per_prompt", "place")),
    *(("prompts", {"samples_per_prompt": number}) for number in (2**62, 2**31)),
    *(("prompts", {"columns": text}) for text in ("no", "[]", "1", '"x"', DEEP)),
    *(("prompts", {"messages": text}) for text in ("no", "{}", "[1]", '"x"', DEEP)),
    ("prompts", {"token_ids": np.array([1, -1], np.int32)}),
    *(("weights", {name: (-2,)}) for name in ("chunk_partitions", "chunk_offsets")),
    *(("weights", {name: -1}) for name in ("version", "step", "created_ns")),
    ("weights", {"shapes": ((-1, 4),)}),
    *(("dead-letters", {name: -1}) for name in ("partition", "offset", "time_ns")),
    *(("dead-letters", {name: text}) for name in ("topic", "worker", "kind") for text in NAMES),
    *(("state", {"positions": text}) for text in ("no", "[]", '{"groups": 1}', '{"../x/0": 1}', '{"groups/0": -1}', '{"groups/0": "1"}')),
    *(("state", {"positions": text}) for text in ('{"groups/-1": 1}', '{"groups/99999999999": 1}', '{"x.groups/0": 1}', DEEP)),
    *(("calls", {name: -1}) for name in ("group", "sample", "turn", "attempt", "min_version", "max_new_tokens", "top_k")),
    *(("calls", {"temperature": number}) for number in (float("nan"), float("inf"), -1.0)),
    ("calls", {"token_ids": np.array([-1], np.int32)}),
    *(("calls", {"worker": name}) for name in NAMES),
    *(("replies", {name: -1}) for name in ("group", "sample", "turn", "attempt")),
]


@pytest.mark.parametrize(("name", "changes"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_value_that_cannot_be_is_refused_in_one_line(name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module = MODULES[name]
    if name == "weights":
        monkeypatch.setattr(weights, "_flaw", lambda _: None)
    value = module.encode(replace(EXAMPLES[name], **changes))
    monkeypatch.undo()
    found = refused(module.decode, value)
    assert found.kind == "undecodable" and len(str(found).splitlines()) == 1 and len(str(found)) < 400
    module.decode(module.encode(EXAMPLES[name]))


@pytest.mark.parametrize("name", NAMES)
def test_a_header_with_a_worker_that_is_no_name_is_refused_before_the_payload_is_decoded(name: str) -> None:
    if not name.isascii():
        return
    value = rollouts.encode(EXAMPLES["rollouts"])
    headers = replace(rollouts.headers(EXAMPLES["rollouts"], run="r"), worker=name)
    assert "not a valid name" in str(refused(rollouts.check, record_of(headers, value), run="r"))


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": np.array([5, -7], np.int32)},
        {"behaviour_logprobs": np.array([-1.0, np.inf], np.float32)},
        {"behaviour_logprobs": np.array([-np.inf, -1.0], np.float32)},
        {"span_versions": np.array([4, -5], np.int32)},
    ],
)
def test_a_sample_with_numbers_that_cannot_be_is_refused_in_its_group_too(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = a_group(samples=1, tokens=2)
    rollout = replace(genuine.samples[0].rollout, **changes)
    with pytest.raises(ValueError, match=r"below 0|finite"):
        rollouts.encode(rollout)
    monkeypatch.setattr("penstock.topics.rollouts.flaw", lambda _: None)
    sample, group = rollouts.encode(rollout), groups.encode(replace(genuine, samples=(replace(genuine.samples[0], rollout=rollout),)))
    monkeypatch.undo()
    for decode, value in ((rollouts.decode, sample), (groups.decode, group)):
        assert re.search(r"below 0|finite", str(refused(decode, value)))


@pytest.mark.parametrize(
    "changes", [{"slot": -1}, {"columns": "[]"}, {"columns": DEEP}, {"metrics": "1"}, {"created_ns": -1}, {"samples_per_prompt": -8}]
)
def test_a_group_with_values_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    refused(groups.decode, groups.encode(replace(a_group(), **changes)))


@pytest.mark.parametrize("run", ["", ".", "..", "../x", "a/b", "/", "A", "a.b", "a\n", "\x1b", "x" * 65, "é"])
def test_a_run_whose_id_is_no_run_id_does_not_exist_for_a_reader(run: str) -> None:
    with pytest.raises(ValueError, match="use 1 to 64"):
        check_run_id(run)
    record = replace(EXAMPLES["runs"], run=run)
    value = runs.encode(record)
    refused(runs.decode, value)
    if run.isascii():
        refused(runs.read, record_of(runs.headers(record), value, key=run.encode()))


def test_the_positions_of_a_state_are_in_the_run_and_in_the_register() -> None:
    positions = '{"groups/0": 3, "metrics/11": 0, "penstock.runs/0": 9}'
    found = replace(EXAMPLES["state"], positions=positions)
    assert state.decode(state.encode(found)) == found


@pytest.mark.parametrize("name", ["feeder", "rollout-0", "rollout-host-1f3a", "scorer-10", "http-2.x", "a" * 128])
def test_names_of_workers_are_names(name: str) -> None:
    assert is_name(name)


@pytest.mark.parametrize(
    ("value", "count"), [(None, None), (4.0, 4), (0.0, 0), (0.5, None), (-1.0, None), (float("nan"), None), (float("inf"), None)]
)
def test_a_count_is_a_whole_number(value: float | None, count: int | None) -> None:
    assert whole(value) == count
