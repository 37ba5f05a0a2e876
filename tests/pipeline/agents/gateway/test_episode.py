"""An agent's program as a trajectory: it runs unchanged, with a key of its own; when it fails, it is no reward of zero."""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.infra.engines.base import Sampling
from penstock.pipeline.agents.driver import Limits
from penstock.pipeline.agents.gateway import episode
from penstock.pipeline.agents.gateway.episode import AgentClock, AgentEpisode, Gateway, command_of, version_of
from penstock.pipeline.agents.record import EpisodeRequest, Generation, Trajectory
from tests.support.chat_families import stop_ids, template
from tests.support.children import end_in_time, runs, time_that_passes_after
from tests.support.scripted_policy import FAMILY, ScriptedPolicy

pytestmark = pytest.mark.costly  # starts processes

ASK = """
import json, os, sys, urllib.request
def post(path, body):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request))
def ask(messages):
    return post("/chat/completions", {"model": "m", "messages": messages})["choices"][0]["message"]
row = json.loads(sys.stdin.readline())
messages = [{"role": "user", "content": row["prompt"]}]
"""
PLAY = """
for _ in range(2):
    messages += [ask(messages), {"role": "user", "content": "Sure?"}]
post("/reward", {"reward": float(row["answer"] in messages[-2]["content"])})
"""
LIMITS = Limits(
    max_turns=5, turn_tokens=100, trajectory_tokens=1000, reset_timeout_s=120, step_timeout_s=120, trajectory_timeout_s=120,
    retries=0, replay=False,
)  # fmt: skip
SAMPLING = Sampling(max_new_tokens=100, stop_ids=tuple(stop_ids(FAMILY)))


def request(**columns: Any) -> EpisodeRequest:
    return EpisodeRequest(
        group=3, prompt_ids=np.array([1, 2], np.int32), samples=(0,), rows=1, seed=1, sampling=SAMPLING,
        messages=None, prompt="What is 3 + 4?", row={"answer": "seven", **columns},
    )  # fmt: skip


def play(
    tmp_path: Path, code: str, *, policy: Any = None, limits: Limits = LIMITS, says: list[str] | None = None, **columns: Any
) -> Trajectory:
    file = tmp_path / "agent.py"
    file.write_text(ASK + code, encoding="utf-8")

    async def main() -> Trajectory:
        gateway = Gateway()
        episode = AgentEpisode(
            request=request(**columns), sample=0, seed=5, source=f"agent:{sys.executable} {file}", template=template(FAMILY),
            gateway=gateway, programs=asyncio.Semaphore(1), limits=limits,
            generate=policy or ScriptedPolicy(lambda _: "It is seven."),
            on_loss=(says if says is not None else []).append,
        )  # fmt: skip
        try:
            return await asyncio.wait_for(episode.run(), 60)
        finally:
            await gateway.close()

    return asyncio.run(main())


def test_a_program_becomes_a_trajectory_with_its_turns_messages_and_reward(tmp_path: Path) -> None:
    policy = ScriptedPolicy(lambda _: "It is seven.")
    made = play(tmp_path, PLAY, policy=policy)
    assert made.finish == "stop"
    assert [(turn.source, turn.reward) for turn in made.turns] == [("prompt", None), ("model", None), ("user", None), ("model", 1.0)]
    assert made.token_ids[made.loss_mask].tolist() == [i for _, ids, _ in policy.asked.values() for i in ids]
    assert [message["role"] for message in json.loads(made.messages)] == ["user", "assistant", "user", "assistant"]
    assert (made.environment_seed, made.segments) == (5, ((0, len(made.token_ids), made.turns[0].end),))
    assert 0 < made.environment_s < 200


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (
            "ask(messages)\nraise KeyError('no such tool')",
            "environment-exit: the agent exited with exit status 1: KeyError: 'no such tool'",
        ),
        ("os.kill(os.getpid(), 9)", "environment-exit: the agent exited with signal SIGKILL"),
        ("", "environment-exit: the agent exited without a request"),
    ],
)
def test_a_program_that_fails_is_an_aborted_sample_with_its_cause(tmp_path: Path, code: str, cause: str) -> None:
    made = play(tmp_path, code)
    assert made.finish == "abort"
    assert (made.turns[-1].source, made.turns[-1].reward) == ("environment", None)
    assert made.turns[-1].finish.startswith(cause)


def test_a_program_that_fails_once_is_run_again_from_the_beginning(tmp_path: Path) -> None:
    says: list[str] = []
    mark = f"mark = pathlib.Path({str(tmp_path / 'mark')!r})"
    code = f"import pathlib\n{mark}\nif not mark.exists():\n    mark.touch()\n    ask(messages)\n    sys.exit(3)\n{PLAY}"
    made = play(tmp_path, code, limits=replace(LIMITS, retries=1), says=says)
    assert (made.finish, sum(turn.source == "model" for turn in made.turns)) == ("stop", 2)
    assert says == ["environment-exit: the agent exited with exit status 3; retrying"]


class OftenReadClock(AgentClock):
    """An episode reads it again soon, as its time may jump."""

    def remaining_s(self, limits: Limits) -> float | None:
        remaining_s = super().remaining_s(limits)
        return None if remaining_s is None else min(remaining_s, 0.05)


