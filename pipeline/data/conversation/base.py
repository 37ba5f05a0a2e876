"""Protocol of chat templates: messages to token ids, the ids between two turns, and token ids to a message."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.pipeline.data.conversation.messages import Message, Tools


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """A completion as a message in OpenAI's format, and one error message per unreadable tool call."""

    message: dict[str, Any]
    malformed: tuple[str, ...] = ()


class Template(Protocol):
    """One stateless object per process, shared by its conversations."""

    def render(self, messages: Sequence[Message], tools: Tools | None) -> list[int]:
        """The ids of a conversation with the generation prompt. Raises `TemplateRefused`."""
        ...

    def bridge(self, messages: Sequence[Message], prefix: int, tools: Tools | None, last: int) -> list[int] | None:
        """The ids between a completion and the next one, without rendering the completion.

        `messages[prefix - 1]` is the completion, `last` its last generated id: a stop id at its end is not repeated.
        None if the template does not allow appending; the full conversation is then rendered.
        """
        ...

    def shortened(self, text: str, tokens: int) -> str:
        """The first `tokens` tokens of a text and a note that it was cut; the text itself if it has no more."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        ...

    def parse(self, token_ids: Sequence[int], before: Sequence[int], tools: Tools | None, calls: int) -> ParsedCompletion:
        """The message in generated ids; `before` are the last ids of the context, `calls` is the number of earlier tool calls."""
        ...
