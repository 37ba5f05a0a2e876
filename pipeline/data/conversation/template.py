"""Chat templates: conversations as token ids, the ids between two turns, and generated ids as a message.

Between two turns only the text after the completion's end-of-turn token is tokenised, so that generated ids are never computed from text.
Templates differ in the form in which they read messages, and some drop other forms without an error, so the form is probed.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from penstock.pipeline.data.conversation.control_tokens import ControlTokens
from penstock.pipeline.data.conversation.messages import Message, ParsedCompletion, Template, TemplateRefused, Tools, plain, text_of
from penstock.pipeline.data.conversation.parsers import format_of, read_calls, split_harmony, split_reasoning
from penstock.pipeline.data.model_files import (
    chat_template_of,
    compiled,
    encode_prompt,
    light_tokenizer,
    model_folder,
    one_line,
    special_tokens,
    variables,
)
from penstock.topics.wire.visible import well_formed

_COMPLETION = "QZJX0QZJX"
"""Placeholder for a completion, to find the text after it; no template contains it."""
_PROBE = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}}
_TEXT = "QZJX1QZJX"
_NAME = "qzjx2qzjx"
_INSTRUCTIONS = """You may call one or more functions. These are their signatures, in <tools></tools>:
<tools>
{tools}
</tools>

For each call, write a JSON object with the function's name and arguments in <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_SECOND_CALL = "The call of {name} was not run, because a turn may contain only one tool call. Repeat it in a separate turn."
_NEWS = "WVKY1WVKY"
"""Placeholder for the next messages, to find where a template puts them."""


def template_of(
    model_directory: str | Path, *, chat_template: str = "auto", stop_ids: Sequence[int], arguments: Mapping[str, Any] | None = None
) -> Template:
    """Return the chat template of a model, or a `PlainTemplate` if it has none; `chat_template` is the setting of this name.

    `stop_ids` end a completion. `arguments` are passed to the template. Raises `ConfigError`.
    """
    folder = model_folder(model_directory)
    source = chat_template_of(folder, chat_template)
    tokenizer = light_tokenizer(folder)
    if source is None:
        return PlainTemplate(tokenizer, stop_ids, encode_prompt(folder, tokenizer))
    return ChatTemplate(tokenizer, source, stop_ids=stop_ids, arguments={**special_tokens(folder), **(arguments or {})})