@pytest.mark.parametrize(("code", "limit"), [("", "until its first request"), ("ask(messages)\n", "after a turn")])
def test_a_program_that_is_silent_is_killed_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, limit: str
) -> None:
    file = tmp_path / "child"
    code += "import subprocess, time\nchild = subprocess.Popen(['sleep', '600'])\n"
    code += f"open({str(file)!r}, 'w').write(str(child.pid))\ntime.sleep(600)"
    passes = time_that_passes_after(lambda: file.exists() and bool(file.read_text()))
    monkeypatch.setattr(episode, "AgentClock", lambda: OftenReadClock(passes.monotonic))
    made = play(tmp_path, code)
    assert made.finish == "abort" and "environment-timeout: " in made.turns[-1].finish and limit in made.turns[-1].finish
    assert end_in_time(int(file.read_text()))


def test_time_in_which_the_policy_draws_is_not_the_agents() -> None:
    now = [0.0]
    clock, limits = AgentClock(lambda: now[0]), replace(LIMITS, reset_timeout_s=9, step_timeout_s=4, trajectory_timeout_s=10)

    def after(seconds: float, drawing: bool | None = None) -> float | None:
        now[0] += seconds
        if drawing is not None:
            clock.note(drawing)
        return clock.remaining_s(limits)

    assert after(2) == 7
    assert after(0, True) is None
    assert after(100, True) is None  # a second one beside it
    assert after(100, False) is None
    assert after(100, False) == 4
    assert after(1) == 3
    assert after(2, True) is None
    assert after(50, False) == 4
    assert after(3.5) == 0.5
    assert after(0, True) is None
    assert after(50, False) == 1.5  # of 10 s in all
    assert after(9) == 0


def test_a_turn_that_the_policy_gives_up_ends_the_trajectory_though_the_agent_goes_on(tmp_path: Path) -> None:
    async def tired(*_: Any, **__: Any) -> Generation:
        return Generation(np.array([5, 6], np.int32), np.array([-1, -1], np.float32), np.array([1, 1], np.int32), "abort")

    made = play(tmp_path, "import time\ntry:\n    ask(messages)\nexcept Exception:\n    time.sleep(600)", policy=tired)
    assert (made.finish, made.turns[-1].source, made.turns[-1].finish) == ("abort", "model", "abort")


@pytest.mark.parametrize("closed", [False, True], ids=["its trajectory ends", "the endpoint closes before"])
def test_a_program_does_not_outlive_its_trajectory(tmp_path: Path, closed: bool) -> None:
    file = tmp_path / "agent.py"
    file.write_text(f"{ASK}\nopen({str(tmp_path / 'id')!r}, 'w').write(str(os.getpid()))\nask(messages)", encoding="utf-8")

    async def main() -> None:
        gateway, asked = Gateway(), asyncio.Event()

        async def never(*_: Any, **__: Any) -> Generation:
            asked.set()
            return await asyncio.get_running_loop().create_future()

        episode = AgentEpisode(
            request=request(), sample=0, seed=5, source=f"agent:python {file}", template=template(FAMILY), gateway=gateway,
            programs=asyncio.Semaphore(1), limits=LIMITS, generate=never,
        )  # fmt: skip
        running = asyncio.create_task(episode.run())
        await asyncio.wait_for(asked.wait(), 120)
        if closed:
            await gateway.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert not runs(int((tmp_path / "id").read_text()))
        if not closed:
            await gateway.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_trajectory_that_meets_its_turn_limit_is_truncated(tmp_path: Path) -> None:
    code = "try:\n    while True:\n        messages += [ask(messages), {'role': 'user', 'content': 'Sure?'}]\nexcept Exception:\n    pass"
    made = play(tmp_path, code)
    assert (made.finish, sum(turn.source == "model" for turn in made.turns)) == ("length", 5)


def test_columns_with_the_names_of_what_a_program_gets_are_under_columns(tmp_path: Path) -> None:
    own: dict[str, Any] = {"prompt": "p", "messages": [{"role": "user", "content": None}], "sample": "s", "seed": None, "columns": {"a": 1}}
    kept = {"a": 1} | {name: value for name, value in own.items() if name != "columns"}
    code = f"assert row['columns'] == {kept!r}, row\n"
    code += "assert (row['prompt'], row['sample'], row['answer']) == ('What is 3 + 4?', 0, 'seven')\n" + PLAY
    assert play(tmp_path, code, **own).finish == "stop"


def test_a_command_takes_columns_of_the_row_and_no_shell_reads_it(tmp_path: Path) -> None:
    row = {"prompt": "a; rm -rf {answer}", "answer": "x", "level": 3}
    assert command_of("agent:run --task '{prompt}' -l{level} {other}", row) == ["run", "--task", "a; rm -rf {answer}", "-l3", "{other}"]
    file = tmp_path / "agent.py"
    file.write_text("1")
    first = version_of(f"agent:python {file}")
    file.write_text("2")
    assert first is not None and version_of(f"agent:python {file}") != first
    assert version_of("agent:true") is None
