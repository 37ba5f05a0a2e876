"""examples/agent.py, unchanged: an agent of the official client whose tool is really called, and whose command a configuration names."""

import asyncio
import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.infra.engines.base import Sampling
from penstock.pipeline.agents.driver import Limits
from penstock.pipeline.agents.engine import open_episodes
from penstock.pipeline.agents.environments.sources import check_source
from penstock.pipeline.agents.record import EpisodeRequest, Trajectory
from penstock.pipeline.config.load import load
from penstock.pipeline.config.plugins import PluginError
from tests.support.chat_families import stop_ids, template
from tests.support.paths import EXAMPLES
from tests.support.scripted_policy import FAMILY, ScriptedPolicy

LIMITS = Limits(
    max_turns=4, turn_tokens=200, trajectory_tokens=4000, reset_timeout_s=60, step_timeout_s=60, trajectory_timeout_s=60,
    retries=0, replay=False,
)  # fmt: skip


def answer(context: str) -> str:
    """Calls the calculator once rightly and once with an argument missing, forgets the box, then gives it."""
    results = context.count("<tool_response>")
    if results < 2:
        arguments = {"expression": "2 * (3 + 4)"} if results == 0 else {}
        return "<tool_call>\n" + json.dumps({"name": "calculate", "arguments": arguments}) + "\n</tool_call>"
    return "It is \\boxed{14}." if "the number alone" in context else "It is 14."


@pytest.mark.costly  # the program imports the client
def test_the_example_calls_its_tool_and_is_one_trajectory() -> None:
    policy, losses = ScriptedPolicy(answer), list[str]()
    request = EpisodeRequest(
        group=0, prompt_ids=np.array([1], np.int32), samples=(0,), rows=1, seed=0, messages=None, prompt="What is 2 * (3 + 4)?",
        sampling=Sampling(max_new_tokens=200, stop_ids=tuple(stop_ids(FAMILY))), row={"answer": "14"},
    )  # fmt: skip
    source = load(EXAMPLES / "agent.toml").environment.source
    assert source is not None and str(EXAMPLES / "agent.py") in source

    async def play() -> Trajectory:
        episodes = await open_episodes(source, template=template(FAMILY), limits=LIMITS, processes=1, on_loss=losses.append)
        try:
            return await asyncio.wait_for(episodes.episode(request, 0, generate=policy, version=0).run(), 60)
        finally:
            await episodes.close()

    made = asyncio.run(play())
    messages: list[dict[str, Any]] = json.loads(made.messages)
    assert (made.finish, len(made.segments), losses) == ("stop", 1, []), made.turns[-1]
    assert [message["role"] for message in messages] == ["system", "user", *["assistant", "tool"] * 2, "assistant", "user", "assistant"]
    assert messages[3]["content"] == "14" and messages[5]["content"].startswith("error: write")
    assert messages[-1]["content"] == "It is \\boxed{14}."
    assert made.token_ids[made.loss_mask].tolist() == [token for _, ids, _ in policy.asked.values() for token in ids]


def test_the_examples_calculator_evaluates_arithmetic_alone() -> None:
    pytest.importorskip("openai")
    calculate = runpy.run_path(str(EXAMPLES / "agent.py"))["calculate"]
    assert calculate("2 * (3 + 4) - 1 / 2") == "13.5"
    for expression in ("__import__('os')", "9**9**9", "1/0", "(" * 500, "", "1 +"):
        assert calculate(expression).startswith("error: ")


def test_a_program_that_is_not_there_is_named_before_a_run_begins(tmp_path: Path) -> None:
    check_source("agent:python agent.py", rewards=())
    for source, reason in (("agent:", "names no program"), (f"agent:{tmp_path / 'none'} x", "is neither a command on PATH")):
        with pytest.raises(PluginError, match=reason):
            check_source(source, rewards=())
