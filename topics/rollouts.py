"""`rollouts`: finished samples: tokens, behaviour logprobs, loss mask, policy-version spans. Rollout workers -> scorers.

A record has one sample (`rollouts/1`) or several of one group (`rollouts/2`, the same columns with a row for each).
Acknowledgement, deduplication and regeneration work on single samples, so the headers name each one. A record of `groups` has the columns
of a sample too. Logprobs are of the distribution that was sampled from; for tokens the policy did not generate they are null,
in memory NaN."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from penstock.topics.wire.checked import require_names, require_whole
from penstock.topics.wire.codec import Codec
from penstock.topics.wire.columns import Bools, Float32s, Int32s, Payload, as_row
from penstock.topics.wire.errors import Unusable, require
from penstock.topics.wire.fields import ByValue, column, fields_of, list_of
from penstock.topics.wire.headers import Headers, match, one_of, read_headers
from penstock.topics.wire.record import Record

SCHEMA = "rollouts/1"
SEVERAL_SCHEMA = "rollouts/2"
MAX_SAMPLES = 64
"""Largest number of samples in a record: their numbers and lengths must fit into one header."""
MAX_BYTES = 8 << 20
"""[bytes] Largest payload of a record with several samples: half of the largest record of the log."""
Finish = Literal["stop", "length", "abort"]
FINISHES: tuple[Finish, ...] = get_args(Finish)

_SAMPLE_BYTES = 256
"""Upper bound of a sample's numbers and offsets, without its tokens and texts."""
_TOKEN_BYTES = 10
_TURN_BYTES = 64
MODEL = "model"
"""Source of the turns that the policy generated."""
GENERATED = "generated"
"""Key of the messages in `Rollout.messages` that the policy generated."""
ENVIRONMENT = "environment"
"""Source of the turn with the reason why an environment ended a trajectory early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One part of a trajectory, from the policy or the environment: tokens [start, end) of the sample's `token_ids`."""

    start: int
    end: int
    source: str
    """`prompt`, `model`, `tool`, `user`, or `environment` for the last turn of a trajectory that its environment ended."""
    finish: str | None = None
    """Finish reason of the model; in the last turn of an aborted trajectory, the cause."""
    reward: float | None = None
    """The environment's reward for a model's turn."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout(ByValue):
    """One finished sample of a group: T tokens, generated under S consecutive policy versions."""

    group: int
    sample: int
    token_ids: Int32s
    """[T] the completion; of a trajectory all tokens after the prompt."""
    behaviour_logprobs: Float32s
    """[T] natural-log probabilities; NaN for tokens the policy did not generate."""
    loss_mask: Bools
    """[T] True on tokens to train."""
    span_versions: Int32s
    """[S] policy version of each span, S >= 1: an empty sample has one too."""
    span_starts: Int32s
    """[S] index of the first token of each span: the first is 0, then ascending, at most T."""
    finish: Finish
    """`stop`, `length` or `abort`."""
    temperature: float
    top_p: float
    top_k: int
    """0 if there is no limit."""
    started_ns: int
    ended_ns: int
    worker: str
    segments: tuple[tuple[int, int, int], ...] | None = None
    """Training sequences of a trajectory, consecutive in `token_ids`: start, end, and the number of its tokens before the first generated
    one. That number is 0 if the group's prompt precedes the segment. None: one segment after the prompt."""
    turns: tuple[Turn, ...] | None = None
    """Parts of a trajectory, in order; None for a single completion."""
    messages: str | None = None
    """JSON list of the trajectory's chat messages, those of the policy marked with `GENERATED`; None for a single completion."""
    environment: str | None = None
    """Name of the trajectory's environment."""
    environment_version: str | None = None
    """Digest of the environment's source, or the release of its package."""
    environment_seed: int | None = None
    """Seed of the environment's reset."""
    support: Int32s | None = None
    """[T * k] ids that each token was sampled from, k per token, padded with -1; None for the full vocabulary. Logprobs are of the
    distribution over these ids."""

    @property
    def broken(self) -> str | None:
        """The reason for which the environment ended this sample, or None. A broken sample has no valid reward and no trained tokens."""
        return cause_of(self.turns)

    @property
    def token_versions(self) -> Int32s:
        """[T] policy version of each token."""
        return np.repeat(self.span_versions, np.diff(self.span_starts, append=len(self.token_ids)))

    @property
    def version_min(self) -> int:
        """The oldest policy version of the sample's trained tokens; of all tokens if none is trained."""
        if len(self.span_versions) > 1 and not self.loss_mask.all() and self.loss_mask.any():
            return int(self.token_versions[self.loss_mask].min())
        return min(map(int, self.span_versions))

    @property
    def version_max(self) -> int:
        """The newest policy version of any token of the sample."""
        return max(map(int, self.span_versions))


