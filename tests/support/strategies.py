"""Hypothesis strategies and one fixed example for every record that flows."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.topics import dead_letters, groups, ledger, metrics, prompts, rollouts, runs, weights
from penstock.topics.catalogue import is_run_id
from penstock.topics.internal import owners, state
from penstock.topics.turns import calls, replies
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import RawHeaders, Record
from tests.support.examples import group_of, manifest_of, prompt_of, sample_of

INT64 = st.integers(-(2**63), 2**63 - 1)
COUNT = st.integers(0, 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAME = st.from_regex(r"[a-z0-9][a-z0-9-]{0,7}", fullmatch=True)
TABLE = st.dictionaries(TEXT, TEXT, max_size=2).map(json.dumps)
DOUBLE = st.floats(allow_nan=False)
BYTES = st.binary(max_size=40)


def ids(size):
    return hnp.arrays(np.int32, size, elements=st.integers(0, 2**31 - 2))


@st.composite
def rollout_records(draw, *, group=COUNT):
    tokens = draw(st.integers(0, 9))
    starts = sorted(draw(st.lists(st.integers(0, tokens), max_size=3)))
    mask = draw(hnp.arrays(np.bool_, tokens))
    logprobs = draw(hnp.arrays(np.float32, tokens, elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
    logprobs[~mask & draw(hnp.arrays(np.bool_, tokens))] = np.nan
    token_ids = draw(ids(tokens))
    return rollouts.Rollout(
        group=draw(group),
        sample=draw(COUNT),
        token_ids=token_ids,
        behaviour_logprobs=logprobs,
        loss_mask=mask,
        span_versions=draw(hnp.arrays(np.int32, len(starts) + 1, elements=st.integers(0, 2**31 - 1))),
        span_starts=np.array([0, *starts], np.int32),
        finish=draw(st.sampled_from(rollouts.FINISHES)),
        temperature=draw(DOUBLE),
        top_p=draw(DOUBLE),
        top_k=draw(COUNT),
        started_ns=draw(COUNT),
        ended_ns=draw(COUNT),
        worker=draw(NAME),
        support=draw(st.none() | st.just(np.stack([token_ids, token_ids + 1], axis=1).ravel())),
    )


@st.composite
def several_rollouts(draw):
    """Samples of one group and worker, as one record holds them."""
    first = draw(rollout_records())
    others = draw(st.lists(rollout_records(group=st.just(first.group)), max_size=3))
    numbers = sorted(draw(st.sets(COUNT, min_size=1 + len(others), max_size=1 + len(others))))
    return tuple(replace(sample, sample=number, worker=first.worker) for sample, number in zip((first, *others), numbers, strict=True))


def _encode_several(samples):
    return rollouts.encode(*samples)


@st.composite
def group_records(draw, *, max_samples=4):
    group = draw(COUNT)
    names = draw(st.lists(TEXT, max_size=3))
    samples = st.builds(
        groups.ScoredSample,
        rollout=rollout_records(group=st.just(group)),
        completion=TEXT,
        reward=st.none() | st.floats(-1e308, 1e308),
        components=st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=3).map(tuple),
        reward_error=st.none() | TEXT,
        logged=st.none() | TABLE,
    )
    return groups.Group(
        group=group,
        outcome=draw(st.sampled_from(groups.OUTCOMES)),
        reason=draw(st.none() | TEXT),
        slot=draw(COUNT),
        min_version=draw(COUNT),
        samples_per_prompt=draw(COUNT),
        epoch=draw(COUNT),
        row=draw(COUNT),
        prompt=draw(TEXT),
        prompt_ids=draw(ids(draw(st.integers(0, 5)))),
        columns=draw(TABLE),
        reward_names=tuple(names),
        reward_weights=tuple(draw(st.lists(DOUBLE, min_size=len(names), max_size=len(names)))),
        samples=tuple(draw(st.lists(samples, max_size=max_samples))),
        metrics=draw(st.none() | TABLE),
        created_ns=draw(COUNT),
        scored_ns=draw(COUNT),
        reward_ns=draw(COUNT),
    )


@st.composite
def manifest_records(draw):
    tensors = draw(st.lists(st.tuples(TEXT, NAME, st.lists(COUNT, max_size=3).map(tuple)), max_size=4))
    chunks = draw(st.lists(st.tuples(COUNT, COUNT, st.integers(0, 2**24), NAME), max_size=4))
    names, dtypes, shapes = (tuple(column) for column in zip(*tensors, strict=True)) if tensors else ((), (), ())
    partitions, offsets, sizes, digests = (tuple(column) for column in zip(*chunks, strict=True)) if chunks else ((), (), (), ())
    return weights.Manifest(
        version=draw(COUNT),
        step=draw(COUNT),
        encoding="full",
        base_version=draw(st.none() | COUNT),
        digest=draw(NAME),
        nbytes=sum(sizes),
        names=names,
        dtypes=dtypes,
        shapes=shapes,
        chunk_partitions=partitions,
        chunk_offsets=offsets,
        chunk_sizes=sizes,
        chunk_sha256=digests,
        created_ns=draw(COUNT),
    )


@st.composite
def prompt_records(draw):
    numbers = {name: draw(COUNT) for name in ("group", "slot", "min_version", "samples_per_prompt", "epoch", "row", "created_ns")}
    return prompts.Prompt(
        **numbers | {"samples_per_prompt": draw(st.integers(0, prompts.MAX_SAMPLES))},
        prompt=draw(TEXT),
        messages=draw(st.none() | st.lists(st.dictionaries(TEXT, TEXT, max_size=2), max_size=2).map(json.dumps)),
        token_ids=draw(ids(draw(st.integers(0, 7)))),
        columns=draw(TABLE),
    )


PLANNED = st.builds(ledger.Planned, group=COUNT, sha256=NAME, partition=COUNT, offset=COUNT)
NUMBERS = st.lists(COUNT, max_size=5).map(tuple)
ENTRY = st.builds(
    ledger.Entry,
    seq=COUNT,
    kind=st.sampled_from(ledger.ENTRY_KINDS),
    time_ns=COUNT,
    step=st.none() | COUNT,
    version=st.none() | COUNT,
    plan=st.lists(PLANNED, max_size=3).map(tuple),
    boundaries=NUMBERS,
    groups=NUMBERS,
    loss_bits=st.none() | INT64,
    grad_norm_bits=st.none() | INT64,
    digest=st.none() | NAME,
    metrics=st.dictionaries(TEXT, DOUBLE, max_size=3),
    details=st.none() | TABLE,
    previous=st.none() | NAME,
)
MEASUREMENT = st.builds(
    metrics.Measurement,
    worker=NAME.map("rollout-{}".format),
    role=st.just("rollout"),
    incarnation=NAME,
    seq=COUNT,
    kind=st.sampled_from(metrics.MEASUREMENT_KINDS),
    time_ns=COUNT,
    version=st.none() | COUNT,
    step=st.none() | COUNT,
    values=st.dictionaries(TEXT, DOUBLE, max_size=3),
    labels=st.dictionaries(TEXT, TEXT, max_size=3),
)
DEAD_LETTER = st.builds(
    dead_letters.DeadLetter,
    topic=NAME,
    partition=COUNT,
    offset=COUNT,
    timestamp_ms=INT64,
    kind=NAME,
    reason=TEXT,
    worker=NAME,
    key=st.none() | BYTES,
    headers=st.lists(st.tuples(TEXT, BYTES), max_size=3).map(tuple),
    value=BYTES,
    time_ns=COUNT,
)
RUN_RECORD = st.builds(
    runs.RunRecord,
    run=st.from_regex(r"[a-z0-9][a-z0-9-]{0,63}", fullmatch=True).filter(is_run_id),
    status=st.sampled_from(runs.STATUSES),
    config=st.dictionaries(TEXT, st.just({}), max_size=2).map(json.dumps),
    info=TABLE.filter(lambda text: not {"steps", "versions", "prompts"} & set(json.loads(text))),
    created_ns=COUNT,
    updated_ns=COUNT,
)
CHUNK = st.builds(weights.Chunk, version=COUNT, index=COUNT, data=BYTES)

RECORDS = {
    "prompts": (prompts.encode, prompts.decode, prompt_records(), prompts.CODEC),
    "rollouts": (rollouts.encode, rollouts.decode, rollout_records(), rollouts.CODEC),
    "several samples": (_encode_several, rollouts.decode_all, several_rollouts(), rollouts.CODEC),
    "groups": (groups.encode, groups.decode, group_records(), groups.CODEC),
    "weights": (weights.encode, weights.decode, manifest_records(), weights.CODEC),
    "weights-chunk": (weights.encode_chunk, weights.decode_chunk, CHUNK, weights.CHUNK_CODEC),
    "ledger": (ledger.encode, ledger.decode, ENTRY, ledger.CODEC),
    "metrics": (metrics.encode, metrics.decode, MEASUREMENT, metrics.CODEC),
    "dead-letters": (dead_letters.encode, dead_letters.decode, DEAD_LETTER, dead_letters.CODEC),
    "runs": (runs.encode, runs.decode, RUN_RECORD, runs.CODEC),
}
"""Encode, decode, strategy and codec of each schema."""


def a_rollout(*, group=3, sample=1, tokens=20, finish="stop"):
    logprobs, spans = -np.linspace(0.1, 1, tokens, dtype=np.float32), np.array([[4, 5], [0, tokens // 2]], np.int32)
    return sample_of(
        group, sample, range(tokens), behaviour_logprobs=logprobs, span_versions=spans[0], span_starts=spans[1], finish=finish,
        started_ns=10, ended_ns=20,
    )  # fmt: skip


def a_group(*, samples=3, tokens=20, group=3):
    scored = [
        groups.ScoredSample(
            rollout=a_rollout(group=group, sample=number, tokens=tokens), completion="2 ✓", reward=number / 3, components=(number / 3, None)
        )
        for number in range(samples)
    ]
    prompt = replace(a_prompt(group=group), samples_per_prompt=samples)
    outcome = {} if samples else {"outcome": "failed", "reason": "the reward function raised"}
    return group_of(prompt, scored, **outcome, reward_names=("exact", "short"), reward_weights=(1.0, 0.5))


def a_prompt(*, group=3):
    return prompt_of(
        group, slot=2, min_version=4, samples_per_prompt=8, row=7, prompt="1 + 1 = ?", token_ids=np.arange(5, dtype=np.int32),
        columns='{"answer": "2"}',
    )  # fmt: skip


def a_manifest():
    return manifest_of(
        2, step=4, digest="ab", nbytes=30, names=("a", "b"), dtypes=("float32", "bfloat16"), shapes=((2, 3), (3,)),
        chunk_partitions=(1, 1), chunk_offsets=(5, 6), chunk_sizes=(20, 10), chunk_sha256=("c", "d"),
    )  # fmt: skip


def an_entry():
    return ledger.Entry(
        seq=9,
        kind="step",
        time_ns=1,
        step=3,
        version=2,
        plan=(ledger.Planned(group=3, sha256="ab", partition=1, offset=8),),
        boundaries=(4, 8),
        loss_bits=-5,
        grad_norm_bits=7,
        metrics={"loss": 0.5, "tokens": 20.0},
    )


def a_measurement():
    return metrics.Measurement(
        worker="scorer-0",
        role="scorer",
        incarnation="x",
        seq=0,
        kind="status",
        time_ns=1,
        version=2,
        values={"backlog": 3.0},
        labels={"doing": "wait"},
    )


def a_dead_letter():
    return dead_letters.DeadLetter(
        topic="r.rollouts",
        partition=1,
        offset=2,
        timestamp_ms=3,
        kind="undecodable",
        reason="no",
        worker="scorer-0",
        key=None,
        headers=(("run", b"r"), ("run", b"\xff")),
        value=b"\0" * 50,
        time_ns=4,
    )


def a_call(**changes):
    fields = {
        "group": 3, "sample": 1, "turn": 2, "attempt": 0, "min_version": 4, "token_ids": np.array([5, 6, 7], np.int32), "stream": 9,
        "max_new_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seeded": 1, "asked_ns": 10, "worker": "environment-0",
    }  # fmt: skip
    return calls.Call(**(fields | changes))


def a_reply(**changes):
    """What was drawn for `a_call`."""
    fields = {
        **a_call().key._asdict(), "token_ids": np.array([8, 2], np.int32), "behaviour_logprobs": np.array([-0.5, -1.0], np.float32),
        "span_versions": np.array([4, 5], np.int32), "span_starts": np.array([0, 1], np.int32), "finish": "stop", "started_ns": 11,
        "ended_ns": 12, "worker": "rollout-0",
    }  # fmt: skip
    return replies.Reply(**(fields | changes))


MODULES: dict[str, Any] = {
    "prompts": prompts,
    "rollouts": rollouts,
    "calls": calls,
    "replies": replies,
    "weights": weights,
    "ledger": ledger,
    "metrics": metrics,
    "dead-letters": dead_letters,
    "runs": runs,
    "state": state,
    "owners": owners,
}
"""Topic -> the module that reads and writes its records; groups, of several parts, are not among them."""
EXAMPLES = {
    "prompts": a_prompt(),
    "rollouts": a_rollout(),
    "several samples": (a_rollout(sample=0), a_rollout(sample=2, tokens=4, finish="length")),
    "calls": a_call(),
    "replies": a_reply(),
    "groups": replace(a_group(), reward_ns=7),
    "weights": a_manifest(),
    "weights-chunk": weights.Chunk(version=2, index=1, data=bytes(range(50))),
    "ledger": an_entry(),
    "metrics": a_measurement(),
    "dead-letters": a_dead_letter(),
    "state": state.State(worker="tracker", positions='{"ledger/0": 3}', view="{}"),
    "runs": runs.RunRecord(run="r", status="running", config="{}", info="{}", created_ns=1, updated_ns=2),
    "owners": owners.Owner(writer="trainer", token="t", kind="taken", host="here", time_ns=1),
}


def record_of(headers: Headers | RawHeaders, value: bytes, *, key: bytes | None = b"r") -> Record:
    """A stored record with these headers, which have the checksum that fits unless they are raw."""
    raw = headers.encode(value) if isinstance(headers, Headers) else headers
    return Record(topic="t", partition=0, offset=5, timestamp_ms=1, key=key, headers=raw, value=value)


def refused(read: Callable[..., object], *given: Any, **named: Any) -> Unusable:
    """The refusal of what cannot be used, which is one line."""
    with pytest.raises(Unusable) as error:
        read(*given, **named)
    assert "\n" not in str(error.value)
    return error.value
