"""Public methods of an environment as tools: their schema in the OpenAI shape, and calls of them.

The rule: whatever is wrong with a call, its name, its arguments or what the tool raises, is a text for the policy, never an error.
"""

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

NOT_TOOLS = ("reset", "get_reward", "close")
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", tuple: "array", dict: "object"}


def tools_of(environment: Any) -> dict[str, Callable[..., Any]]:
    """The public methods of an environment by name, without those of its interface."""
    names = [name for name in dir(environment) if not name.startswith("_") and name not in NOT_TOOLS]
    return {name: method for name in names if callable(method := getattr(environment, name)) and inspect.isroutine(method)}


def schema_of(name: str, method: Callable[..., Any]) -> dict[str, Any]:
    """A tool's description for the chat template: its docstring, and its parameters with their types and docs (Google's style)."""
    hints = get_type_hints(method)
    text = inspect.getdoc(method) or ""
    head, *_ = re.split(r"\n\s*(?:Args|Arguments|Parameters|Returns|Raises):", text)
    parameters = inspect.signature(method).parameters
    properties = {
        key: {**_type_of(hints.get(key, str)), **({"description": said} if (said := _said_of(key, text)) else {})} for key in parameters
    }
    required = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]
    function = {
        "name": name,
        "description": " ".join(head.split()),
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    return {"type": "function", "function": function}


async def call_tool(tools: Mapping[str, Callable[..., Any]], call: Mapping[str, Any]) -> dict[str, Any]:
    """Run one call in the OpenAI shape; returns the tool's message."""
    function = call.get("function") or {}
    name = str(function.get("name"))
    return {"role": "tool", "tool_call_id": call.get("id") or "", "name": name, "content": await _result(tools, name, function)}


async def _result(tools: Mapping[str, Callable[..., Any]], name: str, function: Mapping[str, Any]) -> str:
    if name not in tools:
        return f"error: there is no tool {name!r}; there are: {', '.join(tools)}"
    given = function.get("arguments") or {}
    try:
        arguments = json.loads(given) if isinstance(given, str) else dict(given)
        inspect.signature(tools[name]).bind(**arguments)
    except (TypeError, ValueError) as error:
        return f"error: the arguments do not fit {name}: {error}"
    try:
        result = tools[name](**arguments)
        result = await result if inspect.isawaitable(result) else result
    # A tool may raise anything: the policy reads it and may try otherwise.
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"
    return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)


def _type_of(hint: Any) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _type_of(next((one for one in arguments if one is not type(None)), str))
    kind = _TYPES.get(origin or hint, "string")
    return {"type": kind, "items": _type_of(arguments[0])} if kind == "array" and arguments else {"type": kind}


def _said_of(parameter: str, text: str) -> str:
    found = re.search(rf"^\s*{parameter}\s*(?:\([^)]*\))?\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return found[1].strip() if found else ""