@dataclass(frozen=True, slots=True)
class Form:
    """Form in which a template reads messages."""

    parts: bool = False
    """True if texts are lists of parts, as in templates of multimodal models."""
    empty: str | None = ""
    text_arguments: bool = False
    """True if the arguments of tool calls are JSON text and not objects."""

    def of(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message in this form."""
        content, calls = message["content"], message.get("tool_calls")
        if content and self.parts:
            content = [{"type": "text", "text": content}]
        made = {**message, "content": content or (self.empty if calls else "")}
        if calls and self.text_arguments:
            made["tool_calls"] = [{**call, "function": {**call["function"], "arguments": _as_json(call["function"])}} for call in calls]
        return made


def _text_form(render: Callable[[list[dict[str, Any]]], str]) -> Form:
    """Return the first form in which a rendered message contains its text."""
    forms = (Form(), Form(parts=True))
    return next((form for form in forms if _contains(render, form, [{"role": "user", "content": _TEXT}], _TEXT)), Form())


def _call_form(render: Callable[[list[dict[str, Any]]], str], parts: bool) -> Form | None:
    """Return the first form in which a rendered message contains its tool calls; None if the template renders them in no form."""
    call = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": {"x": _TEXT}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "content": "r"},
    ]
    for text_arguments, empty in product((False, True), ("", None)):
        form = Form(parts=parts, empty=empty, text_arguments=text_arguments)
        if _contains(render, form, messages, _NAME, _TEXT):
            return form
    return None


def _single_call(render: Callable[[list[dict[str, Any]]], str], form: Form) -> bool:
    """True if the template supports only one tool call per message, because it rejects or drops a second one."""
    calls: list[dict[str, Any]] = [
        {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": {}}}
        for number, name in enumerate((_NAME, _TEXT))
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in calls]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    return not _contains(render, form, messages, _NAME, _TEXT)


def _contains(render: Callable[[list[dict[str, Any]]], str], form: Form, messages: list[dict[str, Any]], *words: str) -> bool:
    """True if all `words` are in the messages as the template renders them in this form."""
    try:
        text = render([form.of(message) for message in messages])
    # The boundary to a template, which may raise any error for an unsupported form.
    except Exception:
        return False
    return all(word in text for word in words)


def _as_json(function: dict[str, Any]) -> str:
    arguments = function["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


class _TokenizedText:
    """The methods of `Template` that need only the tokenizer."""

    _tokenizer: Any

    def shortened(self, text: str, tokens: int) -> str:
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        if len(encoded.ids) <= tokens:
            return text
        return f"{text[: encoded.offsets[tokens - 1][1]]} [truncated: the first {tokens:,} of {len(encoded.ids):,} tokens]"

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))


class ChatTemplate(_TokenizedText):
    """A Jinja chat template with a tokenizer of the `tokenizers` library; arguments as in `template_of`.

    For a template without support for tools or tool calls, both are rendered as text in Hermes' format.
    """

    def __init__(self, tokenizer: Any, source: str, *, stop_ids: Sequence[int], arguments: Mapping[str, Any] | None = None) -> None:
        self._template = compiled(source)
        self._tokenizer, self._arguments = tokenizer, dict(arguments or {})
        self._control = ControlTokens(tokenizer)
        self._form = _text_form(lambda messages: self._render(messages, None))
        with_tools = (lambda messages: self._render(messages, [_PROBE])) if "tools" in variables(source) else None
        tools_form = with_tools and _call_form(with_tools, self._form.parts)
        self._takes_tools = tools_form is not None
        self._call_form = tools_form or _call_form(lambda messages: self._render(messages, None), self._form.parts)
        self._single_call = bool(with_tools and tools_form and _single_call(with_tools, tools_form))
        self._format = format_of(source) if self._takes_tools else "hermes"
        self._thinks, self._developer = "think>" in source, "developer" in source
        self._stop_ids = frozenset(stop_ids)
        added = tokenizer.get_added_tokens_decoder()
        # Only an added token is a boundary that no BPE merge crosses.
        self._stops = {added[stop].content: stop for stop in stop_ids if stop in added}
        special = [token.content for token in added.values() if token.special]
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")

    def render(self, messages: Sequence[Message], tools: Tools | None) -> list[int]:
        return self.rendered(messages, tools)[1]

    def rendered(self, messages: Sequence[Message], tools: Tools | None) -> tuple[str, list[int]]:
        """Return text and token ids of a conversation with the generation prompt; a last assistant message is continued.

        Raises `TemplateRefused` if the template cannot render the messages.
        """
        made, tools = self._escaped(messages), self._escaped_tools(tools)
        text = self._apart(lambda apart: self._prompt(apart, tools), made) or ""
        if ids := self._control.encode(text):
            return self._control.restore(text), ids
        raise TemplateRefused("the chat template renders these messages as an empty text")

    def ends_turns(self) -> bool:
        """False if the template writes no stop token after a completion, so that a model trained with it never stops."""
        messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": _COMPLETION}, {"role": "user", "content": "u"}]
        try:
            rest = self._text(messages, None).rpartition(_COMPLETION)[2]
        except TemplateRefused:
            return True
        return not self._stops or self._end_of_turn(rest) is not None

    def bridge(self, messages: Sequence[Message], prefix: int, tools: Tools | None, last: int) -> list[int] | None:
        """Return the token ids between a completion and the next one; None if the template does not allow appending the new messages."""
        *before, completion = self._escaped(messages[:prefix])
        for message in before:
            message.pop("reasoning_content", None)
        while before and before[-1]["role"] == "assistant":  # the completion continued it
            before.pop()
        tools = self._escaped_tools(tools)
        text = self._apart(lambda new: self._after_completion(before, completion, new, tools), self._escaped(messages[prefix:]))
        if text is None:
            return None
        ids = self._control.encode(text)
        if last not in self._stop_ids:
            return ids
        # The model generated a stop id, which cannot be replaced by a different one of the template.
        return ids[1:] if ids[0] == last else None

    def parse(self, token_ids: Sequence[int], before: Sequence[int], tools: Tools | None, calls: int) -> ParsedCompletion:
        """Return the message in generated token ids, with reasoning separate, and tool calls if there are `tools`."""
        ids = list(token_ids[:-1] if token_ids and token_ids[-1] in self._stop_ids else token_ids)
        text = self.decode(ids)
        reasoning: str | None = None
        if self._format == "harmony":
            reasoning, text = split_harmony(text)
        elif self._thinks:
            reasoning, text = split_reasoning(text, opened=self.decode(before).rstrip().endswith("<think>"))
        text, tool_calls, malformed = read_calls(text, self._format, calls) if tools else (text, [], [])
        if self._single_call and len(tool_calls) > 1:
            malformed = [*malformed, *(_SECOND_CALL.format(name=call["function"]["name"]) for call in tool_calls[1:])]
            tool_calls = tool_calls[:1]
        content = self._special.sub("", text)
        message: dict[str, Any] = {"role": "assistant", "content": (content or None) if tool_calls else content}
        if reasoning is not None:
            message["reasoning_content"] = self._special.sub("", reasoning)
        if tool_calls:
            message["tool_calls"] = tool_calls
        return ParsedCompletion(message, tuple(malformed))

    def _after_completion(
        self, before: list[dict[str, Any]], completion: dict[str, Any], new: list[dict[str, Any]], tools: Tools | None
    ) -> str | None:
        """Return the text from the end of the completion's turn to the next generation prompt; None if it depends on what is before."""
        other = [{**message, "content": f"{_NEWS}{number}"} for number, message in enumerate(new)]
        for turn in _placeholders(completion):
            try:
                text, moved = (self._text([*before, turn, *next_messages], tools) for next_messages in (new, other))
            except TemplateRefused:
                continue
            prefix, _, rest = text.rpartition(_COMPLETION)
            same_prefix, _, other_rest = moved.rpartition(_COMPLETION)
            end, other_end = self._end_of_turn(rest), self._end_of_turn(other_rest)
            # The next messages must appear neither before the completion nor before the end of its turn.
            if _COMPLETION not in text or prefix != same_prefix or end is None or rest[:end] != other_rest[:other_end]:
                continue
            if _NEWS not in other_rest[:other_end]:
                return rest[end:]
        return None

    def _end_of_turn(self, text: str) -> int | None:
        ends = [(text.index(stop), -len(stop)) for stop in self._stops if stop in text]
        return min(ends)[0] if ends else None

    def _escaped(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages in plain form, with placeholders for control tokens. Raises `TemplateRefused`."""
        try:
            return [self._control.escape(plain(message, developer=self._developer)) for message in messages]
        except RecursionError:
            raise TemplateRefused("a message is nested too deeply") from None

    def _escaped_tools(self, tools: Tools | None) -> Tools | None:
        try:
            return None if tools is None else list(self._control.escape_text(tools))
        except RecursionError:
            raise TemplateRefused("a tool is nested too deeply") from None

    def _apart(self, render: Callable[[list[dict[str, Any]]], str | None], messages: list[dict[str, Any]]) -> str | None:
        """Return the rendered messages (None if `render` does), with separators if two of their texts would form a control token."""
        text, jointed = render(messages), self._control.jointed(messages)
        apart = render(jointed) if text is not None and jointed != messages else None
        return text if text is None or apart is None or not self._control.joined(text, apart) else apart

    def _prompt(self, messages: list[dict[str, Any]], tools: Tools | None) -> str:
        """Render messages with a generation prompt; a last assistant message is left open. Raises `TemplateRefused`."""
        if not messages or messages[-1]["role"] != "assistant":
            return self._text(messages, tools)
        *before, last = messages
        if last.get("tool_calls"):
            raise TemplateRefused("the last message calls a tool, but no tool message with the result follows")
        marked = {**last, "content": f"{last['content']}{_COMPLETION}"}
        text, mark, _ = self._text([*before, marked], tools, turn=False).rpartition(_COMPLETION)
        if not mark:
            raise TemplateRefused("the chat template omits the last message, which the policy should continue")
        if not text.endswith(last["content"].lstrip()):
            raise TemplateRefused(
                "the chat template changes the last message, which the policy should continue: write the message as the template renders it"
            )
        return text

    def _text(self, messages: list[dict[str, Any]], tools: Tools | None, *, turn: bool = True) -> str:
        """Render messages in the form that the template reads. Raises `TemplateRefused`."""
        calls = any("tool_calls" in message for message in messages)
        form = self._form if self._call_form is None else self._call_form
        if not self._takes_tools and (tools or (calls and self._call_form is None)):
            messages, tools, form = _without_tools(messages, tools), None, self._form
        try:
            return well_formed(self._render([form.of(message) for message in messages], tools, turn=turn))
        # The boundary to a template, which may raise any error.
        except Exception as error:
            raise TemplateRefused(f"the chat template rejects the messages: {one_line(error)}") from error

    def _render(self, messages: list[dict[str, Any]], tools: Tools | None, *, turn: bool = True) -> str:
        settings = {"tools": None, "documents": None, **self._arguments, "add_generation_prompt": turn}
        return self._template.render({**settings, "messages": messages, **({"tools": list(tools)} if tools else {})})


def _placeholders(completion: dict[str, Any]) -> list[dict[str, Any]]:
    """Return turns of the completion's kind that contain `_COMPLETION`, as late in the turn as templates allow."""
    calls = completion.get("tool_calls")
    if not calls:
        return [{"role": "assistant", "content": _COMPLETION}]
    before = [{**call, "function": {**call["function"], "arguments": {"x": "y"}}} for call in calls]
    marked = [*before[:-1], {**before[-1], "function": {**before[-1]["function"], "arguments": {"x": _COMPLETION}}}]
    return [{"role": "assistant", "content": "", "tool_calls": marked}, {"role": "assistant", "content": _COMPLETION, "tool_calls": before}]


def _without_tools(messages: list[dict[str, Any]], tools: Tools | None) -> list[dict[str, Any]]:
    """Return the messages for a template that does not support tools: the first message describes the tools, calls and results are text."""
    made = [_as_text(message) for message in messages]
    if tools:
        described = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if not made:
            raise TemplateRefused("tools are described in the first message, but there is no message")
        # Not every template accepts an additional system message.
        pieces = [made[0]["content"], described]
        made[0] = {**made[0], "content": "\n\n".join(pieces if made[0]["role"] == "system" else pieces[::-1])}
    return _results_together(made)


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its tool calls or its tool result written as text in Hermes' format."""
    if message["role"] == "tool":
        return {"role": "tool", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not (calls := message.get("tool_calls")):
        return message
    written = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([*([message["content"]] if message["content"] else []), *written])}


def _results_together(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge consecutive tool results into one user message, because many templates require alternating roles."""
    made: list[dict[str, Any]] = []
    joinable = False
    for message in messages:
        if message["role"] == "tool" and joinable:
            made[-1] = {"role": "user", "content": f"{made[-1]['content']}\n{message['content']}"}
        else:
            made.append({"role": "user", "content": message["content"]} if message["role"] == "tool" else message)
        joinable = message["role"] == "tool"
    return made


class PlainTemplate(_TokenizedText):
    """For models without a chat template. Each completion ends with a stop id, directly followed by the next message.

    `tokenizer` is from the `tokenizers` library. The first of `stop_ids` closes a truncated completion. `encode_prompt` encodes the first
    message, a pre-rendered prompt whose control tokens are encoded as such. In all other messages they are text.
    """

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int], encode_prompt: Callable[[str], list[int]]) -> None:
        self._tokenizer, self._stop_ids, self._encode_prompt = tokenizer, tuple(stop_ids), encode_prompt
        self._control = ControlTokens(tokenizer)

    def render(self, messages: Sequence[Message], tools: Tools | None) -> list[int]:
        """Return the ids of all texts. Completions are closed with the first stop id, except a last one, which is continued.

        Raises `TemplateRefused` if there are no texts, or if there are tools.
        """
        if tools:
            raise TemplateRefused("tools need a chat template: set data.chat_template to a Jinja file")
        ids: list[int] = []
        for number, message in enumerate(messages, 1):
            ids += self._encode_text(message) if ids else self._encode_prompt(text_of(message))
            ids += self._stop_ids[:1] if message.get("role") == "assistant" and number < len(messages) else ()
        if not ids:
            raise TemplateRefused("all messages are empty")
        return ids

    def bridge(self, messages: Sequence[Message], prefix: int, tools: Tools | None, last: int) -> list[int] | None:
        """Return a stop id if the completion has none, and the ids of the new texts."""
        ids = [] if last in self._stop_ids else list(self._stop_ids[:1])
        for message in messages[prefix:]:
            ids += self._encode_text(message)
        return ids

    def _encode_text(self, message: Message) -> list[int]:
        return self._control.encode(self._control.escape({"role": message.get("role"), "content": text_of(message)})["content"])

    def parse(self, token_ids: Sequence[int], before: Sequence[int], tools: Tools | None, calls: int) -> ParsedCompletion:
        return ParsedCompletion({"role": "assistant", "content": str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))})
