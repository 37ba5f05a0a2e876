"""Trajectories in environment workers: turns travel through `calls` and `replies`, and the run is the same as in one process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.inspect.explain.as_json import explain
from penstock.pipeline.inspect.explain.text import as_page
from penstock.topics.turns import calls, replies
from tests.support.counting_run import counting_run
from tests.support.edited_run import EditedRun
from tests.support.listed_records import broken
from tests.support.worker_set import clean, complete, records_of

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
        clean(log, carrier)
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
    edited = EditedRun("log", [record for name in log.topics("log.") for record in records_of(log, name)])
    if change is not None:
        edited.alter(topic, change, where={})
    return broken(edited.audit({(topic, partition): begin for partition in range(log.partitions(f"log.{topic}") or 0)}))