_INT32S = list_of(pa.int32())
_TURN = pa.struct(fields_of(Turn, start=pa.int32(), end=pa.int32()))
_MEDIUM = pa.struct([column("sha256", pa.string()), column("mime", pa.string()), column("uri", pa.string())])
_COLUMNS = fields_of(Rollout, behaviour_logprobs=list_of(pa.float32(), nullable=True), segments=list_of(_INT32S), turns=list_of(_TURN))[1:]
SAMPLE_FIELDS = (*_COLUMNS[:-1], column("media", list_of(_MEDIUM), nullable=True), _COLUMNS[-1])
"""Columns of a sample in its group; `media` is for later releases."""
_NAMES = tuple(field.name for field in _COLUMNS if field.name not in ("segments", "turns"))
CODEC = Codec(SCHEMA, fields=(column("group", pa.int64()), *SAMPLE_FIELDS), max_rows=MAX_SAMPLES)
UNLIMITED = Codec(SCHEMA, fields=[field for field in CODEC.schema if field.name != "support"], max_rows=MAX_SAMPLES)
"""Codec of samples from the full vocabulary, without `support`: their bytes equal those of earlier releases."""
_REQUIRED = ("group", "policy-version-min", "policy-version-max")
_FACTS = (
    "schema", "group", "sample", "policy_version_min", "policy_version_max", "outcome", "worker", "samples", "tokens", "sample_tokens",
)  # fmt: skip


def generated(sample: Any) -> Int32s:
    """Return [G] token ids that the policy generated, without those of the environment, of a `Rollout` or an engine's completion.

    Rewards, lengths and token counts are of these.
    """
    ids: Int32s = sample.token_ids
    turns = getattr(sample, "turns", None)
    if turns is None:
        return ids
    return np.concatenate([ids[:0], *(ids[turn.start : turn.end] for turn in turns if turn.source == MODEL)])


def reward_of(turns: Sequence[Turn] | None) -> float | None:
    """Return the sum of the environment's rewards for a trajectory's turns; None if there are none."""
    rewards = [turn.reward for turn in turns or () if turn.reward is not None]
    return sum(rewards) if rewards else None


def cause_of(turns: Sequence[Turn] | None) -> str | None:
    """Return why the environment ended a trajectory early; None if it did not."""
    return (turns[-1].finish or "unknown") if turns and turns[-1].source == ENVIRONMENT else None


def flaw(rollout: Rollout) -> str | None:
    """Return the first inconsistency of a sample's arrays; None if they are consistent."""
    tokens = len(rollout.token_ids)
    if not tokens == len(rollout.behaviour_logprobs) == len(rollout.loss_mask):
        return f"{tokens} tokens, but {len(rollout.behaviour_logprobs)} logprobs and {len(rollout.loss_mask)} loss mask elements"
    starts = rollout.span_starts.tolist()
    if not starts or len(starts) != len(rollout.span_versions):
        return f"{len(starts)} span starts, but {len(rollout.span_versions)} span versions"
    if starts[0] != 0 or starts[-1] > tokens or starts != sorted(starts):
        return f"span starts {starts[:8]} do not ascend from 0 to at most {tokens} tokens"
    if (rollout.loss_mask & ~np.isfinite(rollout.behaviour_logprobs)).any():
        return "a token in the loss mask has no finite logprob"
    if (rollout.token_ids < 0).any() or (rollout.span_versions < 0).any():
        return "a token id or a policy version is below 0"
    if (problem := _support_flaw(rollout, tokens)) is not None:
        return problem
    if rollout.finish not in FINISHES:
        return f"finish is {rollout.finish[:60]!r}, expected one of {', '.join(FINISHES)}"
    return _trajectory_flaw(rollout, tokens)


