"""In which form a chat template reads messages: templates differ in it, and some drop what they do not read without an error."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

_TEXT = "QZJX1QZJX"
_NAME = "qzjx2qzjx"


@dataclass(frozen=True, slots=True)
class Form:
    """How messages are handed to a template."""

    parts: bool = False
    """True if texts are lists of parts, as templates of models with vision want them."""
    empty: str | None = ""
    """The content of an answer that only calls tools."""
    text_arguments: bool = False
    """True if the arguments of calls are JSON text and not objects."""

    def of(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message in this form."""
        content, calls = message["content"], message.get("tool_calls")
        if content and self.parts:
            content = [{"type": "text", "text": content}]
        made = {**message, "content": content or (self.empty if calls else "")}
        if calls and self.text_arguments:
            made["tool_calls"] = [{**call, "function": {**call["function"], "arguments": _text(call["function"])}} for call in calls]
        return made


def text_form(render: Callable[[list[dict[str, Any]]], str]) -> Form:
    """The first form in which a message's text shows in what `render` makes of it."""
    forms = (Form(), Form(parts=True))
    return next((form for form in forms if _shows(render, form, [{"role": "user", "content": _TEXT}], _TEXT)), Form())


def call_form(render: Callable[[list[dict[str, Any]]], str], parts: bool) -> Form | None:
    """The first form in which calls of tools show in what `render` makes of them; None if there is none."""
    call = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": {"x": _TEXT}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "content": "r"},
    ]
    for text_arguments, empty in product((False, True), ("", None)):
        form = Form(parts=parts, empty=empty, text_arguments=text_arguments)
        if _shows(render, form, messages, _NAME, _TEXT):
            return form
    return None


def one_call_a_turn(render: Callable[[list[dict[str, Any]]], str], form: Form) -> bool:
    """True if `render` refuses a message with two calls, or leaves one of them out."""
    calls: list[dict[str, Any]] = [
        {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": {}}}
        for number, name in enumerate((_NAME, _TEXT))
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in calls]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    return not _shows(render, form, messages, _NAME, _TEXT)


def _shows(render: Callable[[list[dict[str, Any]]], str], form: Form, messages: list[dict[str, Any]], *wanted: str) -> bool:
    try:
        text = render([form.of(message) for message in messages])
    # The boundary to a template, which may raise any error for a form that it does not read.
    except Exception:
        return False
    return all(word in text for word in wanted)


def _text(function: dict[str, Any]) -> str:
    arguments = function["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
