"""Prompts and tools of a data row in the formats of Hugging Face and OpenAI.

Arrow has null for each field that a row lacks: nulls in messages and tools are removed, except for `content`.
"""

import json
from collections.abc import Mapping
from typing import Any

from penstock.topics.wire.well_formed import well_formed_json

TOOLS = "tools"
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
"""Types of parts whose text is the content of a message."""
WORDLESS = ("assistant", "tool")
"""Roles whose content may be null."""
_SHOWN = 80


def messages_of(value: list[Any]) -> list[dict[str, Any]]:
    """The messages of a prompt. Raises `ValueError` for a message without a role or text."""
    messages = [_without_nulls(message) for message in value]
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
            raise ValueError(f"message {number}: 'role' is not a string: {_shown(message)}")
        content = message.setdefault("content", None)
        if isinstance(content, list):
            _check_parts(content, number)
        elif not isinstance(content, str) and not (content is None and message["role"] in WORDLESS):
            raise ValueError(f"message {number}: 'content' is neither a string nor a list of text parts: {_shown(message)}")
    if not any(_has_text(message["content"]) or message.get("tool_calls") for message in messages):
        raise ValueError("all messages are empty")
    return messages


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """The tools in a column: a list of schemas, or JSON text of such a list; None if there are none. Raises `ValueError`."""
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
            raise ValueError(f'tool {number} is not {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}: {_shown(tool)}')
    return tools


def _check_parts(parts: list[Any], number: int) -> None:
    for part in parts:
        if not isinstance(part, str) and not (
            isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text", part.get("refusal", "")), str)
        ):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"message {number} has a part of type {kind!r} in 'content'; only parts of text are supported: {_shown(part)}")


def _has_text(content: Any) -> bool:
    if isinstance(content, list):
        return any(_has_text(part if isinstance(part, str) else part.get("text", "")) for part in content)
    return isinstance(content, str) and bool(content.strip())


def _decoded(tool: Any) -> Any:
    try:
        return json.loads(tool) if isinstance(tool, str) else tool
    except (ValueError, RecursionError):
        return tool


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list | tuple) else value


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
