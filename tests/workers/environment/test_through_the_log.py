"""Trajectories in environment workers: turns travel through `calls` and `replies`, and the run is the same as in one process."""

from pathlib import Path
from typing import Any

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.audit.report import as_text
from penstock.topics.turns import calls, replies
from tests.support.counting_run import counting_run
from tests.support.crew import audited, complete, records_of

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
    played = reports["log"]["episodes"]
    assert played["trajectories"] == reports["process"]["episodes"]["trajectories"]
    assert len(answered) == round(played["turns_mean"] * played["trajectories"])
