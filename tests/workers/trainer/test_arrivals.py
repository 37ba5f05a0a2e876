"""Who may end a run: an evaluation where the owner has set early stopping, the feeder where epochs end the run; nobody else."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.pipeline.runtime.roles import acl_rules
from penstock.topics import metrics
from penstock.topics.metrics import Measurement
from penstock.workers.trainer.inbox import Arrivals
from tests.support.a_run import outgoing, stored

STOP = {"ask": "stop", "reason": "good enough"}


def arrivals(*, early: bool = True, role: str = "evaluator", epochs: int | None = 1) -> Arrivals:
    config = SimpleNamespace(run=SimpleNamespace(epochs=epochs), stops_early=early, evaluating_role=role)
    session = SimpleNamespace(run="r", config=config, dead_letters=SimpleNamespace(decoding=lambda _: nullcontext()), topic="r.{}".format)
    rated: list[Any] = []
    checkpoints = SimpleNamespace(rate=lambda *said: rated.append(said))
    writer = SimpleNamespace(state=SimpleNamespace(manifests={}), checkpoints=checkpoints, rated=rated)
    selector = SimpleNamespace(finished_groups=3)
    return Arrivals(cast("Any", session), cast("Any", writer), cast("Any", SimpleNamespace(selector=selector)), cast("Any", None), [], {})


def heard(
    found: Arrivals, *, worker: str, role: str, kind: str = "eval", version: int | None = 1, topic: str | None = None, **said: Any
) -> Arrivals:
    measurement = Measurement(worker=worker, role=role, incarnation="a", seq=0, kind=cast("Any", kind), time_ns=1, version=version, **said)
    found._receive(replace(stored(outgoing(metrics, measurement, run="r")), topic=f"r.{topic or f'control-{role}'}"))
    return found


@pytest.mark.parametrize("role", ["evaluator", "rollout"])
def test_the_role_that_evaluates_may_end_a_run_whose_owner_wants_early_stopping(role: str) -> None:
    worker = "evaluator" if role == "evaluator" else "rollout-0"
    assert heard(arrivals(role=role), worker=worker, role=role, labels=STOP).end_reason == "good enough"


@pytest.mark.parametrize(
    ("early", "worker", "role", "kind", "version"),
    [
        (False, "evaluator", "evaluator", "eval", 1),
        (True, "tracker", "tracker", "eval", 1),
        (True, "scorer-0", "scorer", "eval", 1),
        (True, "rollout-0", "rollout", "eval", 1),
        (True, "tracker", "evaluator", "eval", 1),
        (True, "evaluators", "evaluator", "eval", 1),
        (True, "feeder", "feeder", "eval", 1),
        (True, "trainer", "trainer", "eval", 1),
        (True, "evaluator", "evaluator", "status", 1),
        (True, "evaluator", "evaluator", "final", 1),
        (True, "evaluator", "evaluator", "eval", None),
    ],
)
def test_nobody_else_ends_a_run_or_chooses_its_best_checkpoint(early: bool, worker: str, role: str, kind: str, version: int | None) -> None:
    found = heard(arrivals(early=early), worker=worker, role=role, kind=kind, version=version, labels=STOP, values={"greedy_accuracy": 1.0})
    assert found.end_reason is None
    assert bool(cast("Any", found.writer).rated) == (not early)


@pytest.mark.parametrize("evaluating", ["evaluator", "rollout"])
@pytest.mark.parametrize("user", [role for role in acl_rules("r") if role != "trainer"])
def test_a_user_ends_no_run_by_what_another_role_says_in_a_topic_that_it_may_write(user: str, evaluating: str) -> None:
    rules = [rule for rule in acl_rules("r")[user] if (rule.resource, rule.operation) == ("topic", "WRITE")]
    values = {"all_out": 1.0, "admitted": 3.0, "greedy_accuracy": 1.0}
    for topic in {rule.name.removeprefix("r.") for rule in rules} - {"groups"}:  # in that one it is no outcome, which has another schema
        for role in {"feeder", evaluating} - {user}:
            worker = "rollout-0" if role == "rollout" else role
            found = heard(arrivals(role=evaluating), worker=worker, role=role, labels=STOP, values=values, topic=topic)
            assert (found.no_more, found.end_reason, cast("Any", found.writer).rated) == (False, None, [])


@pytest.mark.parametrize(
    ("epochs", "worker", "role", "values", "ends"),
    [
        (1, "feeder", "feeder", {"all_out": 1.0, "admitted": 3.0}, True),
        (1, "feeder", "feeder", {"all_out": 1.0, "admitted": 4.0}, False),
        (1, "feeder", "feeder", {"all_out": 0.0, "admitted": 3.0}, False),
        (1, "feeder", "feeder", {"all_out": 1.0}, False),
        (1, "feeder", "feeder", {"all_out": 1.0, "admitted": float("nan")}, False),
        (1, "feeder", "feeder", {"all_out": 1.0, "admitted": -5.0}, False),
        (1, "feeder", "feeder", {"all_out": float("nan"), "admitted": 3.5}, False),
        (None, "feeder", "feeder", {"all_out": 1.0, "admitted": 3.0}, False),
        (1, "tracker", "tracker", {"all_out": 1.0, "admitted": 3.0}, False),
        (1, "tracker", "feeder", {"all_out": 1.0, "admitted": 3.0}, False),
        (1, "rollout-0", "rollout", {"all_out": 1.0, "admitted": 3.0}, False),
    ],
)
def test_the_feeder_alone_says_that_no_prompt_follows(epochs: int | None, worker: str, role: str, values: Any, ends: bool) -> None:
    found = heard(arrivals(epochs=epochs), worker=worker, role=role, kind="status", version=None, values=values)
    assert found.no_more is ends
