"""The chat completions API of an agent: its requests, each a turn of the trajectory, and responses, streamed responses and errors."""

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.pipeline.agents.record import Generate, Generation
from penstock.pipeline.data.conversation.messages import Message, TemplateRefused, Tools
from penstock.pipeline.data.conversation.segments import AssistantTurn, Context, Conversation

_CHANGES_THE_POLICY = ("logit_bias", "functions", "function_call", "audio", "web_search_options", "guided_json", "structured_outputs")
"""Unsupported fields: they change the policy's distribution, or need more than text generation."""


class BadRequest(ValueError):
    """An invalid request; the API returns the message with this status and code."""

    def __init__(self, message: str, *, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status

    def body(self) -> dict[str, Any]:
        """Return the error in the format of OpenAI's API."""
        kind = "authentication_error" if self.status == 401 else "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A parsed request; sampling settings always come from the run's configuration."""

    messages: tuple[Message, ...]
    tools: Tools | None
    max_tokens: int | None
    """Limit of completion tokens; None for the run's limit."""
    stop: tuple[str, ...]
    stream: bool
    usage: bool
    """True if a streamed response ends with its usage."""
    model: str
    logprobs: bool
    token_ids: bool
    """True to return the ids of context and completion, as vLLM's `return_token_ids`."""


def chat_request(body: Any) -> ChatRequest:
    """Parse a decoded body. Raises `BadRequest`, also for fields that change the distribution that tokens are sampled from."""
    if not isinstance(body, Mapping):
        raise BadRequest("the body is not a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, Mapping) for message in messages):
        raise BadRequest('"messages" must be a list of at least one message')
    if body.get("n", 1) not in (1, None):
        raise BadRequest('"n" above 1 is not supported: a trajectory has one completion per request; send another request')
    if refused := next((name for name in _CHANGES_THE_POLICY if body.get(name)), None):
        raise BadRequest(f'"{refused}" is not supported: it changes the distribution that tokens are sampled from')
    if (form := body.get("response_format")) and not (isinstance(form, Mapping) and form.get("type") == "text"):
        raise BadRequest('"response_format" is not supported: it changes the distribution that tokens are sampled from')
    choice = body.get("tool_choice", "auto")
    if choice not in ("auto", "none", None):
        raise BadRequest('"tool_choice" must be "auto" or "none": other values change the distribution that tokens are sampled from')
    options = body.get("stream_options")
    return ChatRequest(
        messages=tuple(messages),
        tools=None if choice == "none" else _tools(body.get("tools")),
        max_tokens=_max_tokens(body),
        stop=_stop(body.get("stop")),
        stream=bool(body.get("stream")),
        usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        model=str(body.get("model") or "policy"),
        logprobs=bool(body.get("logprobs")),
        token_ids=bool(body.get("return_token_ids")),
    )


def completion(request: ChatRequest, turn: AssistantTurn, generation: Generation, context: Context) -> dict[str, Any]:
    """Return the chat completion (the API's response) for a generated turn after `context`, with the fields that `request` selects."""
    token_ids, prompt = generation.token_ids[: turn.tokens], len(context.token_ids)
    choice: dict[str, Any] = {"index": 0, "message": turn.message, "finish_reason": turn.finish_reason, "logprobs": None}
    if request.logprobs:
        pairs = zip(token_ids.tolist(), np.asarray(generation.logprobs, np.float64).tolist(), strict=False)
        content = [{"token": f"token_id:{token}", "logprob": nats, "bytes": None, "top_logprobs": []} for token, nats in pairs]
        choice["logprobs"] = {"content": content, "refusal": None}
    response = {
        "id": f"chatcmpl-{context.number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [choice],
        "usage": {"prompt_tokens": prompt, "completion_tokens": turn.tokens, "total_tokens": prompt + turn.tokens},
    }
    if request.token_ids:
        response["prompt_token_ids"], choice["token_ids"] = context.token_ids.tolist(), token_ids.tolist()
    return response


def events(request: ChatRequest, response: Mapping[str, Any]) -> Iterator[str]:
    """Yield a chat completion as the server-sent events of a streamed response; the text of a turn is one event."""
    base = {"id": response["id"], "object": "chat.completion.chunk", "created": response["created"], "model": response["model"]}
    choice = response["choices"][0]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{key: message[key]} for key in ("reasoning_content", "content") if message.get(key)]
    deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(message.get("tool_calls", ()))]
    for delta in deltas:
        yield _event({**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}]})
    end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": choice["logprobs"]}
    extra = {"prompt_token_ids": response["prompt_token_ids"]} if "prompt_token_ids" in response else {}
    yield _event({**base, **extra, "choices": [end | {key: choice[key] for key in ("token_ids",) if key in choice}]})
    if request.usage:
        yield _event({**base, "choices": [], "usage": response["usage"]})
    yield "data: [DONE]\n\n"


def _event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _tools(tools: Any) -> Tools | None:
    """Check the request's list of tools; None without one. Raises `BadRequest`."""
    if not tools:
        return None
    if not isinstance(tools, list) or not all(_is_function(tool) for tool in tools):
        raise BadRequest('"tools" must be a list of {"type": "function", "function": {"name": ..., "parameters": {...}}}')
    return tuple(tools)


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    """Return the request's limit of completion tokens, None without one. Raises `BadRequest`."""
    limit = body.get("max_completion_tokens")
    limit = body.get("max_tokens") if limit is None else limit
    if limit is None:
        return None
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise BadRequest(f'"max_tokens" must be an integer of at least 1, not {str(limit)[:40]}')
    return limit


