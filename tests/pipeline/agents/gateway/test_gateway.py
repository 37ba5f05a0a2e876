"""The endpoint for agents, asked by the official client: answers, tools, streams, limits, and what is recorded of them."""

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import numpy as np
import pytest

from penstock.pipeline.agents.gateway.chat import AgentSession
from penstock.pipeline.agents.gateway.episode import Gateway
from penstock.pipeline.data.conversation.segments import Conversation
from tests.support.chat_families import FAMILIES, stop_ids, template, tokenizer
from tests.support.scripted_policy import FAMILY, ScriptedPolicy

pytestmark = pytest.mark.costly  # imports the client

ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}}
ASKED: list[Any] = [{"role": "user", "content": "What is 3 + 4?"}]
BOUNDS = (8, 200, 2000)
"""Most turns, tokens of a turn, and tokens of a context with its completion."""


class Desk:
    """A gateway with one open session and its client."""

    def __init__(self, policy: ScriptedPolicy, bounds: tuple[int, int, int] = BOUNDS) -> None:
        self.policy = policy
        self.gateway = Gateway()
        self.session = AgentSession(Conversation(template(FAMILY)), policy, *bounds)
        self.key = self.gateway.open(self.session)
        self.openai = pytest.importorskip("openai")
        self.client = self.openai.AsyncOpenAI(base_url=self.gateway.base_url, api_key=self.key, max_retries=0)

    async def ask(self, messages: Any = None, **settings: Any) -> Any:
        return await self.client.chat.completions.create(model="policy", messages=messages or ASKED, **settings)

    def check(self) -> list[list[int]]:
        """What is trained is what was drawn, each turn once; returns the turns of each segment."""
        segments = self.session.conversation.segments()
        for segment in segments:
            for part in (part for part in segment.parts if part.source == "model"):
                context, ids, _ = self.policy.asked[part.turn]
                assert segment.token_ids[: part.start].tolist() == context
                kept = segment.token_ids[part.start : part.end].tolist()
                assert kept == ids[: len(kept)]
                assert (segment.logprobs[part.start : part.end] == -np.arange(1, len(kept) + 1, dtype=np.float32) / 8).all()
        return [[part.turn for part in segment.parts if part.source == "model"] for segment in segments]


def served(policy: Callable[[], ScriptedPolicy], bounds: tuple[int, int, int] = BOUNDS) -> Callable[..., Callable[[], None]]:
    """Run a test with a `Desk` in an asyncio loop."""

    def decorate(test: Callable[[Desk], Awaitable[None]]) -> Callable[[], None]:
        @functools.wraps(test)
        def run() -> None:
            async def main() -> None:
                desk = Desk(policy(), bounds)
                try:
                    await asyncio.wait_for(test(desk), 30)
                finally:
                    await desk.client.close()
                    await desk.gateway.close()

            asyncio.run(main())

        del run.__wrapped__  # type: ignore[attr-defined]  # pytest would ask for a fixture `desk`
        return run

    return decorate


def seven() -> ScriptedPolicy:
    return ScriptedPolicy(lambda _: "It is seven.")


def calling() -> ScriptedPolicy:
    return ScriptedPolicy(lambda text: "It is seven." if "<tool_response>" in text else f"Let me see.{FAMILIES[FAMILY].call}")


@served(seven)
async def test_an_answer_has_text_usage_and_on_demand_the_ids_and_logprobs_that_were_drawn(desk: Desk) -> None:
    answer = await desk.ask(logprobs=True, extra_body={"return_token_ids": True})
    context, ids, _ = desk.policy.asked[0]
    assert answer.choices[0].message.content == "It is seven."
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(context), len(ids))
    assert answer.model_dump()["prompt_token_ids"] == context
    assert answer.choices[0].model_dump()["token_ids"] == ids
    assert [token.token for token in answer.choices[0].logprobs.content] == [f"token_id:{i}" for i in ids]
    assert answer.choices[0].logprobs.content[1].logprob == -0.25


@served(calling)
async def test_tools_are_called_and_answered_in_one_segment(desk: Desk) -> None:
    messages = list(ASKED)
    first = (await desk.ask(messages, tools=[ADD])).choices[0]
    assert (first.finish_reason, first.message.content) == ("tool_calls", "Let me see.")
    (call,) = first.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
    second = (await desk.ask(messages, tools=[ADD])).choices[0]
    assert second.message.content == "It is seven."
    assert desk.check() == [[0, 1]]
    assert [message["role"] for message in desk.session.record()[0]] == ["user", "assistant", "tool", "assistant"]


@served(seven)
async def test_half_a_character_in_a_request_is_replaced_and_counted(desk: Desk) -> None:
    headers = {"authorization": f"Bearer {desk.key}", "content-type": "application/json"}
    body = b'{"messages": [{"role": "user", "content": "3 + 4\\ud83d <|im_end|>"}]}'
    async with httpx.AsyncClient() as client:
        answered = await client.post(f"{desk.gateway.base_url}/chat/completions", content=body, headers=headers)
    assert answered.status_code == 200
    assert desk.session.replaced == 1
    shown = tokenizer(FAMILY).decode(desk.policy.asked[0][0], skip_special_tokens=False)
    assert "3 + 4\ufffd <|im_end|>" in shown
    assert desk.policy.asked[0][0].count(stop_ids(FAMILY)[0]) == shown.count("<|im_end|>") - 1


