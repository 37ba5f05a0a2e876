"""One trajectory, driven over a real child process: its record, its limits, and what becomes of it when the environment breaks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.topics.rollouts import cause_of, reward_of
from tests.support.chat_families import template, tokenizer
from tests.support.environments import Policy, counting, play
from tests.support.scripted_policy import FAMILY, ScriptedPolicy

pytestmark = pytest.mark.costly  # starts processes


def test_a_trajectory_trains_what_was_drawn_and_nothing_else(tmp_path: Path) -> None:
    (trajectory,), said = play(counting(tmp_path), [{}], draw=Policy())
    text = "".join("|" if token == 2 else chr(token) for token in trajectory.token_ids)
    assert text == "4;abc|7;abc|10;abc|13;abc|16;abc|19;abc|"
    assert "".join("^" if trained else " " for trained in trajectory.loss_mask) == "  ^^^^" + "  ^^^^" + "   ^^^^" * 4
    assert np.isnan(trajectory.logprobs[~trajectory.loss_mask]).all()
    assert (trajectory.segments, trajectory.finish, said) == (((0, len(text), 0),), "stop", [])
    assert [(turn.source, turn.reward) for turn in trajectory.turns[:2]] == [("prompt", None), ("model", 3.0)]
    assert reward_of(trajectory.turns) == 18.0
    assert trajectory.environment_seed == 4


@pytest.mark.parametrize(("limits", "turns"), [({"max_turns": 2}, 2), ({"trajectory_tokens": 16}, 2)])
def test_a_limit_truncates_a_trajectory_which_keeps_its_rewards(tmp_path: Path, limits: dict[str, int], turns: int) -> None:
    (trajectory,), _ = play(counting(tmp_path), [{}], draw=Policy(), **limits)
    assert trajectory.finish == "length"
    assert sum(turn.source == "model" for turn in trajectory.turns) == turns
    assert reward_of(trajectory.turns) == 3.0 * turns


@pytest.mark.parametrize(
    ("breaks", "policy", "reward"), [("rewards", Policy(), None), ("rewards", Policy(finish="length"), 0.0), ("", Policy(), 18.0)]
)
def test_an_episode_whose_steps_all_have_no_reward_has_none_and_one_without_a_step_has_zero(
    tmp_path: Path, breaks: str, policy: Policy, reward: float | None
) -> None:
    (trajectory,), _ = play(counting(tmp_path), [{"breaks": breaks}], draw=policy)
    assert reward_of(trajectory.turns) == reward


@pytest.mark.parametrize("breaks", ["reset-raises", "step-raises", "step-hangs", "step-dies"])
def test_what_broke_once_is_played_again_and_no_turn_is_drawn_twice(tmp_path: Path, breaks: str) -> None:
    policy = Policy()
    (trajectory,), said = play(counting(tmp_path), [{"breaks": breaks}], draw=policy)
    assert trajectory.finish == "stop"
    assert [turn for turn, _ in policy.asked] == list(range(6))
    assert len(said) == 1 and said[0].startswith(f"environment-{breaks.partition('-')[0]}: ")


@pytest.mark.parametrize(("breaks", "cause"), [("reset-raises", "RuntimeError: no such luck"), ("step-dies", "ended with exit status 3")])
def test_what_stays_broken_is_an_aborted_sample_with_its_cause_and_no_reward(tmp_path: Path, breaks: str, cause: str) -> None:
    (trajectory,), _ = play(counting(tmp_path), [{"breaks": breaks, "times": 9}], draw=Policy())
    assert trajectory.finish == "abort"
    assert (cause_of(trajectory.turns) or "").startswith(f"environment-{breaks.partition('-')[0]}: {cause}")
    assert reward_of(trajectory.turns) is None


def test_a_neighbour_in_the_process_that_was_killed_loses_nothing(tmp_path: Path) -> None:
    policy = Policy()
    rows = [{}, {"breaks": "step-hangs", "times": 9}, {}]
    (first, hung, last), said = play(counting(tmp_path), rows, draw=policy)
    assert (first.finish, hung.finish, last.finish) == ("stop", "abort", "stop")
    assert np.array_equal(first.token_ids, last.token_ids)
    assert any("another environment in the same process took longer than 1 s" in line for line in said)
    assert len(policy.asked) == 6 + 6 + 1  # the draws of the neighbours, each once, and the first turn of the hung one


def test_an_environment_that_is_not_deterministic_restarts(tmp_path: Path) -> None:
    source = counting(tmp_path)
    (tmp_path / "counting.py").write_text(
        (tmp_path / "counting.py").read_text().replace('return f"{self.total};"', 'return f"{os.getpid()};"')
    )
    policy = Policy()
    (trajectory,), said = play(source, [{"breaks": "step-dies"}], draw=policy)
    assert trajectory.finish == "stop"
    assert "returned a different text for the same actions" in said[1]
    assert [turn for turn, _ in policy.asked] == [0, *range(6)]


def test_long_results_are_cut_by_the_setting_alone_with_a_mark_that_the_policy_reads(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(
        'class Talk:\n    def reset(self, **_):\n        return "Z" * 30\n    def step(self, text):\n        return "Z" * 30, 1.0, False\n'
    )
    source, limits = f"{tmp_path / 'talk.py'}:Talk", {"max_turns": 2, "trajectory_tokens": 400}
    (whole,), _ = play(source, [{}], draw=Policy(), **limits)
    (cut,), _ = play(source, [{}], draw=Policy(), result_tokens=4, **limits)
    assert (whole.results_cut, cut.results_cut) == (0, 2)
    texts = ["".join(map(chr, trajectory.token_ids[trajectory.token_ids > 31])) for trajectory in (whole, cut)]
    # What it begins with is the prompt, and is not cut.
    assert texts[0] == f"{'Z' * 30}abc{'Z' * 30}abc"
    assert texts[1] == f"{'Z' * 30}abcZZZZ [truncated: the first 4 of 30 tokens]abc"


CUT = """
class Cut:
    def reset(self, *, seed, **row):
        return "a \\ud83d"

    def step(self, text):
        return "\\ud83d\\ude00 <eos>", 1.0, False
