"""Agents that append to, shorten, rewrite, branch and restart their history: what the engine generated is trained, each token once."""

import asyncio
import json
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pipeline.agents.gateway.chat import AgentSession, BadRequest
from penstock.pipeline.agents.record import EpisodeState, Generation, trajectory_of
from penstock.pipeline.config.schema import SamplingSection
from penstock.pipeline.data.conversation.segments import Conversation
from penstock.pipeline.inspect.audit.rules import trajectory_flaw
from penstock.pipeline.learner.micro_batches import sequences
from penstock.pipeline.rewards.functions import completions_of, episodes_of
from penstock.pipeline.runtime.sampling import rollout_of
from penstock.topics.rollouts import Rollout, generated
from tests.support.chat_families import stop_ids, template, tokenizer
from tests.support.environments import characters, request_for

BOUNDS = (64, 6, 4000)
"""Most turns, tokens of a turn, and tokens of a context with its completion."""
ROLES = ("user", "assistant", "tool", "system", "developer", "model", "environment", "prompt")
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}}}
ACTIONS = ("append", "append", "append", "shorten", "rewrite", "system", "tools", "restart", "retry", "again", "branch", "role", "parallel")
WORDS = ("3 + 4?", "so", " it is seven ", "", "generated", "Sure?")


class Engine:
    """Generates arbitrary tokens; every one has a logprob of its own, by which it is found again."""

    def __init__(self, seed: int, words: list[int], stop: int) -> None:
        self.random, self.words, self.stop = random.Random(seed), words, stop
        self.tokens: dict[float, int] = {}
        self.contexts: dict[float, list[int]] = {}
        """Logprob of the first token of a turn -> the ids that the engine was given."""

    async def __call__(self, token_ids: Any, *, turn: int, max_new_tokens: int) -> Generation:
        for _ in range(self.random.randrange(3)):  # requests at the same time end in any order
            await asyncio.sleep(0)
        ids = self.random.choices(self.words, k=self.random.randint(0, max_new_tokens - 1))
        stopped = self.random.random() < 0.8 or not ids
        ids += [self.stop] if stopped else []
        logprobs = [-float(len(self.tokens) + place) for place in range(len(ids))]
        self.tokens |= dict(zip(logprobs, ids, strict=True))
        self.contexts[logprobs[0]] = token_ids.tolist()
        versions = np.full(len(ids), turn, np.int32)
        return Generation(np.array(ids, np.int32), np.array(logprobs, np.float32), versions, "stop" if stopped else "length")


class Agent:
    """A program that does to its messages what it likes."""

    def __init__(self, session: AgentSession, choose: random.Random, *, tools: bool) -> None:
        self.session, self.choose, self.can_call = session, choose, tools
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 3 + 4?"}]
        self.earlier: list[list[dict[str, Any]]] = []
        self.tools: list[Any] = []
        self.answers = 0

    async def ask(self, messages: list[dict[str, Any]], *, retry: bool = False) -> dict[str, Any] | None:
        body = {"messages": messages, **({"tools": self.tools} if self.tools else {})}
        try:
            _, answer = await self.session.chat(body, retry=retry)
        except BadRequest:  # its template refuses the roles in this order
            return None
        return answer["choices"][0]["message"]

    async def act(self, action: str) -> None:
        choose, messages = self.choose, self.messages
        if action == "shorten":
            del messages[: choose.randrange(len(messages))]
        elif action == "rewrite":
            place = choose.randrange(len(messages))
            messages[place] = {**messages[place], "content": choose.choice(WORDS)}
        elif action == "system":
            del messages[: messages[0]["role"] == "system"]
            messages.insert(0, {"role": "system", "content": choose.choice(WORDS)})
        elif action == "tools" and self.can_call:
            self.tools = [] if self.tools else [TOOL]
        elif action == "restart":
            messages[:] = [{"role": "user", "content": choose.choice(WORDS)}]
        elif action == "branch" and self.earlier:
            messages[:] = choose.choice(self.earlier)
        elif action == "role":
            messages.append({"role": choose.choice(ROLES), "content": choose.choice(WORDS), "generated": True})
        self.earlier.append(list(messages))
        if action == "parallel":
            await asyncio.gather(self.ask(list(messages)), self.ask([*messages, {"role": "user", "content": "In short?"}]))
        answer = await self.ask(list(messages))
        if answer is None:
            messages[:] = [{"role": "user", "content": "Again."}]
            return
        if action == "retry":
            turns = len(self.session.completions)
            assert await self.ask(list(messages), retry=True) == answer and len(self.session.completions) == turns
        if action == "again":
            await self.ask(list(messages))
        messages += [answer, {"role": "user", "content": choose.choice(WORDS)}]