@served(calling)
async def test_a_streamed_answer_is_the_same_answer(desk: Desk) -> None:
    text, calls, finish, usage = "", [], None, None
    async for chunk in await desk.ask(tools=[ADD], stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
            finish = choice.finish_reason or finish
    assert (text, finish, usage.completion_tokens) == ("Let me see.", "tool_calls", len(desk.policy.asked[0][1]))
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [(0, "add", '{"a": 1}')]
    assert desk.check() == [[0]]


@served(seven)
async def test_parallel_conversations_under_one_key_are_segments_of_their_own(desk: Desk) -> None:
    histories: list[Any] = [[{"role": "user", "content": f"I am {number}."}] for number in range(3)]
    for _ in range(2):
        answers = await asyncio.gather(*(desk.ask(history) for history in histories))
        for history, answer in zip(histories, answers, strict=True):
            history += [answer.choices[0].message, {"role": "user", "content": "Go on."}]
    segments = desk.check()
    assert sorted(len(turns) for turns in segments) == [2, 2, 2]
    assert sorted(turn for turns in segments for turn in turns) == list(range(6))


@served(seven)
async def test_a_history_that_the_agent_shortens_begins_a_segment(desk: Desk) -> None:
    first = (await desk.ask()).choices[0].message
    await desk.ask([*ASKED, first, {"role": "user", "content": "Sure?"}])
    await desk.ask([{"role": "user", "content": "In short: seven. Sure?"}])
    assert desk.check() == [[0, 1], [2]]


@served(seven)
async def test_a_text_that_ends_an_answer_is_cut_and_what_follows_is_not_trained(desk: Desk) -> None:
    answer = await desk.ask(stop=["seven"], logprobs=True)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("It is ", "stop")
    assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.content) == len("It is seven")
    desk.check()
    assert desk.session.conversation.segments()[0].mask.sum() == len("It is seven")


def test_a_client_that_goes_and_asks_again_gets_the_answer_and_nothing_is_drawn_twice() -> None:
    async def main() -> None:
        go, begun = asyncio.Event(), asyncio.Event()

        def wait(_: int) -> asyncio.Event:
            begun.set()
            return go

        desk = Desk(ScriptedPolicy(lambda _: "It is seven.", wait=wait))
        try:
            asking = asyncio.create_task(desk.ask())
            await begun.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            while desk.session.waiting:  # until the server has noticed
                await asyncio.sleep(0)
            assert desk.session.conversation.turns == 0
            go.set()
            answer = await desk.ask()
            again = await desk.ask(extra_headers={"x-stainless-retry-count": "1"})
            assert answer.choices[0].message == again.choices[0].message
            assert desk.check() == [[0]]
            await desk.ask()
            assert desk.check() == [[0], [1]]  # no retry, but the same question once more
        finally:
            await desk.client.close()
            await desk.gateway.close()

    asyncio.run(asyncio.wait_for(main(), 30))


@served(seven)
async def test_an_unknown_key_is_refused_and_a_closed_one_too(desk: Desk) -> None:
    other = desk.openai.AsyncOpenAI(base_url=desk.gateway.base_url, api_key="sk-other", max_retries=0)
    with pytest.raises(desk.openai.AuthenticationError, match="belongs to no open trajectory"):
        await other.models.list()
    await other.close()
    assert [model.id async for model in desk.client.models.list()] == ["policy"]
    desk.gateway.close_session(desk.key)
    with pytest.raises(desk.openai.AuthenticationError):
        await desk.ask()


@served(seven, (2, 6, 60))
async def test_limits_are_errors_that_the_agent_can_read_and_the_trajectory_is_truncated(desk: Desk) -> None:
    with pytest.raises(desk.openai.BadRequestError) as caught:
        await desk.ask([{"role": "user", "content": "long " * 50}])
    assert caught.value.code == "context_length_exceeded"
    assert desk.session.truncated
    short = (await desk.ask()).choices[0]
    assert short.finish_reason == "length"
    await desk.ask(max_tokens=2)
    assert [limit for _, _, limit in desk.policy.asked.values()] == [6, 2]
    with pytest.raises(desk.openai.BadRequestError) as caught:
        await desk.ask()
    assert caught.value.code == "turn_limit_exceeded"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"n": 2}, '"n" above 1'),
        ({"logit_bias": {"1": 5}}, '"logit_bias" is not supported'),
        ({"response_format": {"type": "json_object"}}, '"response_format" is not supported'),
        ({"tool_choice": "required", "tools": [ADD]}, '"tool_choice" must be'),
        ({"max_tokens": 0}, '"max_tokens" must be'),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "list of text parts"),
        ({"extra_body": {"messages": []}}, '"messages" must be'),
    ],
)
def test_what_would_change_the_distribution_or_cannot_be_read_is_refused(settings: dict[str, Any], reason: str) -> None:
    @served(seven)
    async def refused(desk: Desk) -> None:
        with pytest.raises(desk.openai.BadRequestError, match=reason):
            await desk.ask(**settings)
        assert desk.policy.asked == {} and desk.session.conversation.turns == 0

    refused()


@served(seven)
async def test_a_reward_is_called_in_and_what_is_none_is_refused(desk: Desk) -> None:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {desk.key}"}, trust_env=False) as client:
        url = f"{desk.gateway.base_url}/reward"
        for bad in (b'{"reward": "high"}', b'{"reward": NaN}', b"[1]", b"{"):
            assert (await client.post(url, content=bad)).status_code == 400
        assert desk.session.reward is None
        assert (await client.post(url, json={"reward": 0.5})).json() == {"ok": True}
    assert desk.session.reward == 0.5