def _support_flaw(rollout: Rollout, tokens: int) -> str | None:
    """Return the first inconsistency of the token ids that each token was sampled from; None if there is none."""
    if rollout.support is None:
        return None
    if not tokens or len(rollout.support) % tokens:
        return f"the sampling support lists {len(rollout.support)} token ids for {tokens} tokens" if len(rollout.support) else None
    among = (rollout.support.reshape(tokens, -1) == rollout.token_ids[:, None]).any(1)
    if (rollout.loss_mask & ~among).any():
        return "a token in the loss mask is not in the support it was sampled from"
    return None


def _trajectory_flaw(rollout: Rollout, tokens: int) -> str | None:
    """Return the first inconsistency of a trajectory's segments and turns; None if there is none."""
    if rollout.segments is not None:
        ends = [0, *(end for _, end, _ in rollout.segments)]
        if [start for start, _, _ in rollout.segments] != ends[:-1] or ends[-1] != tokens or ends != sorted(ends):
            return f"segments {rollout.segments[:4]} are not a partition of {tokens} tokens"
        if not all(0 <= prompt <= end - start for start, end, prompt in rollout.segments):
            return f"one of the segments {rollout.segments[:4]} has a prompt longer than the segment"
    if any(not 0 <= turn.start <= turn.end <= tokens for turn in rollout.turns or ()):
        return f"a turn lies outside the sample's {tokens} tokens"
    return None


def max_bytes_of(rollout: Rollout) -> int:
    """Return an upper bound of a sample's size in a payload, at four bytes a character."""
    texts = [rollout.worker, rollout.messages, rollout.environment, rollout.environment_version]
    texts += [text for turn in rollout.turns or () for text in (turn.source, turn.finish)]
    trajectory = _TURN_BYTES * len(rollout.turns or ()) + 16 * len(rollout.segments or ())
    support = 0 if rollout.support is None else len(rollout.support)
    plain = _SAMPLE_BYTES + _TOKEN_BYTES * len(rollout.token_ids) + 8 * len(rollout.span_starts) + 4 * support
    return plain + trajectory + 4 * sum(len(text) for text in texts if text)


def sample_row(rollout: Rollout) -> dict[str, Any]:
    """Return a sample as a row by column name. Raises `ValueError` if its arrays do not match."""
    if problem := flaw(rollout):
        raise ValueError(f"group {rollout.group} sample {rollout.sample}: {problem}")
    row = {"group": rollout.group, **{name: getattr(rollout, name) for name in (*_NAMES, "segments")}}
    row["turns"] = None if rollout.turns is None else [as_row(turn) for turn in rollout.turns]
    return row


def sample_of(row: Mapping[str, Any], *, group: int) -> Rollout:
    """Return the sample of a group in a decoded row. Raises `Unusable`."""
    segments, turns = row["segments"], row["turns"]
    require_whole(row, "sample", "top_k", "started_ns", "ended_ns")
    require_names(row, "worker")
    if segments is not None and any(len(segment) != 3 for segment in segments):
        raise Unusable(f"sample {row['sample']}: a segment is not three numbers", kind="undecodable")
    rollout = Rollout(
        group=group,
        **{name: row[name] for name in _NAMES},
        segments=None if segments is None else tuple((int(start), int(end), int(prompt)) for start, end, prompt in segments),
        turns=None if turns is None else tuple(Turn(**turn) for turn in turns),
    )
    if problem := flaw(rollout):
        raise Unusable(f"sample {rollout.sample}: {problem}", kind="undecodable")
    return rollout


def batches(samples: Iterable[Rollout], *, max_samples: int = MAX_SAMPLES, max_bytes: int = MAX_BYTES) -> Iterator[list[Rollout]]:
    """Yield the samples of one group, in order, as lists that each fit into one record."""
    batch: list[Rollout] = []
    size = 0
    for sample in samples:
        more = max_bytes_of(sample)
        if batch and (len(batch) == max_samples or size + more > max_bytes):
            yield batch
            batch, size = [], 0
        batch.append(sample)
        size += more
    if batch:
        yield batch


def encode(*samples: Rollout) -> bytes:
    """Return the payload of samples of one group in ascending order. Raises `ValueError` if they or their arrays do not match."""
    if problem := _unlike(samples):
        raise ValueError(problem)
    codec = UNLIMITED if all(sample.support is None for sample in samples) else CODEC
    return codec.encode(*map(sample_row, samples))


