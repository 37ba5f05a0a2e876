"""`rollouts`: one finished sample: tokens, behaviour logprobs, loss mask, policy-version spans. Rollout workers -> scorers.

The oldest policy version of a sample is the one that counts; it stands in the header."""

import pyarrow as pa

from penstock.topics.samples import FINISHES, SAMPLE_FIELDS, Finish, Rollout, sample_of, sample_row
from penstock.topics.wire.codec import Codec
from penstock.topics.wire.columns import Payload
from penstock.topics.wire.fields import column
from penstock.topics.wire.headers import Headers, match, one_of, read_headers
from penstock.topics.wire.record import Record

__all__ = ["CODEC", "FINISHES", "SCHEMA", "Finish", "Rollout", "check", "decode", "encode", "headers", "read"]

SCHEMA = "rollouts/1"
CODEC = Codec(SCHEMA, fields=(column("group", pa.int64()), *SAMPLE_FIELDS))
_REQUIRED = ("group", "sample", "policy-version-min", "policy-version-max")


def encode(rollout: Rollout) -> bytes:
    """The payload of a sample; raises `ValueError` where its arrays do not fit together."""
    return CODEC.encode(sample_row(rollout))


def decode(value: Payload) -> Rollout:
    """The sample in a payload; raises `Unusable`."""
    (row,) = CODEC.decode(value)
    return sample_of(row, group=row["group"])


def headers(rollout: Rollout, *, run: str, attempt: int | None = None) -> Headers:
    """What a sample says on its outside; the outcome is how it finished."""
    return Headers(
        run=run,
        schema=SCHEMA,
        group=rollout.group,
        sample=rollout.sample,
        policy_version_min=rollout.version_min,
        policy_version_max=rollout.version_max,
        outcome=rollout.finish,
        worker=rollout.worker,
        attempt=attempt,
        tokens=len(rollout.token_ids),
    )


def check(record: Record, *, run: str) -> Headers:
    """The headers of a record of `run`, its payload untouched; raises `Unusable`."""
    return one_of(read_headers(record.headers, record.value, run=run, schema=SCHEMA, required=_REQUIRED), outcomes=FINISHES)


def read(record: Record, *, run: str, checked: Headers | None = None) -> tuple[Headers, Rollout]:
    """Headers and payload of a record of `run`, which must agree; raises `Unusable`. `checked` is what `check` has found already."""
    found = checked or check(record, run=run)
    rollout = decode(record.value)
    match(
        found,
        group=rollout.group,
        sample=rollout.sample,
        policy_version_min=rollout.version_min,
        policy_version_max=rollout.version_max,
        outcome=rollout.finish,
        worker=rollout.worker,
        tokens=len(rollout.token_ids),
    )
    return found, rollout
