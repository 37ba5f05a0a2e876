"""Messages in OpenAI's format, and the protocol of chat templates: messages to token ids, and token ids to a message."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.topics.wire.visible import well_formed_json

TOOLS = "tools"
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
"""Types of parts whose text is the content of a message."""
WORDLESS = ("assistant", "tool")
"""Roles whose content may be null."""
SHOWN = 80


def messages_of(value: list[Any]) -> list[dict[str, Any]]:
    """Return the messages of a prompt, without null fields. Raises `ValueError` for a message without a role or text."""
    messages = [_without_nulls(message) for message in value]
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
            raise ValueError(f"message {number}: 'role' is not a string: {shown(message)}")
        content = message.setdefault("content", None)
        if isinstance(content, list):
            _check_parts(content, number)
        elif not isinstance(content, str) and not (content is None and message["role"] in WORDLESS):
            raise ValueError(f"message {number}: 'content' is neither a string nor a list of text parts: {shown(message)}")
    if not any(_has_text(message["content"]) or message.get("tool_calls") for message in messages):
        raise ValueError("all messages are empty")
    return messages


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """Return the tools in a row's column: a list of schemas, or JSON text of such a list; None if there are none. Raises `ValueError`."""
    if isinstance(value, str) and value.strip():
        try:
            value = well_formed_json(json.loads(value))[0]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the text is not valid JSON ({error})") from error
    if not value or (isinstance(value, str) and not value.strip()):
        return None
    tools = [_without_nulls(_decoded(tool)) for tool in value] if isinstance(value, list) else [value]
    for number, tool in enumerate(tools, 1):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f'tool {number} is not {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}: {shown(tool)}')
    return tools


def _check_parts(parts: list[Any], number: int) -> None:
    """Raise `ValueError` if the content of message `number` has a part that is not text, such as an image."""
    for part in parts:
        if not isinstance(part, str) and not (
            isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text", part.get("refusal", "")), str)
        ):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"message {number} has a part of type {kind!r} in 'content'; only parts of text are supported: {shown(part)}")


def _has_text(content: Any) -> bool:
    if isinstance(content, list):
        return any(_has_text(part if isinstance(part, str) else part.get("text", "")) for part in content)
    return isinstance(content, str) and bool(content.strip())


def _decoded(tool: Any) -> Any:
    """Return a tool that is JSON text as a JSON value, any other value unchanged."""
    try:
        return json.loads(tool) if isinstance(tool, str) else tool
    except (ValueError, RecursionError):
        return tool


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list | tuple) else value


def shown(value: Any, *, most: int = SHOWN) -> str:
    """Return a value as JSON for a message, at most `most` characters of it."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= most else f"{text[:most]}…"


Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]


class TemplateRefused(ValueError):
    """A chat template cannot render these messages; the message is one line."""


def text_of(message: Message) -> str:
    """Return the text of a message; parts of type "text" are concatenated. Raises `TemplateRefused` for other parts, such as images."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence):
        parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
        if all(isinstance(part, Mapping) and part.get("type") in TEXT_PARTS for part in parts):
            return "".join(str(part.get("text", part.get("refusal")) or "") for part in parts)
    raise TemplateRefused(f"content of a message of role {str(message.get('role'))[:40]!r} is neither a string nor a list of text parts")


def plain(message: Message, *, developer: bool = False) -> dict[str, Any]:
    """Return a message as templates expect it: text content, arguments of tool calls decoded if they are JSON objects, no null fields.

    `developer`: the template supports the role `developer`; otherwise it becomes `system`. Raises `TemplateRefused`.
    """
    role = message.get("role")
    if not isinstance(role, str):
        raise TemplateRefused('a message has no "role": give "system", "user", "assistant" or "tool"')
    role = "system" if role == "developer" and not developer else role
    fields = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    made = {**fields, "role": role, "content": text_of(message)}
    if calls := _calls(message):
        functions = [_function(call) for call in calls]
        made["tool_calls"] = [
            # Some clients put the function's name and arguments next to its other fields.
            {**{key: value for key, value in call.items() if key not in ("name", "arguments")}, "type": "function", "function": function}
            for call, function in zip(calls, functions, strict=True)
        ]
    return made


def digests(messages: Iterable[Message], tools: Tools | None) -> list[bytes]:
    """Return the SHA-256 digests of all prefixes of a conversation: of the tools alone, then with one more message each.

    Only role, text, and names and arguments of tool calls count: clients drop reasoning, reorder keys, and replace "" by null. White space
    around the policy's own text is ignored.
    """
    hasher = hashlib.sha256(json.dumps(tools or [], sort_keys=True, default=str).encode())
    made = [hasher.digest()]
    for message in messages:
        role, text = message.get("role"), text_of(message)
        calls = [_function(call) for call in _calls(message)]
        content = [role, text.strip() if role == "assistant" else text, [[call["name"], call["arguments"]] for call in calls]]
        hasher.update(json.dumps(content, sort_keys=True, default=str).encode())
        made.append(hasher.digest())
    return made


def _calls(message: Message) -> Sequence[Any]:
    """Return the tool calls of a message. Raises `TemplateRefused` if they are not a list."""
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise TemplateRefused('a message has "tool_calls" that are not a list of {"function": {"name": ..., "arguments": ...}}')
    return calls


def _function(call: Any) -> dict[str, Any]:
    """Return a tool call as name and arguments, decoded if they are a JSON object. Raises `TemplateRefused`."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TemplateRefused('a tool call has no {"function": {"name": ..., "arguments": ...}}')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            decoded, _ = well_formed_json(json.loads(arguments)) if arguments.strip() else ({}, 0)
        except (ValueError, RecursionError):
            decoded = arguments
        arguments = decoded if isinstance(decoded, dict) else arguments
    return {"name": function["name"], "arguments": {} if arguments is None else arguments}


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """A completion as a message in OpenAI's format, and one error message per unreadable tool call."""

    message: dict[str, Any]
    malformed: tuple[str, ...] = ()


class Template(Protocol):
    """How a model reads a conversation: messages to token ids and back. Stateless: one object per process, shared by its conversations."""

    def render(self, messages: Sequence[Message], tools: Tools | None) -> list[int]:
        """Return the token ids of a conversation with the generation prompt. Raises `TemplateRefused`."""
        ...

    def bridge(self, messages: Sequence[Message], prefix: int, tools: Tools | None, last: int) -> list[int] | None:
        """Return the token ids between a completion and the next one, without rendering the completion.

        `messages[prefix - 1]` is the completion, `last` its last generated id: a stop id at its end is not repeated. None if the template
        does not allow appending; the caller then renders the full conversation.
        """
        ...

    def shortened(self, text: str, tokens: int) -> str:
        """Return the first `tokens` tokens of a text with a note that it was truncated; the text itself if it is not longer.

        Example:
            template.shortened("one two three", 2)  # -> "one two [truncated: the first 2 of 3 tokens]"
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        ...

    def parse(self, token_ids: Sequence[int], before: Sequence[int], tools: Tools | None, calls: int) -> ParsedCompletion:
        """Return the message in generated ids; `before` are the last ids of the context, `calls` is the number of earlier tool calls."""
        ...
