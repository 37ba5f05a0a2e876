"""Parsers of generated text: reasoning, and tool calls in the formats of model families, converted to OpenAI's format.

No generated text raises an error. A tool call that cannot be parsed stays in the content, with an error message for the model.
"""

import ast
import json
import re
from collections.abc import Callable
from typing import Any

from penstock.topics.wire.visible import well_formed

_EXPECTED = '{"name": <function-name>, "arguments": {...}}'
_MAX_CALLS = 64
_HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?(?P<head>[^<]*)(?:<\|channel\|>(?P<channel>[^<]*))?(?:<\|constrain\|>[^<]*)?"
    r"<\|message\|>(?P<body>.*?)(?=<\|end\|>|<\|call\|>|<\|return\|>|<\|start\|>|$)(?:<\|(?:end|call|return)\|>)?",
    re.DOTALL,
)
Calls = list[tuple[str, dict[str, Any]]]


class _MalformedCall(ValueError):
    """A tool call cannot be parsed; the message is for the model."""


def split_reasoning(text: str, *, opened: bool) -> tuple[str | None, str]:
    """Return the text in `<think>` ... `</think>` (None if there is none), and the remaining text.

    `opened`: the prompt ends with `<think>`. Truncated reasoning has no rest.
    """
    opened = opened or text.lstrip().startswith("<think>")
    if not opened and "</think>" not in text:
        return None, text
    reasoning, _, rest = text.partition("</think>")
    return reasoning.lstrip().removeprefix("<think>").strip("\n"), rest.lstrip("\n")


def split_harmony(text: str) -> tuple[str | None, str]:
    """Return the "analysis" channel of gpt-oss (None if there is none), and the text of the other channels with unparsed tool calls."""
    if "<|message|>" not in text:
        return None, text
    thoughts: list[str] = []
    rest: list[str] = []
    for message in _HARMONY.finditer(text):
        channel = f"{message['head'] or ''} {message['channel'] or ''}"
        if "to=" in channel:
            rest.append(message[0])
        else:
            (thoughts if "analysis" in channel else rest).append(message["body"])
    return "\n".join(thoughts) if thoughts else None, "".join(rest)


def read_calls(text: str, form: str, start: int = 0) -> tuple[str, list[dict[str, Any]], list[str]]:
    """Return the text without tool calls, the calls in OpenAI's format, and an error message for each call that cannot be parsed.

    `form` is a key of `FORMATS`. Calls get ids of nine letters and digits, as Mistral's template requires, numbered from `start`.
    """
    calls: list[dict[str, Any]] = []
    malformed: list[str] = []

    def read(match: re.Match[str]) -> str:
        if len(calls) >= _MAX_CALLS:
            return match[0]
        try:
            parsed = parse(match)
        except _MalformedCall as error:
            malformed.append(f"Tool call {len(calls) + len(malformed) + 1} cannot be read: {error}")
            return match[0]
        for name, arguments in parsed[: _MAX_CALLS - len(calls)]:
            function = {"name": well_formed(name), "arguments": well_formed(json.dumps(arguments, ensure_ascii=False))}
            calls.append({"id": f"call{start + len(calls):05d}", "type": "function", "function": function})
        return ""

    pattern, parse = FORMATS[form]
    content = pattern.sub(read, text)
    return (content.strip() if calls else content), calls, malformed


def format_of(template: str) -> str:
    """Return the key in `FORMATS` of the tool calls of a chat template, from its source; "hermes" if none is recognised."""
    return next((form for mark, form in _MARKS if mark in template), "hermes")


def _call(value: Any) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a tool call in JSON. Raises `_MalformedCall`."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise _MalformedCall(f'it has no "name"; write {_EXPECTED}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise _MalformedCall(f'the "arguments" of {value["name"][:60]} are not a JSON object; write {_EXPECTED}')
    return value["name"], arguments


def _json(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    # A deeply nested text exhausts the stack of the parser.
    except (ValueError, RecursionError) as error:
        raise _MalformedCall(f"it is not valid JSON ({error}); write {_EXPECTED}") from None


def _call_or_list(text: str) -> Calls:
    value = _json(text.strip())
    return [_call(item) for item in value] if isinstance(value, list) else [_call(value)]


def _hermes(match: re.Match[str]) -> Calls:
    """Parse what is between `<tool_call>` tags: JSON, or Qwen3-Coder's XML."""
    inner = match["call"].strip()
    if match["end"] is None:
        raise _MalformedCall("it has no </tool_call>")
    return _xml(inner) if inner.startswith("<function=") else _call_or_list(inner)


def _xml(text: str) -> Calls:
    """Parse Qwen3-Coder's `<function=f><parameter=x>1</parameter></function>`; parameters that are JSON are decoded."""
    made: Calls = []
    for name, body in re.findall(r"<function=([^>\s]+)>(.*?)</function>", text, re.DOTALL):
        arguments = {}
        for key, value in re.findall(r"<parameter=([^>\s]+)>(.*?)</parameter>", body, re.DOTALL):
            try:
                arguments[key] = json.loads(value)
            except (ValueError, RecursionError):
                arguments[key] = value.removeprefix("\n").removesuffix("\n")
        made.append((name, arguments))
    if not made:
        raise _MalformedCall("it has no <function=name> ... </function>")
    return made


def _in_sequence(match: re.Match[str]) -> Calls:
    """Parse Llama 3's JSON objects, optionally separated by semicolons."""
    text, made, decoder = match["call"].strip(), [], json.JSONDecoder(strict=False)
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError) as error:
            raise _MalformedCall(f"it is not valid JSON ({error}); write {_EXPECTED.replace('arguments', 'parameters')}") from None
        made.append(_call(value))
        text = text[end:].lstrip("; \n")
    return made


