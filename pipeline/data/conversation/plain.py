"""Conversations without a chat template: the texts of the messages, concatenated."""

from collections.abc import Callable, Sequence
from typing import Any

from penstock.pipeline.data.conversation.base import ParsedCompletion
from penstock.pipeline.data.conversation.control_tokens import ControlTokens
from penstock.pipeline.data.conversation.messages import Message, TemplateRefused, Tools, shortened, text_of


class PlainTemplate:
    """For models without a chat template. Each completion ends with a stop id, directly followed by the next message.

    `tokenizer` is from the `tokenizers` library. The first of `stop_ids` closes a truncated completion. `encode_prompt` encodes the first
    message, a pre-rendered prompt whose control tokens are encoded as such. In all other messages they are text.
    """

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int], encode_prompt: Callable[[str], list[int]]) -> None:
        self._tokenizer, self._stop_ids, self._encode_prompt = tokenizer, tuple(stop_ids), encode_prompt
        self._control = ControlTokens(tokenizer)

    def render(self, messages: Sequence[Message], tools: Tools | None) -> list[int]:
        """The ids of all texts. Completions are closed with the first stop id, except a last one, which is continued.

        Raises:
            TemplateRefused: there are no texts, or there are tools.
        """
        if tools:
            raise TemplateRefused("tools need a chat template: set data.chat_template to a Jinja file")
        ids: list[int] = []
        for number, message in enumerate(messages, 1):
            ids += self._encode_text(message) if ids else self._encode_prompt(text_of(message))
            ids += self._stop_ids[:1] if message.get("role") == "assistant" and number < len(messages) else ()
        if not ids:
            raise TemplateRefused("the messages have no text")
        return ids

    def bridge(self, messages: Sequence[Message], prefix: int, tools: Tools | None, last: int) -> list[int] | None:
        """A stop id if the completion has none, and the ids of the new texts."""
        ids = [] if last in self._stop_ids else list(self._stop_ids[:1])
        for message in messages[prefix:]:
            ids += self._encode_text(message)
        return ids

    def shortened(self, text: str, tokens: int) -> str:
        return shortened(text, tokens, self._tokenizer)

    def _encode_text(self, message: Message) -> list[int]:
        return self._control.encode(self._control.escape({"role": message.get("role"), "content": text_of(message)})["content"])

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def parse(self, token_ids: Sequence[int], before: Sequence[int], tools: Tools | None, calls: int) -> ParsedCompletion:
        """The text without special tokens."""
        return ParsedCompletion({"role": "assistant", "content": str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))})