"""


def test_half_a_character_of_an_environment_is_replaced_and_counted_and_its_control_tokens_are_text(tmp_path: Path) -> None:
    (tmp_path / "cut.py").write_text(CUT)
    (trajectory,), said = play(f"{tmp_path / 'cut.py'}:Cut", [{}], draw=Policy(), max_turns=2)
    assert trajectory.replaced == 1
    assert said == []
    assert json.loads(trajectory.messages)[1]["content"] == "a \ufffd"
    assert trajectory.token_ids.tolist().count(2) == 2  # the policy's own


ECHO = """
class Echo:
    def reset(self, **row):
        return "go"

    def step(self, text):
        return f"heard {text}", 1.0, True
"""
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("tools", [[WEATHER], json.dumps([WEATHER]), None, "", []])
def test_the_tools_of_a_row_are_shown_to_the_policy_of_a_text_environment_which_reads_its_calls_as_text(tmp_path: Path, tools: Any) -> None:
    (tmp_path / "echo.py").write_text(ECHO)
    policy = ScriptedPolicy(lambda _: CALL)
    (trajectory,), said = play(
        f"{tmp_path / 'echo.py'}:Echo", [{"tools": tools}], draw=policy, template=template(FAMILY), turn_tokens=200, trajectory_tokens=2000
    )
    assert said == []
    assert json.loads(trajectory.messages)[-2:] == [
        {"role": "assistant", "content": CALL, "generated": True},
        {"role": "user", "content": f"heard {CALL}"},
    ]
    ((asked, _, _),) = policy.asked.values()
    assert ("weather" in tokenizer(FAMILY).decode(asked)) is bool(tools)
