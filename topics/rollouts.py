"""`rollouts`: finished samples: tokens, behaviour logprobs, loss mask, policy-version spans. Rollout workers -> scorers.

A record has one sample (`rollouts/1`) or several of one group (`rollouts/2`, the same columns with a row for each).
Acknowledgement, deduplication and regeneration work on single samples, so the headers name each one."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import pyarrow as pa

from penstock.topics.samples import FINISHES, SAMPLE_FIELDS, Finish, Rollout, generated, max_bytes_of, sample_of, sample_row
from penstock.topics.wire.codec import Codec
from penstock.topics.wire.columns import Payload
from penstock.topics.wire.errors import Unusable, require
from penstock.topics.wire.fields import column
from penstock.topics.wire.headers import Headers, match, one_of, read_headers
from penstock.topics.wire.record import Record

__all__ = ["CODEC", "FINISHES", "SCHEMA", "SEVERAL_SCHEMA", "Finish", "Rollout"]

SCHEMA = "rollouts/1"
SEVERAL_SCHEMA = "rollouts/2"
MAX_SAMPLES = 64
"""Largest number of samples in a record: their numbers and lengths must fit into one header."""
MAX_BYTES = 8 << 20
"""[bytes] Largest payload of a record with several samples: half of the largest record of the log."""
CODEC = Codec(SCHEMA, fields=(column("group", pa.int64()), *SAMPLE_FIELDS), max_rows=MAX_SAMPLES)
UNLIMITED = Codec(SCHEMA, fields=[field for field in CODEC.schema if field.name != "support"], max_rows=MAX_SAMPLES)
"""Codec of samples from the full vocabulary, without `support`: their bytes equal those of earlier releases."""
_REQUIRED = ("group", "policy-version-min", "policy-version-max")
_FACTS = (
    "schema", "group", "sample", "policy_version_min", "policy_version_max", "outcome", "worker", "samples", "tokens", "sample_tokens",
)  # fmt: skip


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
