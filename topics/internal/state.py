"""`state`: snapshot of the run view, so that a reader starts from the newest snapshot instead of offset 0.

It follows from the other topics: without a usable snapshot, readers read those from the start."""

from dataclasses import dataclass

from penstock.topics.catalogue import RUNS_TOPIC, TOPICS
from penstock.topics.wire.checked import MAX_COUNT, json_object, require_names
from penstock.topics.wire.codec import Codec, Format
from penstock.topics.wire.columns import Payload
from penstock.topics.wire.errors import require
from penstock.topics.wire.fields import fields_of

SCHEMA = "state/1"
KEY = b"view"
"""The key of every record: compaction retains the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The run view at some positions of the topics."""

    worker: str
    """The worker that wrote it."""
    positions: str
    """JSON: "TOPIC/PARTITION" -> offset of the first record that is not in `view`."""
    view: str
    """JSON: the view of a run, in the format of the release that wrote it."""


CODEC = Codec(SCHEMA, fields=fields_of(State))


def decode(value: Payload) -> State:
    """Return the snapshot in a payload. Raises `Unusable`."""
    (row,) = CODEC.decode(value)
    require_names(row, "worker")
    for name, offset in json_object(row["positions"], "positions").items():
        topic, _, partition = name.rpartition("/")
        valid = topic in (*TOPICS, RUNS_TOPIC) and partition.isascii() and partition.isdigit() and len(partition) < 7
        require(valid and type(offset) is int and 0 <= offset <= MAX_COUNT, f"positions have {name[:60]!r}, expected TOPIC/PARTITION")
    return State(**row)


_FORMAT = Format(CODEC, decode, lambda state: {"worker": state.worker}, ("worker",))
encode, headers, outgoing, check, read = _FORMAT.encode, _FORMAT.headers, _FORMAT.outgoing, _FORMAT.check, _FORMAT.read