def rollout(session: AgentSession, prompt_ids: list[int]) -> Rollout:
    """The sample as a worker publishes it."""
    messages, answers = session.record()
    episode_state = EpisodeState(messages=messages, generated=answers, rewards={})
    request = request_for({})
    object.__setattr__(request, "prompt_ids", np.array(prompt_ids, np.int32))
    segments = session.conversation.segments()
    trajectory = trajectory_of(segments, request, 0, episode_state=episode_state, finish="stop", cause=None, version=0)
    return rollout_of(trajectory, sampling=SamplingSection(), worker="w")


def check_trained(sample: Rollout, prompt_ids: list[int], engine: Engine) -> None:
    """Every token that the engine generated is trained once, after exactly what the engine was given; nothing else is."""
    group: Any = SimpleNamespace(samples=[SimpleNamespace(rollout=sample, reward=1.0)], prompt_ids=np.array(prompt_ids, np.int32))
    trained: list[tuple[float, int]] = []
    for sequence in sequences(group, advantages=lambda _: [1.0], truncated="train"):
        whole = [*sequence.prompt_ids.tolist(), *sequence.completion_ids.tolist()]
        for place in np.flatnonzero(sequence.loss_mask).tolist():
            logprob = float(sequence.behaviour_logprobs[place])
            trained.append((logprob, int(sequence.completion_ids[place])))
            if logprob in engine.contexts:
                assert whole[: len(sequence.prompt_ids) + place] == engine.contexts[logprob]
    assert sorted(trained) == sorted(engine.tokens.items())
    assert sorted(generated(sample).tolist()) == sorted(engine.tokens.values())
    assert trajectory_flaw(sample) is None


@pytest.mark.parametrize("history", ["exact", "template"])
@pytest.mark.parametrize("chat", [True, False], ids=["with a template", "without"])
@given(actions=st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=8), seed=st.integers(0, 1 << 30))
@settings(max_examples=25)
def test_whatever_an_agent_does_to_its_history_what_was_generated_is_trained_once(
    chat: bool, history: Any, actions: list[str], seed: int
) -> None:
    family = "qwen2_5"
    words = list(range(tokenizer(family).get_vocab_size(with_added_tokens=False))) if chat else list(range(32, 127))
    engine = Engine(seed, words, stop_ids(family)[0] if chat else 2)
    rendered = template(family) if chat else characters()
    session = AgentSession(Conversation(rendered, history=history), engine, *BOUNDS)
    agent = Agent(session, random.Random(seed), tools=chat)

    async def program() -> None:
        for action in actions:
            await agent.act(action)

    first = rendered.render(agent.messages, None)
    asyncio.run(program())
    for prompt_ids in (first, [1, 2, 3]):  # the group's prompt is what the agent begins with, or is not
        sample = rollout(session, prompt_ids)
        check_trained(sample, prompt_ids, engine)
    (episode,) = episodes_of([sample]) or ()
    said = [message["content"] for message in completions_of(json.loads(episode["messages"]))]
    assert said == ([answer["content"] or "" for _, (_, answer) in sorted(session.completions.items())] or [""])
