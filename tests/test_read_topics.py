"""The wire format as it is documented: the columns are the codecs', and the shipped foreign client reads a run without our code."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.infra.broker.login import FILE
from penstock.infra.kafka.log import KafkaLog
from penstock.topics import dead_letters, groups, ledger, metrics, prompts, rollouts, runs, weights
from penstock.topics.catalogue import CONTROL, topics_of
from penstock.topics.samples import SAMPLE_FIELDS
from penstock.topics.upkeep import owners, state
from penstock.topics.wire.record import Outgoing
from tests.support.a_run import Teller

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "read_topics.py"
DOCUMENT = (ROOT / "docs" / "reference" / "topics.md").read_text(encoding="utf-8")
SAMPLE = "Columns of a sample"
CODECS = {
    codec.name: codec.schema
    for codec in (
        prompts.CODEC, rollouts.CODEC, groups.CODEC, ledger.CODEC, weights.CODEC, weights.CHUNK_CODEC, metrics.CODEC, dead_letters.CODEC,
        owners.CODEC, runs.CODEC, state.CODEC,
    )
}  # fmt: skip


def documented(title: str) -> list[tuple[str, str]]:
    """Column and type of each row of the table below a heading."""
    section = re.split(r"^##+ ", DOCUMENT.partition(f"### {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^\| `([\w.]+)` \| (.*?) \|", section, re.MULTILINE)


def columns_of(fields: Iterator[pa.Field] | pa.Schema | tuple[pa.Field, ...], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Column and type of each field, those of structs below their own."""
    for field in fields:
        yield prefix + field.name, described(field)
        inner = field.type.value_type if pa.types.is_list(field.type) else field.type
        if pa.types.is_struct(inner):
            yield from columns_of(tuple(inner), f"{prefix}{field.name}.")


def described(field: pa.Field) -> str:
    return named(field.type) + (" or null" if field.nullable else "")


def named(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"list of {described(kind.value_field)}"
    if pa.types.is_map(kind):
        return f"map of {kind.key_type} to {named(kind.item_type)}"
    return "struct" if pa.types.is_struct(kind) else str(kind)


@pytest.mark.parametrize("schema", [*CODECS, SAMPLE])
def test_the_documented_columns_are_those_of_the_codec(schema: str) -> None:
    said = documented(f"`{schema}`" if schema in CODECS else schema)
    expected = list(columns_of(CODECS.get(schema, SAMPLE_FIELDS)))
    shared = list(columns_of(SAMPLE_FIELDS))
    if schema == rollouts.SCHEMA:
        said += shared
    if schema == groups.SCHEMA:
        within = [(f"samples.{name}", kind) for name, kind in shared]
        expected = [column for column in expected if column not in within]
        assert len(expected) == len(list(columns_of(groups.CODEC.schema))) - len(within)
    assert said == expected


def test_every_header_is_documented() -> None:
    from penstock.topics.wire.headers import CHECKSUM, Headers

    names = {name.replace("_", "-") for name in Headers.__dataclass_fields__} | {CHECKSUM}
    assert {name for name in names if f"`{name}`" in DOCUMENT} == names


def test_the_foreign_client_is_short_and_imports_none_of_our_code() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(("import", "from", '"""'))]
    assert len(lines) <= 25
    imported = {name.name.partition(".")[0] for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module.partition(".")[0] for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.module}
    assert imported == {"sys", "collections", "pyarrow", "confluent_kafka"}


def test_the_foreign_client_counts_a_repeated_sample_once_and_joins_the_parts_of_a_group(
    broker: str, run_id: str, penstock_home: Path
) -> None:
    teller = Teller(run_id)
    told = teller.group([1.0, 0.0, 0.5], version=0)
    whole = groups.decode(told[-1].value)
    parts = [
        Outgoing(topic=f"{run_id}.groups", partition=0, key=b"0", headers=headers.encode(value), value=value)
        for headers, value in groups.encode_parts(whole, run=run_id, worker="scorer-0", max_bytes=1)
    ]
    again = teller.group([0.25, 0.75], version=0)
    log = KafkaLog(broker, client_id="test")
    log.create_topics(topics_of(run_id, partitions=2))
    log.transactions(f"{run_id}.scorer-0").commit(parts)
    producer = log.producer()
    for record in [*told[:-1], teller.opened(), *again, again[-1]]:
        producer.send(record)
    producer.flush(30.0)
    log.close()
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), broker, run_id, str(penstock_home / "broker" / FILE)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {
        f"{run_id}.prompts: 2 records", f"{run_id}.rollouts: 5 records", f"{run_id}.groups: 5 records", f"{run_id}.ledger: 1 records",
        f"{run_id}.weights: 0 records", f"{run_id}.metrics: 0 records", f"{run_id}.dead-letters: 0 records",
        *(f"{run_id}.{topic}: 0 records" for topic in CONTROL),
        f"{run_id}.run: 0 records", f"{run_id}.state: 0 records",
        "group 0: rewards 1.0 0.0 0.5", "group 1: rewards 0.25 0.75",
    }  # fmt: skip
