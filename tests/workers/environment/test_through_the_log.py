"""Trajectories in environment workers: turns travel through `calls` and `replies`, and the run is the same as in one process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.inspect.audit.report import as_text
from penstock.pipeline.inspect.audit.report import audit as audit_of
from penstock.pipeline.inspect.explain.as_json import explain
from penstock.pipeline.inspect.explain.text import as_page
from penstock.topics.turns import calls, replies
from tests.support.counting_run import counting_run
from tests.support.listed_records import Listed
from tests.support.worker_set import audited, complete, records_of

CODECS: dict[str, Any] = {"calls": calls, "replies": replies}
ROLES = ("trainer", "environment", "rollout", "scorer", "feeder")


def test_a_run_through_the_log_ends_in_the_same_weights_as_one_in_process(tiny_model: Path, tmp_path: Path) -> None:
    reports: dict[str, dict[str, Any]] = {}
    logs = {carrier: MemoryLog() for carrier in ("process", "log")}
    for carrier, log in logs.items():
        config = counting_run(
            tiny_model, tmp_path, environment={"carrier": carrier}, launch={"environments": 2}, rollout={"workers": 2},
            sampling={"max_new_tokens": 40},
        )  # fmt: skip
        roles = ROLES if carrier == "log" else tuple(role for role in ROLES if role != "environment")
        reports[carrier] = complete(log, carrier, config, roles=roles)
        audit = audited(log, carrier)
        assert audit.clean, as_text(audit)
    assert reports["log"]["weights"]["digest"] == reports["process"]["weights"]["digest"]
    asked = [calls.read(record, run="log")[1].key for record in records_of(logs["log"], "log.calls")]
    answered = [replies.read(record, run="log")[1].key for record in records_of(logs["log"], "log.replies")]
    assert len(set(answered)) == len(answered) and set(asked) == set(answered)
    assert broken_promises(logs["log"], "replies", lambda reply: replace(reply, token_ids=reply.token_ids + 1)) == {"turns-answered"}
    assert broken_promises(logs["log"], "calls", lambda call: replace(call, turn=call.turn + 9)) == {"replies-asked"}
    for topic in ("calls", "replies", "prompts", "rollouts"):
        assert broken_promises(logs["log"], topic, begin=2) == set()
    life = explain(logs["log"], "log", 0, notify=lambda _: None)
    times = life["samples"][0]["turn_times"]
    assert [time["turn"] for time in times] == list(range(len(times))) and times[0]["worker"].startswith("rollout-")
    assert "waited for engines" in as_page(life)
    played = reports["log"]["episodes"]
    assert played["trajectories"] == reports["process"]["episodes"]["trajectories"]
    assert len(answered) == round(played["turns_mean"] * played["trajectories"])


def broken_promises(log: MemoryLog, topic: str, change: Callable[[Any], Any] | None = None, *, begin: int = 0) -> set[str]:
    """The audit's checks that fail once the first record of a topic says something else, or each partition has lost those below `begin`."""
    records = [record for name in log.topics("log.") for record in records_of(log, name)]
    if change is not None:
        codec, at = CODECS[topic], next(number for number, record in enumerate(records) if record.topic == f"log.{topic}")
        held = change(codec.read(records[at], run="log")[1])
        value = codec.encode(held)
        records[at] = replace(records[at], value=value, headers=codec.headers(held, run="log").encode(value))
    begins = {(topic, partition): begin for partition in range(log.partitions(f"log.{topic}") or 0)}
    return {result.check.name for result in audit_of(Listed("log", records, begins=begins)).results if result.violations}
