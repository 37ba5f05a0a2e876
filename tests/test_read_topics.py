"""The shipped foreign client reads a run without our code."""

import ast
import subprocess
import sys
from pathlib import Path

from penstock.infra.broker.access import LOGIN_FILE
from penstock.infra.kafka.log import KafkaLog
from penstock.topics import groups
from penstock.topics.catalogue import CONTROL, topics_of
from tests.support import page_records
from tests.support.a_run import RecordBuilder, with_group

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "read_topics.py"


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
    builder = RecordBuilder(run_id)
    built = builder.group([1.0, 0.0, 0.5], version=0)
    parts = with_group(built[-1], groups.decode(built[-1].value), run=run_id, max_bytes=1)
    again = builder.group([0.25, 0.75], version=0)
    log = KafkaLog(broker, client_id="test")
    log.create_topics(topics_of(run_id, partitions=2))
    log.transactions(f"{run_id}.scorer-0").commit(parts)
    page_records.write(log, [*built[:-1], builder.opened(), *again, again[-1]])
    log.close()
    command = [sys.executable, str(EXAMPLE), broker, run_id, str(penstock_home / "broker" / LOGIN_FILE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {
        f"{run_id}.prompts: 2 records", f"{run_id}.rollouts: 5 records", f"{run_id}.groups: 5 records", f"{run_id}.ledger: 1 records",
        f"{run_id}.weights: 0 records", f"{run_id}.metrics: 0 records", f"{run_id}.dead-letters: 0 records",
        *(f"{run_id}.{topic}: 0 records" for topic in CONTROL),
        f"{run_id}.run: 0 records", f"{run_id}.state: 0 records",
        "group 0: rewards 1.0 0.0 0.5", "group 1: rewards 0.25 0.75",
    }  # fmt: skip
