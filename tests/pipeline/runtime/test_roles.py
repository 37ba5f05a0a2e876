"""The DAG's table agrees with the catalogue of topics, with the roles there are, and with what their modules read and write."""

import ast
import importlib.util
from pathlib import Path

import pytest

from penstock.pipeline.runtime import roles
from penstock.topics.catalogue import CONTROL, RUNS_TOPIC, STATE, TOPICS, TURNS
from tests.support.paths import ROOT


def test_every_topic_of_the_catalogue_is_in_the_graph() -> None:
    assert set(roles.TOPICS) == {*TOPICS, *TURNS, *CONTROL, STATE, RUNS_TOPIC}


@pytest.mark.parametrize("role", roles.ROLES.values(), ids=lambda role: role.name)
def test_a_role_has_a_module_with_a_main_and_known_topics(role: roles.Role) -> None:
    found = importlib.util.find_spec(role.module)
    assert found is not None and found.origin is not None
    functions = {node.name for node in ast.parse(Path(found.origin).read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}
    assert "main" in functions
    assert {*role.reads, *role.writes} <= set(roles.TOPICS)


def test_every_workers_folder_is_a_role() -> None:
    modules = {path.parent.name for path in (ROOT / "workers").glob("*/worker.py")}
    assert modules == set(roles.ROLES)


@pytest.mark.parametrize("role", roles.ROLES.values(), ids=lambda role: role.name)
def test_a_role_names_no_topic_that_its_row_lacks(role: roles.Role) -> None:
    tree = ast.parse((ROOT / "workers" / role.name / "worker.py").read_text(encoding="utf-8"))
    named = {
        argument.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "topic"
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }
    assert named <= {*role.reads, *role.writes}


@pytest.mark.parametrize("topic", [topic for topic in (*TOPICS, *TURNS) if topic not in ("run", "dead-letters")])
def test_what_is_written_is_read_by_somebody(topic: str) -> None:
    assert roles.writers(topic)
    assert roles.readers(topic)


def test_a_record_of_each_topic_has_one_kind_of_writer_save_reports() -> None:
    for topic in ("prompts", "calls", "replies", "groups", "weights", "ledger"):
        assert len(roles.writers(topic)) == 1, topic
    assert roles.writers("rollouts") == roles.generating_roles() == ["environment", "rollout"]


def test_the_text_and_the_chart_name_every_role_and_topic() -> None:
    text, chart = roles.as_text(), roles.as_mermaid()
    assert chart.startswith("flowchart LR\n")
    for name in (*roles.ROLES, *(topic for topic in TOPICS if topic != "dead-letters")):
        assert name in text
        assert f"{name}[" in chart or f"[({name})]" in chart


def test_the_chart_draws_an_arrow_for_what_flows() -> None:
    arrows = {line.strip() for line in roles.as_mermaid().splitlines() if "-->" in line}
    assert {"feeder --> t_prompts", "t_prompts --> rollout", "rollout --> t_rollouts", "t_rollouts --> scorer"} <= arrows
    assert {"scorer --> t_groups", "t_groups --> trainer", "trainer --> t_weights", "t_weights --> rollout"} <= arrows


def test_only_one_feeder_and_one_trainer_may_write_a_run() -> None:
    assert {role.name for role in roles.ROLES.values() if role.single} >= {"feeder", "trainer"}
    assert not roles.ROLES["rollout"].single and not roles.ROLES["scorer"].single
