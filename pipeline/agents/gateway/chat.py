"""Bodies of the chat completions API: supported fields of requests, and responses, streamed responses and errors."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.pipeline.agents.record import Generation
from penstock.pipeline.data.conversation.messages import Message, Tools
from penstock.pipeline.data.conversation.segments import AssistantTurn, Context

_CHANGES_THE_POLICY = ("logit_bias", "functions", "function_call", "audio", "web_search_options", "guided_json", "structured_outputs")
"""Unsupported fields: they change the policy's distribution, or need more than text generation."""


class BadRequest(ValueError):
    """An invalid request; the API returns the message with this status and code."""

    def __init__(self, message: str, *, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status

    def body(self) -> dict[str, Any]:
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
    """The response of the chat completions API for a generated turn."""
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
    """A chat completion as server-sent events: role, reasoning, content, tool calls, finish reason, and usage if requested."""
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
    if not tools:
        return None
    if not isinstance(tools, list) or not all(_is_function(tool) for tool in tools):
        raise BadRequest('"tools" must be a list of {"type": "function", "function": {"name": ..., "parameters": {...}}}')
    return tuple(tools)


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _max_tokens(body: Mapping[str, Any]) -> int | None:
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
