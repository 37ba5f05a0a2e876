"""Chat templates: whole conversations as token ids, the ids between two turns, and drawn ids as a message.

The rule: between two turns only that text is tokenised which follows the first end-of-turn token after the answer, so no drawn id is
ever computed from text again.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.pipeline.envs.chat_template import chat_template_of, compiled, one_line, special_tokens, variables
from penstock.pipeline.envs.conversation.base import Said, Template
from penstock.pipeline.envs.conversation.control_tokens import ControlTokens
from penstock.pipeline.envs.conversation.forms import call_form, one_call_a_turn, text_form
from penstock.pipeline.envs.conversation.messages import Message, TemplateRefused, Tools, plain, shortened
from penstock.pipeline.envs.conversation.model_files import encode_prompt, light_tokenizer, model_folder
from penstock.pipeline.envs.conversation.plain import PlainTemplate
from penstock.pipeline.envs.conversation.reasoning import split_harmony, split_reasoning
from penstock.pipeline.envs.conversation.tool_calls import format_of, read_calls
from penstock.pipeline.envs.conversation.tool_prompt import without_tools
from penstock.topics.wire.well_formed import well_formed

_ANSWER = "QZJX0QZJX"
"""Stands for an answer where only what follows it is wanted; no template contains it."""
_PROBE = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}}
_SECOND_CALL = "The call of {name} was not run: one turn takes one tool call. Call it in a turn of its own."
_NEWS = "WVKY1WVKY"
"""A placeholder for the next messages, to find where a template puts them."""


def template_of(
    model_directory: str | Path,
    *,
    chat_template: str = "auto",
    stop_ids: Sequence[int],
    arguments: Mapping[str, Any] | None = None,
) -> Template:
    """The chat template of a model, or the texts one after the other where it has none; `chat_template` as in `data.chat_template`.

    `stop_ids` end an answer. `arguments` go to the template. Raises `ConfigError`.
    """
    folder = model_folder(model_directory)
    source = chat_template_of(folder, chat_template)
    tokenizer = light_tokenizer(folder)
    if source is None:
        return PlainTemplate(tokenizer, stop_ids, encode_prompt(folder, tokenizer))
    return ChatTemplate(tokenizer, source, stop_ids=stop_ids, arguments={**special_tokens(folder), **(arguments or {})})


class ChatTemplate:
    """A Jinja chat template with a tokenizer of the `tokenizers` library; arguments as in `template_of`.

    A template that does not read tools, or does not show calls of them, gets both as text in Hermes' format.
    """

    def __init__(self, tokenizer: Any, source: str, *, stop_ids: Sequence[int], arguments: Mapping[str, Any] | None = None) -> None:
        self._template = compiled(source)
        self._tokenizer, self._arguments = tokenizer, dict(arguments or {})
        self._control = ControlTokens(tokenizer)
        self._form = text_form(lambda messages: self._render(messages, None))
        with_tools = (lambda messages: self._render(messages, [_PROBE])) if "tools" in variables(source) else None
        tools_form = with_tools and call_form(with_tools, self._form.parts)
        self._takes_tools = tools_form is not None
        self._call_form = tools_form or call_form(lambda messages: self._render(messages, None), self._form.parts)
        self._one_call = bool(with_tools and tools_form and one_call_a_turn(with_tools, tools_form))
        self._format = format_of(source) if self._takes_tools else "hermes"
        self._thinks, self._developer = "think>" in source, "developer" in source
        self._stop_ids = frozenset(stop_ids)
        added = tokenizer.get_added_tokens_decoder()
        # Only an added token is a boundary that no merge crosses.
        self._stops = {added[stop].content: stop for stop in stop_ids if stop in added}
        special = [token.content for token in added.values() if token.special]
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")

    def render(self, messages: Sequence[Message], tools: Tools | None) -> list[int]:
        """The ids of a whole conversation with the prompt for the next answer. Raises `TemplateRefused`."""
        return self.rendered(messages, tools)[1]

    def rendered(self, messages: Sequence[Message], tools: Tools | None) -> tuple[str, list[int]]:
        """Text and ids of a whole conversation with the prompt for the next answer; a last message of the assistant is continued.

        Raises:
            TemplateRefused: the template cannot render the messages.
        """
        made, tools = self._escaped(messages), self._escaped_tools(tools)
        text = self._apart(lambda apart: self._prompt(apart, tools), made) or ""
        if ids := self._control.encode(text):
            return self._control.restore(text), ids
        raise TemplateRefused("the chat template renders these messages as nothing")

    def ends_answers(self) -> bool:
        """False if the template writes no stop token after an answer, so that a model that learned from it ends none."""
        messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": "u"}]
        try:
            rest = self._text(messages, None).rpartition(_ANSWER)[2]
        except TemplateRefused:
            return True
        return not self._stops or self._end_of_turn(rest) is not None

    def bridge(self, messages: Sequence[Message], known: int, tools: Tools | None, last: int) -> list[int] | None:
        """The ids between an answer and the next one; None where the template does not let `messages[known:]` be appended."""
        *held, answer = self._escaped(messages[:known])
        for message in held:
            message.pop("reasoning_content", None)
        while held and held[-1]["role"] == "assistant":  # the answer continued it
            held.pop()
        tools = self._escaped_tools(tools)
        text = self._apart(lambda new: self._after_answer(held, answer, new, tools), self._escaped(messages[known:]))
        if text is None:
            return None
        ids = self._control.encode(text)
        if last not in self._stop_ids:
            return ids
        # The model drew the end of its turn itself. Another one than the template writes cannot be exchanged.
        return ids[1:] if ids[0] == last else None

    def shortened(self, text: str, tokens: int) -> str:
        """Its first `tokens` tokens, and a mark if there are more."""
        return shortened(text, tokens, self._tokenizer)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Their text, special tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def parse(self, token_ids: Sequence[int], before: Sequence[int], tools: Tools | None, calls: int) -> Said:
        """The answer in the drawn ids: reasoning apart, tool calls read if there are `tools`."""
        ids = list(token_ids[:-1] if token_ids and token_ids[-1] in self._stop_ids else token_ids)
        text = self.decode(ids)
        reasoning: str | None = None
        if self._format == "harmony":
            reasoning, text = split_harmony(text)
        elif self._thinks:
            reasoning, text = split_reasoning(text, opened=self.decode(before).rstrip().endswith("<think>"))
        text, found, malformed = read_calls(text, self._format, calls) if tools else (text, [], [])
        if self._one_call and len(found) > 1:
            malformed = [*malformed, *(_SECOND_CALL.format(name=call["function"]["name"]) for call in found[1:])]
            found = found[:1]
        content = self._special.sub("", text)
        message: dict[str, Any] = {"role": "assistant", "content": (content or None) if found else content}
        if reasoning is not None:
            message["reasoning_content"] = self._special.sub("", reasoning)
        if found:
            message["tool_calls"] = found
        return Said(message, tuple(malformed))

    def _after_answer(
        self, held: list[dict[str, Any]], answer: dict[str, Any], new: list[dict[str, Any]], tools: Tools | None
    ) -> str | None:
        """The text from the end of the answer's turn to the next answer."""
        other = [{**message, "content": f"{_NEWS}{number}"} for number, message in enumerate(new)]
        for turn in _stand_ins(answer):
            try:
                text, moved = (self._text([*held, turn, *said], tools) for said in (new, other))
            except TemplateRefused:
                continue
            prefix, _, rest = text.rpartition(_ANSWER)
            same_prefix, _, other_rest = moved.rpartition(_ANSWER)
            end, other_end = self._end_of_turn(rest), self._end_of_turn(other_rest)
            # The next messages must not appear before the answer, nor before the end of the answer's turn.
            if _ANSWER not in text or prefix != same_prefix or end is None or rest[:end] != other_rest[:other_end]:
                continue
            if _NEWS not in other_rest[:other_end]:
                return rest[end:]
        return None

    def _end_of_turn(self, text: str) -> int | None:
        ends = [(text.index(stop), -len(stop)) for stop in self._stops if stop in text]
        return min(ends)[0] if ends else None

    def _escaped(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
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
        """The text that `render` makes of the messages; no two of their texts form a control token together."""
        text, jointed = render(messages), self._control.jointed(messages)
        apart = render(jointed) if text is not None and jointed != messages else None
        return text if text is None or apart is None or not self._control.joined(text, apart) else apart

    def _prompt(self, messages: list[dict[str, Any]], tools: Tools | None) -> str:
        """The text before the next answer."""
        if not messages or messages[-1]["role"] != "assistant":
            return self._text(messages, tools)
        *before, last = messages
        if last.get("tool_calls"):
            raise TemplateRefused("the last message calls a tool, and the tool's message is missing")
        text, mark, _ = self._text([*before, {**last, "content": f"{last['content']}{_ANSWER}"}], tools, turn=False).rpartition(_ANSWER)
        if not mark:
            raise TemplateRefused("the chat template leaves out the last message, which the policy is to continue")
        if not text.endswith(last["content"].lstrip()):
            raise TemplateRefused("the chat template changes the last message, which the policy is to continue: give it as it renders it")
        return text

    def _text(self, messages: list[dict[str, Any]], tools: Tools | None, *, turn: bool = True) -> str:
        calls = any("tool_calls" in message for message in messages)
        form = self._form if self._call_form is None else self._call_form
        if not self._takes_tools and (tools or (calls and self._call_form is None)):
            messages, tools, form = without_tools(messages, tools), None, self._form
        try:
            return well_formed(self._render([form.of(message) for message in messages], tools, turn=turn))
        # The boundary to a template, which may raise any error.
        except Exception as error:
            raise TemplateRefused(f"the chat template refuses the messages: {one_line(error)}") from error

    def _render(self, messages: list[dict[str, Any]], tools: Tools | None, *, turn: bool = True) -> str:
        settings = {"tools": None, "documents": None, **self._arguments, "add_generation_prompt": turn}
        return self._template.render({**settings, "messages": messages, **({"tools": list(tools)} if tools else {})})


def _stand_ins(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Turns of the same kind as the answer, with the mark as late in them as a template lets it be."""
    calls = answer.get("tool_calls")
    if not calls:
        return [{"role": "assistant", "content": _ANSWER}]
    before = [{**call, "function": {**call["function"], "arguments": {"x": "y"}}} for call in calls]
    marked = [*before[:-1], {**before[-1], "function": {**before[-1]["function"], "arguments": {"x": _ANSWER}}}]
    return [{"role": "assistant", "content": "", "tool_calls": marked}, {"role": "assistant", "content": _ANSWER, "tool_calls": before}]
