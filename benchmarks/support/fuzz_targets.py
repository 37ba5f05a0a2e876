"""Targets of `python -m benchmarks fuzz`: each reads an input or raises what its reader declares."""

import contextlib
import io
import itertools
import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from penstock.infra.sandbox import parquet
from penstock.pipeline.agents.gateway.chat import BadRequest, chat_request
from penstock.pipeline.archive.archived_log import to_records
from penstock.pipeline.archive.files import FORMAT, note_of, options
from penstock.pipeline.archive.layout import KINDS, Kind
from penstock.pipeline.archive.rows import to_table
from penstock.pipeline.runtime.registration import run_registry
from penstock.topics import dead_letters, groups, ledger, metrics, prompts, rollouts, runs, weights
from penstock.topics.internal import owners, state
from penstock.topics.turns import calls, replies
from penstock.topics.wire.errors import NewerSchema, Unusable
from penstock.topics.wire.record import Record
from penstock.topics.wire.visible import visible
from tests.support.a_run import RecordBuilder, as_records
from tests.support.mutations import signed
from tests.support.strategies import EXAMPLES, a_group

SEPARATOR = b"\0\0\xff\0"
"""Between the headers of a record and its payload."""
MODULES: dict[str, Any] = {
    "prompts": prompts, "rollouts": rollouts, "calls": calls, "replies": replies, "weights": weights, "ledger": ledger,
    "metrics": metrics, "dead-letters": dead_letters, "runs": runs, "state": state, "owners": owners,
}  # fmt: skip
READERS: dict[str, Callable[[Record], object]] = {
    **{name: lambda record, module=module: module.read(record, run="r") for name, module in MODULES.items()},
    "rollouts": lambda record: rollouts.read_all(record, run="r"),
    "groups": lambda record: groups.read(record, run="r"),
    "weights-chunk": lambda record: weights.read_chunk(record, run="r"),
}
OTHERS = ("run-key", "gateway", "archive", "note", "text")
TARGETS = tuple(os.environ["TARGETS"].split(",")) if os.environ.get("TARGETS") else (*READERS, *OTHERS)
KEY = bytes(range(32))
GENUINE = run_registry.signed(EXAMPLES["runs"], KEY, revision=1)
FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-")
FILE = Path(FOLDER.name) / "a.parquet"
REPORT_EVERY = 50_000
NUMBERS = itertools.count()


def record_of(data: bytes, *, sign: bool) -> Record:
    """The record in an input: lines NAME=VALUE, the separator, the payload; with `sign`, a matching checksum."""
    text, _, value = data.partition(SEPARATOR)
    pairs = [line.partition(b"=") for line in text.split(b"\n") if line]
    headers = tuple((name.decode("latin-1"), content) for name, _, content in pairs)
    record = Record(topic="r.t", partition=0, offset=1, timestamp_ms=1, key=b"r", headers=headers, value=value)
    return signed(record) if sign else record


def input_of(headers: Any, value: bytes) -> bytes:
    """The seed of a genuine record."""
    lines = b"\n".join(name.encode() + b"=" + content for name, content in headers.encode(value))
    return lines + SEPARATOR + value


def seeds() -> list[bytes]:
    """At least one input of each target."""
    examples = {**EXAMPLES, "owners": owners.Owner(writer="trainer", token="t", kind="taken", host="here", time_ns=1)}
    inputs = {
        name: [(1, input_of(module.headers(examples[name], run="r"), module.encode(examples[name])))] for name, module in MODULES.items()
    }
    inputs["groups"] = [(1, input_of(*groups.encode_parts(a_group(), run="r", worker="w")[0]))]
    chunk = examples["weights-chunk"]
    inputs["weights-chunk"] = [(1, input_of(weights.chunk_headers(chunk, run="r"), weights.encode_chunk(chunk)))]
    inputs["run-key"] = [(1, input_of(runs.headers(GENUINE, run="r"), runs.encode(GENUINE)))]
    call = {"type": "function", "function": {"name": "f", "parameters": {}}}
    request = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": [call], "stop": ["x"], "max_tokens": 3, "n": 1}
    inputs["gateway"] = [(0, json.dumps(request).encode())]
    note = {"run": "r", "created_ns": 1, "partitions": {"groups": 1}, "begins": {"groups": [0]}, "ends": {}, "format": FORMAT}
    inputs["note"] = [(0, json.dumps(note).encode())]
    inputs["archive"] = [(number, parquet_of(kind)) for number, kind in enumerate(KINDS.values())]
    inputs["text"] = [(0, "a\x1b[2J\u202e".encode())]
    return [bytes([number, choice]) + data for number, name in enumerate(TARGETS) for choice, data in inputs[name]]


def parquet_of(kind: Kind) -> bytes:
    """A file of a table's first records."""
    records = [record for record in as_records(list(RecordBuilder("r", steps=1).whole())) if record.topic == kind.kafka_name("r")][:2]
    sink = io.BytesIO()
    pq.write_table(to_table(kind, records, run="r") if records else kind.schema.empty_table(), sink, **options(kind))
    return sink.getvalue()


def read(target: str, choice: int, data: bytes) -> None:
    """Read an input; a declared refusal passes, any other exception is raised."""
    if target == "gateway":
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):  # the server refuses it
            return
        with contextlib.suppress(BadRequest):
            chat_request(body)
    elif target == "archive":
        FILE.write_bytes(data)
        try:  # in the reader's child process, as pyarrow ends the process on some files
            parquet.footer(FILE)
            table = parquet.rows(FILE)
        except parquet.Refused:
            return
        with contextlib.suppress(ValueError):
            list(to_records(list(KINDS.values())[choice % len(KINDS)], table, run="r"))
    elif target == "note":
        with contextlib.suppress(ValueError):
            note_of(data)
    elif target == "run-key":
        with contextlib.suppress(Unusable, NewerSchema):
            _, record = runs.read(record_of(data, sign=True), run="r")
            signs = ("run", "created_ns", "revision", "config", "info", "mac")
            assert not run_registry.fits(record, KEY) or all(getattr(record, name) == getattr(GENUINE, name) for name in signs)
    elif target == "text":
        shown = visible(data.decode("utf-8", "surrogateescape"))
        assert shown == visible(shown)
        assert "\x1b" not in shown
    else:
        try:
            READERS[target](record_of(data, sign=bool(choice & 1)))
        except (Unusable, NewerSchema) as error:
            assert "\n" not in str(error)  # noqa: PT017


def one_input(data: bytes) -> None:
    """Try an input; called by libFuzzer."""
    number = next(NUMBERS)
    if number % REPORT_EVERY == 0:
        with open("/proc/self/statm") as statm:
            print(f"{number:,} inputs: {int(statm.read().split()[1]) * resource.getpagesize() >> 20} MiB resident", file=sys.stderr)
    if len(data) < 3:
        return
    target = TARGETS[data[0] % len(TARGETS)]
    read(target, data[1], data[2:])