def _stop(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(texts, list) or len(texts) > 16 or not all(isinstance(text, str) and text for text in texts):
        raise BadRequest('"stop" must be a string or a list of at most 16 strings')
    return tuple(texts)


MAX_OPEN = 64
"""Largest number of concurrent requests of one agent."""


class TrajectoryEnded(Exception):
    """No more turns are generated, because the trajectory is stale or the run ends."""


@dataclass(slots=True, eq=False)
class _PendingTurn:
    """A turn that is being generated: its context, and the chat completion once it is recorded."""

    context: Context
    generation: "asyncio.Task[Generation]"
    delivered: dict[str, Any] | None = None


@dataclass(slots=True, eq=False)
class AgentSession:
    """The requests and turns of one trajectory; used in one asyncio loop only."""

    conversation: Conversation
    generate: Generate
    max_turns: int
    turn_tokens: int
    """Largest number of completion tokens of a turn."""
    longest: int
    """Largest number of tokens of context and completion together."""
    on_generation: Callable[[bool], None] = lambda _: None
    """Called with True at the start of each generation and with False at its end."""
    reward: float | None = None
    """Reward of the trajectory, sent by the agent."""
    truncated: bool = False
    """True once a request exceeded a limit of the trajectory."""
    aborted: bool = False
    completions: dict[int, tuple[Sequence[Message], dict[str, Any]]] = field(default_factory=dict)
    """Turn number -> new messages of its request, and the generated message."""
    replaced: int = 0
    """Largest number of lone surrogates in one request, replaced by U+FFFD."""
    _pending: dict[bytes, _PendingTurn] = field(default_factory=dict)
    waiting: int = 0
    _turns_started: int = 0

    @property
    def last_turn(self) -> int:
        """Number of the last completed turn; -1 if there is none."""
        return max(self.completions, default=-1)

    def record(self) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the messages of all completed turns, in the order of their requests, and the indices of the generated ones.

        A request that continues an earlier turn contributes its new messages; any other request contributes all of its messages.
        """
        messages: list[dict[str, Any]] = []
        generated = list[int]()
        for _, (new, message) in sorted(self.completions.items()):
            messages += [*map(dict, new), message]
            generated.append(len(messages) - 1)
        return messages, generated

    async def chat(self, body: Any, *, retry: bool = False) -> tuple[ChatRequest, dict[str, Any]]:
        """Generate the turn for a request's body; return the parsed request and its chat completion. `retry`: the client repeats a request.

        If the caller is cancelled, a later request with the same body receives the turn. Raises `BadRequest`, `TrajectoryEnded`.
        """
        request = chat_request(body)
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest()
        turn = self._pending.get(key)
        if turn is None or (turn.delivered is not None and not retry):
            turn = self._pending[key] = self._new_turn(request)
        self.waiting += 1
        try:
            generation = await asyncio.shield(turn.generation)
        except asyncio.CancelledError:
            if turn.generation.cancelled():
                raise TrajectoryEnded("the trajectory was ended") from None
            raise
        finally:
            self.waiting -= 1
        if turn.delivered is None:
            turn.delivered = self._deliver(request, turn, generation)
        return request, turn.delivered

    def set_reward(self, body: Any) -> None:
        """Set the reward from the body `{"reward": 0.5}`. Raises `BadRequest`."""
        value = body.get("reward") if isinstance(body, dict) else None
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise BadRequest('invalid body: expected {"reward": NUMBER} with a finite number')
        self.reward = float(value)

    def close(self) -> None:
        for turn in self._pending.values():
            turn.generation.cancel()

    def _new_turn(self, request: ChatRequest) -> _PendingTurn:
        """Start generating the turn for a request. Raises `BadRequest` beyond a limit, `TrajectoryEnded` after an abort."""
        if self.aborted:
            raise TrajectoryEnded("the trajectory was ended")
        if self.waiting >= MAX_OPEN:
            raise BadRequest(f"an agent may send at most {MAX_OPEN} concurrent requests", status=429, code="rate_limit_exceeded")
        if self._turns_started >= self.max_turns:
            self.truncated = True
            raise BadRequest(f"the trajectory has reached environment.max_turns = {self.max_turns}", code="turn_limit_exceeded")
        try:
            context = self.conversation.context(request.messages, request.tools or ())
        except TemplateRefused as error:
            raise BadRequest(str(error)) from error
        room = self.longest - len(context.token_ids)
        if room < 1:
            self.truncated = True
            raise BadRequest(
                f"This model's maximum context length is {self.longest} tokens. However, your messages resulted in "
                f"{len(context.token_ids)} tokens. Please reduce the length of the messages.",
                code="context_length_exceeded",
            )
        self._turns_started += 1
        limit = min(room, self.turn_tokens, request.max_tokens or self.turn_tokens)
        return _PendingTurn(context, asyncio.create_task(self._generate(context, limit)))

    async def _generate(self, context: Context, limit: int) -> Generation:
        """Generate at most `limit` tokens after a context, and report start and end to `on_generation`."""
        self.on_generation(True)
        try:
            generation = await self.generate(context.token_ids, turn=context.number, max_new_tokens=limit)
            self.aborted |= generation.finish == "abort"
            return generation
        finally:
            self.on_generation(False)

    def _deliver(self, request: ChatRequest, pending: _PendingTurn, generation: Generation) -> dict[str, Any]:
        """Record a generated turn in the conversation and return its chat completion. Raises `TrajectoryEnded` for an aborted one."""
        context, token_ids, finish = pending.context, generation.token_ids, generation.finish
        turn = self.conversation.add_completion(context, token_ids, generation.logprobs, generation.versions, finish, stop=request.stop)
        if finish == "abort":
            raise TrajectoryEnded("the trajectory was ended: its policy is stale")
        self.completions[context.number] = request.messages[context.prefix_messages :], turn.message
        return completion(request, turn, generation, context)
