"""`<run>.run`: definition of a run, one record. `penstock.runs`: its status by run id, compacted. Launcher, trainer -> every worker.

A worker starts with a broker's address and a run id and reads everything else from the run's own topic. Both topics have one schema; a
record in `penstock.runs` has no configuration, except in earlier releases, and configures nothing."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from penstock.topics.catalogue import is_run_id
from penstock.topics.wire.checked import MAX_COUNT, json_object, require_whole
from penstock.topics.wire.codec import Codec, Format
from penstock.topics.wire.columns import Payload
from penstock.topics.wire.errors import require
from penstock.topics.wire.fields import fields_of
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import Record
from penstock.topics.wire.secrets import without_passwords

SCHEMA = "runs/1"
Status = Literal["created", "running", "finished", "stopped", "failed"]
STATUSES: tuple[Status, ...] = get_args(Status)
ENDED: tuple[Status, ...] = ("finished", "stopped", "failed")
"""Statuses of a run to which no more records are written, unless it is resumed."""


NOTHING = "{}"
"""The configuration in a record that has only a run's status."""
PARENTS = {"rescored_from": "re-scored from", "regraded_from": "regraded from", "forked_from": "forked from"}
"""Key of a run's info that names its parent -> its name for users. A copied info has those of earlier runs too: readers use the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Configuration and status of a run; the record's key is the run id."""

    run: str
    status: Status
    """`created`, `running`, `finished`, `stopped` or `failed`."""
    config: str
    """JSON: the full configuration, without passwords."""
    info: str
    """JSON: digests of tokenizer, template and stop ids; the reason of a failure."""
    created_ns: int
    updated_ns: int
    """Time of the newest status."""
    revision: int | None = None
    """Number of this record among those signed with the run's key, from 1; None without a signature."""
    mac: str | None = None
    """HMAC-SHA256 (hex) under the run's key over run, revision, created_ns, config and info; None without a key."""


CODEC = Codec(SCHEMA, fields=fields_of(RunRecord))


def status_of(record: RunRecord) -> RunRecord:
    """Return the record for the shared topic `penstock.runs`, without the configuration: no value in it is executed or names a file."""
    steps = {name: value for name, value in json.loads(record.info).items() if name == "steps"}
    return replace(record, config=NOTHING, info=json.dumps(steps), revision=None, mac=None)


def with_status(made: RunRecord, status: RunRecord) -> RunRecord:
    """Return a run's definition `made` with the status and its time from another record of the run."""
    return replace(made, status=status.status, updated_ns=status.updated_ns)


def decode(value: Payload) -> RunRecord:
    """Return the run's record in a payload. Raises `Unusable`."""
    (row,) = CODEC.decode(value)
    require(row["status"] in STATUSES, f"status is {row['status'][:60]!r}, expected one of {', '.join(STATUSES)}")
    require_whole(row, "created_ns", "updated_ns", "revision")
    require(is_run_id(row["run"]), f"run is {row['run'][:60]!r}, which is not a run id")
    _check_config(json_object(row["config"] or NOTHING, "config"))
    _check_info(json_object(row["info"] or NOTHING, "info"))
    return RunRecord(**{**row, "config": without_passwords(row["config"] or NOTHING), "info": row["info"] or NOTHING})


def _check_config(config: dict[str, Any]) -> None:
    """Raise `Unusable` for a value that is not the tables of a configuration."""
    flat = [name for name, table in config.items() if not isinstance(table, dict)]
    require(not flat, f"config has {flat[:1]} where a table belongs")
    path = config.get("model", {}).get("path", "")
    require(isinstance(path, str), f"config has a model.path of {type(path).__name__}, expected a text")


def _check_info(info: dict[str, Any]) -> None:
    """Raise `Unusable` unless `steps`, `versions` and `prompts` are counts and the parent is a run id, as readers expect."""
    for name in ("steps", "versions", "prompts"):
        value = info.get(name)
        sound = value is None or (type(value) is int and 0 <= value <= MAX_COUNT)
        require(sound, f"info has {name} = {str(value)[:60]}, expected a whole number")
    for name in PARENTS:
        parent = info.get(name)
        run = parent.get("run") if isinstance(parent, dict) else None
        require(parent is None or (isinstance(run, str) and is_run_id(run)), f"info has {name} = {str(parent)[:60]}, expected a run id")


def parent(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run whose records or weights this run was made from, with `relation`, step and digest; {} without a parent."""
    return next(({"relation": relation, **info[name]} for name, relation in PARENTS.items() if info.get(name)), {})


def headers(record: RunRecord, *, run: str | None = None) -> Headers:
    """Return the headers of a run's record; `outcome` is its status."""
    return Headers(run=record.run if run is None else run, schema=SCHEMA, outcome=record.status)


_FORMAT = Format(CODEC, decode, lambda record: {"run": record.run, "outcome": record.status}, outcomes=STATUSES)
encode, check = _FORMAT.encode, _FORMAT.check


def read(record: Record, *, run: str | None = None) -> tuple[Headers, RunRecord]:
    """Return headers and payload of a run's record, which must agree; of any run if `run` is None. Raises `Unusable`."""
    expected = run if run is not None else (record.key or b"").decode("ascii", "replace")
    require(is_run_id(expected), f"run is {expected[:60]!r}, which is not a run id")
    return _FORMAT.read(record, run=expected)
