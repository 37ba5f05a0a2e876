"""`groups`: the outcome of one group: all its samples with rewards by component, or the reason why there are none. Scorers -> trainer.

A group above the size limit is split into parts. Each part repeats the fields of the group; a group that lacks a part is ignored."""

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import pyarrow as pa

from penstock.topics.rollouts import SAMPLE_FIELDS, Rollout, generated, max_bytes_of, sample_of, sample_row
from penstock.topics.wire.checked import json_object, require_whole
from penstock.topics.wire.codec import Codec
from penstock.topics.wire.columns import Int32s, Payload, as_row
from penstock.topics.wire.errors import Unusable, require
from penstock.topics.wire.fields import ByValue, column, fields_of, list_of
from penstock.topics.wire.headers import Headers, match, one_of, read_headers
from penstock.topics.wire.record import Record

SCHEMA = "groups/1"
MAX_PART_BYTES = 8 << 20
"""Half of the largest record of the log."""

Outcome = Literal["scored", "filtered", "failed", "abandoned"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

_NOTED = ("reward_error", "logged", "metrics")
_FACTS = ("group", "outcome", "policy_version_min", "policy_version_max", "samples", "no_reward", "tokens", "reward_mean", "sha256")
_REQUIRED = ("group", "outcome", "part", "parts", "sha256")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSample:
    """One sample with its rewards, total and by function."""

    rollout: Rollout
    completion: str
    """Completion text that was passed to the reward functions."""
    reward: float | None
    """Weighted sum of the components; `None` if no function applies or one broke: the sample is in no mean and is not trained."""
    components: tuple[float | None, ...]
    """One number per reward function; `None` if the function does not apply."""
    reward_error: str | None = None
    """The error of a reward function on this sample; `None` without one."""
    logged: str | None = None
    """JSON object: the values that reward functions logged for the sample; `None` without any."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group(ByValue):
    """One group, self-contained: the trainer needs no other record to train on it."""

    group: int
    slot: int
    min_version: int
    samples_per_prompt: int
    epoch: int
    row: int
    created_ns: int
    """Time of the prompt's admission."""
    scored_ns: int
    reward_ns: int | None = None
    """Duration of its reward functions; `None` if none was called, or in records of earlier releases."""
    outcome: Outcome
    """`scored`, `filtered`, `failed` or `abandoned`."""
    reason: str | None
    """Reason for not scoring the group; `None` if it was scored."""
    prompt: str
    prompt_ids: Int32s
    """[L] the prompt's tokens."""
    columns: str
    """JSON object: the row's other columns."""
    reward_names: tuple[str, ...]
    reward_weights: tuple[float, ...]
    """One weight per reward function."""
    samples: tuple[ScoredSample, ...]
    """The samples of this part, by number; empty without rewards."""
    metrics: str | None = None
    """JSON object: the metrics that reward functions logged for the group; `None` without any."""

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards of the samples that have one."""
        return tuple(sample.reward for sample in self.samples if sample.reward is not None)


_SCORED = (*SAMPLE_FIELDS, *fields_of(ScoredSample, rollout=pa.struct(SAMPLE_FIELDS))[1:])
_FIELDS = fields_of(Group, samples=list_of(pa.struct(_SCORED)))
_SPLIT = Group.__slots__.index("outcome")
CODEC = Codec(SCHEMA, fields=(*_FIELDS[:_SPLIT], column("part", pa.int64()), column("parts", pa.int64()), *_FIELDS[_SPLIT:]))
_FIXED_BYTES = len(CODEC.schema.serialize()) + 8192


def _codec(timed: bool, limited: bool, noted: bool) -> Codec:
    """Return the codec of a group record without the nullable columns that it does not use: reward times, sampling support, notes."""
    omitted = {"reward_ns": not timed, "support": not limited, **dict.fromkeys(_NOTED, not noted)}
    sample = pa.struct([
        column("reward", pa.float64()) if field.name == "reward" and not noted else field
        for field in _SCORED
        if not omitted.get(field.name)
    ])  # fmt: skip
    fields = [field for field in CODEC.schema if not omitted.get(field.name)]
    return Codec(SCHEMA, fields=[column("samples", list_of(sample)) if field.name == "samples" else field for field in fields])


_CODECS = {used: _codec(*used) for used in itertools.product((False, True), repeat=3)}
"""Key: the group has reward times, a support, and samples without rewards or with logged values. So a record of an earlier release is
encoded to the same bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of a group that one record holds."""

    part: int
    parts: int
    group: Group


def encode_parts(group: Group, *, run: str, worker: str, max_bytes: int = MAX_PART_BYTES) -> list[tuple[Headers, bytes]]:
    """Return headers and payload of each part of a group, to be written in one transaction; a sample is never split.

    Raises `ValueError` for a sample of another group or one whose arrays do not match.
    """
    ranges = list(_ranges(group, max_bytes=max_bytes))
    pieces = [replace(group, samples=group.samples[low:high]) for low, high in ranges]
    payloads = [encode(piece, part=part, parts=len(pieces)) for part, piece in enumerate(pieces)]
    all_samples = headers(group, run=run, worker=worker, sha256=digest(payloads))
    return [(replace(all_samples, part=part, parts=len(payloads)), payload) for part, payload in enumerate(payloads)]


def decode(value: Payload) -> Group:
    """Return the group in a payload that is its only part. Raises `Unusable`."""
    return decode_parts((value,))


def decode_parts(values: Sequence[Payload]) -> Group:
    """Join the payloads of all parts of a group, in order. Raises `Unusable`, also if a part is missing."""
    require(values, "a group has at least one part")
    parts = [decode_part(value) for value in values]
    first = parts[0].group
    for position, part in enumerate(parts):
        expected = (position, len(parts))
        require((part.part, part.parts) == expected, f"part {part.part} of {part.parts}, expected part {position} of {len(parts)}")
    if len(parts) == 1:
        return first
    for part in parts[1:]:
        require(replace(part.group, samples=first.samples) == first, f"part {part.part} is of another group than part 0")
    return replace(first, samples=tuple(sample for part in parts for sample in part.group.samples))


def decode_part(value: Payload) -> Part:
    """Return the part of a group in a payload. Raises `Unusable`."""
    (row,) = CODEC.decode(value)
    part, parts, outcome = row.pop("part"), row.pop("parts"), row["outcome"]
    require_whole(row, "group", "slot", "min_version", "samples_per_prompt", "epoch", "row", "created_ns", "scored_ns", "reward_ns")
    require(0 <= part < parts, f"part {part} of {parts} cannot be")
    require(not (row["prompt_ids"] < 0).any(), "a token id of the prompt is below 0")
    json_object(row["columns"], "columns")
    if row["metrics"] is not None:
        json_object(row["metrics"], "metrics")
    require(outcome in OUTCOMES, f"outcome is {outcome[:60]!r}, expected one of {', '.join(OUTCOMES)}")
    samples = tuple(_scored(sample, group=row["group"]) for sample in row["samples"])
    return Part(part=part, parts=parts, group=Group(**{**row, "samples": samples}))


def digest(values: Sequence[Payload]) -> str:
    """Hex SHA-256 over the payloads of all parts in order."""
    return hashlib.sha256(b"".join(values)).hexdigest()


def version_min(rollouts: Sequence[Rollout]) -> int | None:
    """Return the oldest policy version of a group's trained tokens, of any token if none is trained; None without samples."""
    trained = [rollout for rollout in rollouts if rollout.loss_mask.any()]
    return min((rollout.version_min for rollout in trained or rollouts), default=None)


def mean(rewards: Sequence[float]) -> float:
    """Return the mean of rewards, exact to the last bit unless their sum overflows."""
    try:
        return math.fsum(rewards) / len(rewards)
    except OverflowError:
        return math.fsum(reward / len(rewards) for reward in rewards)


def lacks_rewards(samples: int | None, no_reward: int | None) -> bool:
    """Return True if samples lack a reward and fewer than two have one: then the mean reward is no measure of the prompt."""
    return bool(no_reward) and (samples or 0) - (no_reward or 0) < 2


def headers(group: Group, *, run: str, worker: str | None = None, sha256: str | None = None) -> Headers:
    """Return the headers of a group in one part; versions and tokens cover its samples, the mean reward those that have a reward.

    `no_reward` counts the samples without a reward; it is absent if there are none.
    """
    rollouts = [sample.rollout for sample in group.samples]
    rewards = group.rewards
    return Headers(
        run=run, schema=SCHEMA, group=group.group, policy_version_min=version_min(rollouts),
        policy_version_max=max((rollout.version_max for rollout in rollouts), default=None), outcome=group.outcome, worker=worker, part=0,
        parts=1, samples=len(group.samples), no_reward=len(group.samples) - len(rewards) or None,
        tokens=sum(len(generated(rollout)) for rollout in rollouts), reward_mean=mean(rewards) if rewards else None, sha256=sha256,
    )  # fmt: skip


def check(record: Record, *, run: str) -> Headers:
    """Return the headers of a part's record of `run`, without decoding its payload. Raises `Unusable`."""
    checked = one_of(read_headers(record.headers, record.value, run=run, schema=SCHEMA, required=_REQUIRED), outcomes=OUTCOMES)
    if checked.part is None or checked.parts is None or not checked.part < checked.parts:
        raise Unusable(f"part number {checked.part} of {checked.parts} is out of range", kind="bad-header")
    return checked


def read(records: Record | Sequence[Record], *, run: str) -> tuple[Headers, Group]:
    """Return the first part's headers and the group, from the records of all parts in order. Raises `Unusable` if they contradict."""
    parts = (records,) if isinstance(records, Record) else tuple(records)
    checked = [check(record, run=run) for record in parts]
    values = [record.value for record in parts]
    group = decode_parts(values)
    expected = headers(group, run=run, sha256=digest(values))
    facts = {field: getattr(expected, field) for field in _FACTS}
    for part, claim in enumerate(checked):
        match(claim, **facts, part=part, parts=len(parts))
    return checked[0], group


class GroupAssembler:
    """Collects the parts of a group, which one transaction wrote: they share a digest and follow each other in the log."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int | None, str | None], list[Record]] = {}

    def add(self, record: Record, headers: Headers) -> list[Record] | None:
        """Add a part with its headers from `check`; return the records of all parts with the last one, else None.

        Raises `Unusable` if a part is missing before it.
        """
        outcome = headers.group, headers.sha256
        parts = self._parts.get(outcome, [])
        if headers.part != len(parts):
            raise Unusable(f"part {headers.part} of group {headers.group} arrived, expected part {len(parts)}", kind="mismatch")
        self._parts[outcome] = [*parts, record]
        return self._parts.pop(outcome) if len(parts) + 1 == headers.parts else None

    def held(self) -> Iterator[Record]:
        """Return the first part's record of each group whose other parts are still missing."""
        return (parts[0] for parts in self._parts.values())


def _ranges(group: Group, *, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield [low, high) of the samples in each part, so that no part exceeds `max_bytes` at four bytes a character."""
    fixed = _FIXED_BYTES + 4 * (
        len(group.prompt) + len(group.columns) + len(group.reason or "") + len(group.metrics or "") + sum(map(len, group.reward_names))
    )
    fixed += 4 * len(group.prompt_ids) + 12 * len(group.reward_names)
    low, size = 0, fixed
    for high, sample in enumerate(group.samples):
        texts = len(sample.completion) + len(sample.reward_error or "") + len(sample.logged or "")
        more = max_bytes_of(sample.rollout) + 4 * texts + 9 * len(sample.components)
        if high > low and size + more > max_bytes:
            yield low, high
            low, size = high, fixed
        size += more
    yield low, len(group.samples)


def encode(group: Group, *, part: int = 0, parts: int = 1) -> bytes:
    """Return the payload of one part of a group, of any size. Raises `ValueError` for a sample of another group."""
    for sample in group.samples:
        if sample.rollout.group != group.group:
            raise ValueError(f"group {group.group}: sample {sample.rollout.sample} belongs to group {sample.rollout.group}")
    samples = [{**sample_row(sample.rollout), **as_row(sample)} for sample in group.samples]
    limited = any(sample.rollout.support is not None for sample in group.samples)
    noted = group.metrics is not None or any(
        sample.reward is None or sample.reward_error is not None or sample.logged is not None for sample in group.samples
    )
    return _CODECS[group.reward_ns is not None, limited, noted].encode({**as_row(group), "samples": samples, "part": part, "parts": parts})


def _scored(row: dict[str, Any], *, group: int) -> ScoredSample:
    """Return the sample in a decoded row of a group. Raises `Unusable`."""
    require(row["reward"] is None or math.isfinite(row["reward"]), f"the reward of a sample is {row['reward']}, which is not finite")
    numbers = [value for value in row["components"] if value is not None]
    require(all(map(math.isfinite, numbers)), "a component of a reward is not finite")
    if row["logged"] is not None:
        json_object(row["logged"], "logged")
    names = ("completion", "reward", "components", "reward_error", "logged")
    return ScoredSample(rollout=sample_of(row, group=group), **{name: row[name] for name in names})
