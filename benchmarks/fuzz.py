"""Fuzzing by coverage: damaged records, headers, requests to the gateway of agents, and Parquet files of an archive.

    pip install atheris && make fuzz RUNS=1000000

Each input is refused with the error that its reader names, or read. Anything else, a hang or growing memory ends the run with status
1 and leaves the input in a file, which is repeated by `python benchmarks/fuzz.py FILE`. The seeds are made from one genuine record of
each kind; no corpus is kept.
"""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

with atheris.instrument_imports(include=["penstock.topics", "penstock.pipeline.archive", "penstock.pipeline.envs.agents.gateway"]):
    from penstock.pipeline.archive.layout import KINDS
    from penstock.pipeline.archive.restore import to_records
    from penstock.pipeline.envs.agents.gateway.chat import BadRequest, chat_request
    from penstock.topics import dead_letters, groups, ledger, metrics, prompts, rollouts, runs, weights
    from penstock.topics.turns import calls, replies
    from penstock.topics.upkeep import owners, state
    from penstock.topics.wire.errors import NewerSchema, Unusable
    from penstock.topics.wire.record import Record
    from penstock.topics.wire.visible import visible

import pyarrow as pa
import pyarrow.parquet as pq

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
OTHERS = ("gateway", "archive", "text")
TARGETS = (*READERS, *OTHERS)


def record_of(data: bytes, *, again: bool) -> Record:
    """The record in an input: lines NAME=VALUE, the separator, the payload; with `again`, a checksum that fits."""
    text, _, value = data.partition(SEPARATOR)
    pairs = [line.partition(b"=") for line in text.split(b"\n") if line]
    headers = tuple((name.decode("latin-1"), content) for name, _, content in pairs)
    record = Record(topic="r.t", partition=0, offset=1, timestamp_ms=1, key=b"r", headers=headers, value=value)
    return signed(record) if again else record


def input_of(target: str, headers: Any, value: bytes) -> bytes:
    """The seed of a genuine record."""
    lines = b"\n".join(name.encode() + b"=" + content for name, content in headers.encode(value))
    return bytes([TARGETS.index(target), 1]) + lines + SEPARATOR + value


def seeds() -> list[bytes]:
    """One input of each target, or more."""
    examples = {**EXAMPLES, "owners": owners.Owner(writer="trainer", token="t", kind="taken", host="here", time_ns=1)}
    found = [input_of(name, module.headers(examples[name], run="r"), module.encode(examples[name])) for name, module in MODULES.items()]
    found.append(input_of("groups", *groups.encode_parts(a_group(), run="r", worker="w")[0]))
    chunk = examples["weights-chunk"]
    found.append(input_of("weights-chunk", weights.chunk_headers(chunk, run="r"), weights.encode_chunk(chunk)))
    call = {"type": "function", "function": {"name": "f", "parameters": {}}}
    request = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": [call], "stop": ["x"], "max_tokens": 3, "n": 1}
    found.append(bytes([TARGETS.index("gateway"), 0]) + json.dumps(request).encode())
    for number, kind in enumerate(KINDS.values()):
        sink = io.BytesIO()
        pq.write_table(kind.schema.empty_table(), sink)
        found.append(bytes([TARGETS.index("archive"), number]) + sink.getvalue())
    found.append(bytes([TARGETS.index("text"), 0]) + "a\x1b[2J\u202e".encode())
    return found


def read(target: str, choice: int, data: bytes) -> None:
    """Read an input, or have it refused; raises what no reader may raise."""
    if target == "gateway":
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):  # the server refuses what is no JSON
            return
        with contextlib.suppress(BadRequest):
            chat_request(body)
    elif target == "archive":
        try:
            table = pq.read_table(pa.BufferReader(data))
        except (pa.ArrowException, OSError):
            return
        with contextlib.suppress(ValueError):
            list(to_records(list(KINDS.values())[choice % len(KINDS)], table, run="r"))
    elif target == "text":
        shown = visible(data.decode("utf-8", "surrogateescape"))
        assert shown == visible(shown)
        assert "\x1b" not in shown
    else:
        try:
            READERS[target](record_of(data, again=bool(choice & 1)))
        except (Unusable, NewerSchema) as error:
            assert "\n" not in str(error)  # noqa: PT017


def one_input(data: bytes) -> None:
    """The function that is called for each input."""
    if len(data) < 3:
        return
    target = TARGETS[data[0] % len(TARGETS)]
    read(target, data[1], data[2:])


def main() -> None:
    """Fuzz until libFuzzer's `-runs` are done; options are libFuzzer's."""
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(seeds()):
            (Path(folder) / f"{number:02d}").write_bytes(seed)
        given = sys.argv[1:]
        corpus = [] if any(not word.startswith("-") for word in given) else [folder]
        limits = ["-timeout=10", "-rss_limit_mb=2048", "-max_len=65536", "-print_final_stats=1", "-verbosity=1"]
        atheris.Setup([sys.argv[0], *limits, *given, *corpus], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
