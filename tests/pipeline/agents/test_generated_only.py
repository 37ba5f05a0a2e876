"""Rewards and lengths are of what the policy generated; what an environment or an agent's program said is not scored."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.pipeline.learner.train_step import group_measures
from penstock.pipeline.rewards.functions import resolve
from penstock.pipeline.rewards.scoring import payload_of
from penstock.topics import rollouts
from penstock.topics.rollouts import GENERATED, Rollout, Turn, generated
from tests.support.examples import sample_of

PROMPT = [{"role": "user", "content": "go"}]
SPY = """
import json

def spy(completions, completion_ids, completion_lengths, conversations, **_):
    print(json.dumps([completions, completion_ids, completion_lengths, conversations]))
    return [0.0] * len(completions)

def readme(completions, answer, **_):
    return [float((text if isinstance(text, str) else text[-1]["content"]) == gold) for text, gold in zip(completions, answer)]
"""


def played(*parts: tuple[str, str]) -> Rollout:
    """A trajectory of (role, text) with a token a character; the policy's parts have the role "policy"."""
    messages, turns, ids = list[dict[str, Any]](PROMPT), list[Turn](), list[int]()
    for role, text in parts:
        mine = role == "policy"
        start, ids = len(ids), ids + [ord(letter) for letter in text]
        turns.append(Turn(start=start, end=len(ids), source="model" if mine else role))
        messages.append({"role": "assistant", "content": text, GENERATED: True} if mine else {"role": role, "content": text})
    mask = np.concatenate([np.full(turn.end - turn.start, turn.source == "model") for turn in turns])
    logprobs, segments = np.where(mask, -0.5, np.nan).astype(np.float32), ((0, len(ids), 0),)
    return sample_of(
        0, 0, ids, behaviour_logprobs=logprobs, loss_mask=mask, segments=segments, turns=tuple(turns), messages=json.dumps(messages)
    )


def text_of(sample: Rollout) -> str:
    return "".join(map(chr, generated(sample)))


def reward(function: str, sample: Rollout, *, directory: Path, prompt: Any = PROMPT, **columns: Any) -> float | None:
    """The reward of a function; a `prompt` that is None is a text without messages."""
    asked: Any = SimpleNamespace(prompt="go", columns=json.dumps(columns))
    payload = payload_of(asked, [sample], [text_of(sample)], messages=prompt and json.dumps(prompt), steps_per_version=1)
    return resolve([function], base_dir=directory, max_completion_length=10).score(**json.loads(json.dumps(payload))).rewards[0]


ENDED = {
    "the environment's last word is the answer": ([("policy", "3"), ("user", "efghi")], 0.0),
    "so is a tool's": ([("policy", "3"), ("tool", "efghi")], 0.0),
    "and the words that an environment puts into the assistant's mouth": ([("policy", "3"), ("assistant", "efghi")], 0.0),
    "the policy answers, and the environment says otherwise": ([("policy", "efghi"), ("user", "wrong, it was 7")], 1.0),
    "the policy answers in its last turn": ([("policy", "3"), ("user", "no"), ("policy", "efghi"), ("user", "right")], 1.0),
    "the policy changes its mind": ([("policy", "efghi"), ("user", "sure?"), ("policy", "3")], 0.0),
    "the policy generated nothing": ([("user", "efghi")], 0.0),
}


@pytest.mark.parametrize("chat", [True, False], ids=["with a template", "without"])
@pytest.mark.parametrize(("parts", "right"), ENDED.values(), ids=ENDED)
def test_a_built_in_reward_scores_what_the_policy_said_last(parts: Any, right: float, chat: bool, tmp_path: Path) -> None:
    assert reward("exact_match", played(*parts), prompt=PROMPT if chat else None, directory=tmp_path, answer="efghi") == right
    if chat:  # a user's function that reads the last message does the same
        (tmp_path / "mine.py").write_text(SPY)
        assert reward("mine.py:readme", played(*parts), prompt=PROMPT if chat else None, directory=tmp_path, answer="efghi") == right


BEGINNINGS = {
    "a system prompt beside the agent's own question": ([{"role": "system", "content": "be brief"}, *PROMPT], []),
    "an agent with a system prompt of its own": (PROMPT, [("system", "be brief"), ("user", "5d=")]),
    "an agent that asks nothing of the prompt": (PROMPT * 5, [("user", "5d=")]),
    "an agent without a user": (PROMPT, [("system", "efghi")]),
    "examples in the prompt": ([*PROMPT, {"role": "assistant", "content": "efghi"}] * 3 + PROMPT, [("user", "a"), ("assistant", "efghi")]),
    "an answer that was begun": ([*PROMPT, {"role": "assistant", "content": "so: "}], [("assistant", "so: ")]),
}


@pytest.mark.parametrize("said", ["efghi", "3"])
@pytest.mark.parametrize(("prompt", "before"), BEGINNINGS.values(), ids=BEGINNINGS)
def test_an_agents_completion_is_what_was_generated_whatever_the_prompt_and_the_agent_begin_with(
    prompt: Any, before: Any, said: str, tmp_path: Path
) -> None:
    sample = played(*before, ("policy", said), ("user", "efghi"))
    (tmp_path / "mine.py").write_text(SPY)
    for function in ("exact_match", "mine.py:readme"):
        assert reward(function, sample, directory=tmp_path, prompt=prompt, answer="efghi") == float(said == "efghi")


TALK = [("system", "ZZ"), ("policy", "ab"), ("tool", "ZZZZ"), ("policy", "cde"), ("user", "ZZ")]


@pytest.mark.parametrize("chat", [True, False], ids=["with a template", "without"])
def test_a_function_gets_texts_ids_and_lengths_of_the_policy_and_on_demand_the_conversation(
    chat: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(SPY)
    reward("mine.py:spy", played(*TALK), prompt=PROMPT if chat else None, directory=tmp_path)
    completions, ids, lengths, conversations = json.loads(capsys.readouterr().out)
    said = [{"role": "assistant", "content": text} for text in ("ab", "cde")]
    assert completions == ([said] if chat else ["abcde"])
    assert (ids, lengths) == ([[ord(letter) for letter in "abcde"]], [5])
    assert [message["role"] for message in conversations[0]] == ["user", "system", "assistant", "tool", "assistant", "user"]
    assert [message["content"] for message in conversations[0] if message.get(GENERATED)] == ["ab", "cde"]


@pytest.mark.parametrize(("said", "right"), [("ab", 0.0), ("abcdefghi", -0.5), ("abcdefghij", -1.0)])
def test_a_length_penalty_counts_what_the_policy_generated(said: str, right: float, tmp_path: Path) -> None:
    sample = played(("policy", said[:1]), ("tool", "Z" * 50), ("policy", said[1:]), ("user", "Z" * 50))
    assert reward("soft_overlong", sample, directory=tmp_path) == right


def test_headers_and_measures_count_what_the_policy_generated() -> None:
    sample = played(*TALK)
    assert rollouts.headers(sample, run="r").tokens == 5
    scored: Any = SimpleNamespace(samples=[SimpleNamespace(rollout=sample, reward=1.0)], rewards=(1.0,), metrics=None)
    assert group_measures([scored])["completion_tokens_mean"] == 5.0
    single = Rollout(**{name: getattr(sample, name) for name in Rollout.__slots__} | {"turns": None, "segments": None, "messages": None})
    assert (generated(single) == single.token_ids).all()
