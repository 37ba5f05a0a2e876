"""Chat templates: whole conversations as token ids, the ids between two turns, and drawn ids as a message.

The rule: between two turns only that text is tokenised which follows the first end-of-turn token after the answer, so no drawn id is
ever computed from text again.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.pipeline.envs.chat_template import chat_template_of, compiled, one_line, special_tokens, variables
from penstock.pipeline.envs.conversation.base import Said, Template
from penstock.pipeline.envs.conversation.forms import call_form, text_form
from penstock.pipeline.envs.conversation.messages import Message, TemplateRefused, Tools, plain, shortened, text_of
from penstock.pipeline.envs.conversation.plain import PlainTemplate
from penstock.pipeline.envs.conversation.reasoning import split_harmony, split_reasoning
from penstock.pipeline.envs.conversation.tool_calls import format_of, read_calls
from penstock.pipeline.envs.conversation.tool_prompt import without_tools
from penstock.pipeline.envs.tokenization import light_tokenizer, model_folder

_ANSWER = "QZJX0QZJX"
"""Stands for an answer where only what follows it is wanted; no template contains it."""
_PROBE = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}}
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
        return PlainTemplate(tokenizer, stop_ids)
    return ChatTemplate(tokenizer, source, stop_ids=stop_ids, arguments={**special_tokens(folder), **(arguments or {})})


class ChatTemplate:
    """A Jinja chat template with a tokenizer of the `tokenizers` library; arguments as in `template_of`.

    A template that does not read tools, or does not show calls of them, gets both as text in Hermes' format.
    """

    def __init__(self, tokenizer: Any, source: str, *, stop_ids: Sequence[int], arguments: Mapping[str, Any] | None = None) -> None:
        self._template = compiled(source)
        self._tokenizer, self._arguments = tokenizer, dict(arguments or {})
        self._form = text_form(lambda messages: self._render(messages, None))
        calls = call_form(lambda messages: self._render(messages, [_PROBE]), self._form.parts) if "tools" in variables(source) else None
        self._takes_tools, self._form = calls is not None, calls or self._form
        self._format = format_of(source) if self._takes_tools else "hermes"
        self._thinks = "think>" in source
        self._stop_ids = frozenset(stop_ids)
        added = tokenizer.get_added_tokens_decoder()
        # Only an added token is a boundary that no merge crosses.
        self._stops = {added[stop].content: stop for stop in stop_ids if stop in added}
        special = [token.content for token in added.values() if token.special]
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")

    def render(self, messages: Sequence[Message], tools: Tools | None) -> list[int]:
        """The ids of a whole conversation with the prompt for the next answer. Raises `TemplateRefused`."""
        if ids := self._encode(self._text([plain(message) for message in messages], tools)):
            return ids
        raise TemplateRefused("the chat template renders these messages as nothing")

    def bridge(self, messages: Sequence[Message], known: int, tools: Tools | None, last: int) -> list[int] | None:
        """The ids between an answer and the next one; None where the template does not let `messages[known:]` be appended."""
        held = [plain(message) for message in messages[: known - 1]]
        for message in held:
            message.pop("reasoning_content", None)
        new = [plain(message) for message in messages[known:]]
        text = self._after_answer(held, plain(messages[known - 1]), new, tools)
        if text is None:
            return None
        ids = self._encode(text)
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
        if any(_ANSWER in text_of(message) for message in new):
            return None
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

    def _text(self, messages: list[dict[str, Any]], tools: Tools | None) -> str:
        if not self._takes_tools:
            messages, tools = without_tools(messages, tools), None
        try:
            return self._render([self._form.of(message) for message in messages], tools)
        # The boundary to a template, which may raise any error.
        except Exception as error:
            raise TemplateRefused(f"the chat template refuses the messages: {one_line(error)}") from error

    def _render(self, messages: list[dict[str, Any]], tools: Tools | None) -> str:
        settings: dict[str, Any] = {"tools": list(tools) if tools else None, "documents": None, "add_generation_prompt": True}
        return self._template.render(messages=messages, **settings, **self._arguments)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _stand_ins(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Turns of the same kind as the answer, with the mark as late in them as a template lets it be."""
    calls = answer.get("tool_calls")
    if not calls:
        return [{"role": "assistant", "content": _ANSWER}]
    before = [{**call, "function": {**call["function"], "arguments": {"x": "y"}}} for call in calls]
    marked = [*before[:-1], {**before[-1], "function": {**before[-1]["function"], "arguments": {"x": _ANSWER}}}]
    return [{"role": "assistant", "content": "", "tool_calls": marked}, {"role": "assistant", "content": _ANSWER, "tool_calls": before}]