def _mistral(match: re.Match[str]) -> Calls:
    """Parse `[TOOL_CALLS]` with a JSON list, or with a name, an optional `[ARGS]`, and a JSON object."""
    text = match["call"].strip()
    if text.startswith(("[{", "{")) or not (named := re.match(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*)", text, re.DOTALL)):
        return _call_or_list(text)
    return [_call({"name": named[1], "arguments": _json(named[2])})]


def _pythonic(match: re.Match[str]) -> Calls:
    """Parse `[f(x=1), g()]`, literals only; nothing is evaluated."""
    try:
        tree = ast.parse(match["call"].strip(), mode="eval").body
        items = tree.elts if isinstance(tree, ast.List) else [tree]
        return [(_name(item), {key.arg: ast.literal_eval(key.value) for key in item.keywords}) for item in items]  # type: ignore[attr-defined,misc]
    # The errors of parsing generated text: nested too deeply, no call, no literal, a NUL.
    except (SyntaxError, ValueError, AttributeError, TypeError, RecursionError, MemoryError):
        raise _MalformedCall("it is not a list of calls with literal keyword arguments; write [name(key=value)]") from None


def _name(call: ast.expr) -> str:
    if not isinstance(call, ast.Call) or call.args or any(key.arg is None for key in call.keywords):
        raise ValueError
    return ast.unparse(call.func)


def _harmony(match: re.Match[str]) -> Calls:
    return [_call({"name": match["name"], "arguments": _json(match["call"] or "{}")})]


def _deepseek(match: re.Match[str]) -> Calls:
    text = re.sub(r"^```(?:json)?\s*|\s*```$", "", match["call"].strip())
    return [_call({"name": match["name"].strip(), "arguments": _json(text)})]


def _listed(match: re.Match[str]) -> Calls:
    return _call_or_list(match["call"])


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL)


FORMATS: dict[str, tuple[re.Pattern[str], Callable[[re.Match[str]], Calls]]] = {
    "hermes": (_pattern(r"<tool_call>(?P<call>.*?)(?:(?P<end></tool_call>)|(?=<tool_call>)|\Z)"), _hermes),
    "llama3": (_pattern(r'\A\s*(?:<\|python_tag\|>)?(?P<call>\{(?=\s*"(?:name|type|function|parameters|arguments)").*)\Z'), _in_sequence),
    "mistral": (_pattern(r"\[TOOL_CALLS\](?P<call>.*?)(?=\[TOOL_CALLS\]|\Z)"), _mistral),
    "pythonic": (_pattern(r"(?:<\|tool_call_start\|>|\A\s*(?=\[[\w.]+\())(?P<call>.*?)(?:<\|tool_call_end\|>|\Z)"), _pythonic),
    "harmony": (
        _pattern(
            r"(?:<\|start\|>assistant(?:<\|channel\|>)?|<\|channel\|>|\A)[^<]*to=functions\.(?P<name>[\w.-]+)[^<]*(?:<\|channel\|>[^<]*)?"
            r"(?:<\|constrain\|>[^<]*)?<\|message\|>(?P<call>.*?)(?:<\|call\|>|\Z)"
        ),
        _harmony,
    ),
    "deepseek": (
        _pattern(
            r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:function)?<｜tool▁sep｜>(?P<name>[^\n<]*)\n?(?P<call>.*?)"
            r"(?:<｜tool▁call▁end｜>|\Z)(?:\s*<｜tool▁calls▁end｜>)?"
        ),
        _deepseek,
    ),
    "phi4": (_pattern(r"(?:functools(?=\[)|<\|tool_call\|>)(?P<call>.*?)(?:<\|/tool_call\|>|\Z)"), _listed),
}
"""Format -> pattern of a tool call, and the function that parses a match."""

_MARKS = (
    ("<|channel|>", "harmony"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call_start|>", "pythonic"),
    ("<tool_call>", "hermes"),
    ("functools", "phi4"),
    ("<|tool_call|>", "phi4"),
    ("<|start_header_id|>", "llama3"),
)