def decode(value: Payload) -> Rollout:
    """Return the only sample in a payload. Raises `Unusable`."""
    return _single(decode_all(value))


def decode_all(value: Payload) -> tuple[Rollout, ...]:
    """Return the samples in a payload, at least one. Raises `Unusable`."""
    samples = tuple(sample_of(row, group=row["group"]) for row in CODEC.decode(value))
    problem = _unlike(samples)
    require(problem is None, problem or "")
    return samples


def headers(*samples: Rollout, run: str, attempt: int | None = None) -> Headers:
    """Return the headers of a record of these samples.

    Versions are the oldest and the newest of all, `tokens` counts what the policy generated; `outcome` is their finish, absent if they
    differ in it.
    """
    first, several = samples[0], len(samples) > 1
    finishes = {sample.finish for sample in samples}
    return Headers(
        run=run, schema=SEVERAL_SCHEMA if several else SCHEMA, group=first.group, sample=None if several else first.sample,
        policy_version_min=min(sample.version_min for sample in samples), policy_version_max=max(sample.version_max for sample in samples),
        outcome=first.finish if len(finishes) == 1 else None, worker=first.worker, attempt=attempt,
        samples=len(samples) if several else None, tokens=sum(len(generated(sample)) for sample in samples),
        sample_tokens=tuple((sample.sample, len(generated(sample))) for sample in samples) if several else None,
    )  # fmt: skip


def tokens_of(claims: Headers) -> dict[int, int]:
    """Return sample number -> generated tokens, from the headers returned by `check`."""
    if claims.sample_tokens is not None:
        return dict(claims.sample_tokens)
    assert claims.sample is not None
    return {claims.sample: claims.tokens or 0}


def check(record: Record, *, run: str) -> Headers:
    """Return the headers of a record of `run`, without decoding its payload. Raises `Unusable`."""
    several = ("schema", SEVERAL_SCHEMA.encode()) in record.headers
    schema, which = (SEVERAL_SCHEMA, "sample-tokens") if several else (SCHEMA, "sample")
    claims = one_of(read_headers(record.headers, record.value, run=run, schema=schema, required=(*_REQUIRED, which)), outcomes=FINISHES)
    if several and (claims.sample is not None or not _ascend(list(tokens_of(claims)), count=len(claims.sample_tokens or ()))):
        raise Unusable("header 'sample-tokens' must list the samples of a record in ascending order", kind="bad-header")
    return claims


def read(record: Record, *, run: str, checked: Headers | None = None) -> tuple[Headers, Rollout]:
    """Return headers and the sample of a record of `run` with one sample, as `read_all` does."""
    claims, samples = read_all(record, run=run, checked=checked)
    return claims, _single(samples)


def read_all(record: Record, *, run: str, checked: Headers | None = None) -> tuple[Headers, tuple[Rollout, ...]]:
    """Return headers and samples of a record of `run`, which must agree; `checked` are its headers from `check`. Raises `Unusable`."""
    claims = checked or check(record, run=run)
    samples = decode_all(record.value)
    expected = headers(*samples, run=run)
    match(claims, **{field: getattr(expected, field) for field in _FACTS})
    return claims, samples


def _unlike(samples: Sequence[Rollout]) -> str | None:
    """Return why samples cannot be one record; None if they can."""
    if not 1 <= len(samples) <= MAX_SAMPLES:
        return f"a record must contain 1 to {MAX_SAMPLES} samples, not {len(samples)}"
    first = samples[0]
    if any((sample.group, sample.worker) != (first.group, first.worker) for sample in samples):
        return f"samples of group {first.group} are mixed with samples of another group or worker"
    numbers = [sample.sample for sample in samples]
    return None if _ascend(numbers, count=len(samples)) else f"sample numbers {numbers[:8]} are not in ascending order"


def _ascend(numbers: Sequence[int], *, count: int) -> bool:
    return len(numbers) == count and all(low < high for low, high in pairwise(numbers))


def _single(samples: Sequence[Rollout]) -> Rollout:
    require(len(samples) == 1, f"{len(samples)} samples, expected one")
    return samples[0]
