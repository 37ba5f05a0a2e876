"""Each ledger entry has the digest of the one before, and lists the evaluations that the trainer has read since: each once."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.infra.log import Log
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.learner.ledger_history import read_ledger_history
from penstock.topics import ledger, metrics
from penstock.topics.catalogue import control_topic
from penstock.topics.metrics import Measurement
from tests.support.a_run import outgoing
from tests.support.trainer_alone import config_for, group_of, killed, trained, write_groups, written
from tests.support.worker_set import records_of

RUN = "chained"


def evaluate(log: Log, version: int) -> str:
    """Write the evaluation of a version as an evaluator does; returns the digest of its payload."""
    who = {"worker": "evaluator", "role": "evaluator", "incarnation": "a"}
    measurement = Measurement(**who, seq=version, kind="eval", time_ns=1, version=version, values={"n": 8.0})  # type: ignore[arg-type]
    sent = outgoing(metrics, measurement, run=RUN, key=f"evaluator/eval/{version}".encode())
    log.producer().send(replace(sent, topic=control_topic(RUN, "evaluator")))
    return ledger.digest(sent.value)


@pytest.mark.usefixtures("checkpoints_at_once")
@pytest.mark.parametrize(
    "deaths",
    [(), ("ledger.step.before:2", "ledger.step.after:2"), ("ledger.version.after:3", "checkpoint.renamed:1")],
    ids=["undisturbed", "at steps", "at a version and a checkpoint"],
)
def test_evaluations_are_listed_once_and_in_order_however_often_the_trainer_is_killed(
    tiny_model: Path, tmp_path: Path, deaths: tuple[str, ...]
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    config = config_for(tiny_model, tmp_path, trainer={"checkpoint_dir": str(tmp_path)}, eval={"source": str(held_out)})
    log, groups = MemoryLog(), [group_of(number, version=6) for number in range(12)]
    written(log, RUN, config, groups[:6])
    evaluations = [evaluate(log, 0)]
    for number, fault in enumerate(deaths, start=1):
        killed(log, RUN, fault)
        evaluations.append(evaluate(log, number))
    write_groups(log, RUN, groups[6:], partitions=2)
    assert trained(log, RUN)["status"] == "finished"
    entries = read_ledger_history(log, RUN).entries
    assert [sha256 for entry in entries for sha256 in ledger.evaluations(entry)] == evaluations
    values = [record.value for record in records_of(log, f"{RUN}.ledger")]
    assert read_ledger_history(log, RUN).ledger_state.end == {"head": ledger.digest(values[-1]), "entries": len(values)}
