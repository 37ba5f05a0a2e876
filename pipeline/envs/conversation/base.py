"""What a conversation needs of a template: messages to token ids, the ids between two turns, and token ids to a message."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.pipeline.envs.conversation.messages import Message, Tools


@dataclass(frozen=True, slots=True)
class Said:
    """An answer as a message in the OpenAI shape, and what is wrong with tool calls in it that cannot be read, a line each."""

    message: dict[str, Any]
    malformed: tuple[str, ...] = ()


class Template(Protocol):
    """One per process, shared by its conversations; its methods keep no state."""

    def render(self, messages: Sequence[Message], tools: Tools | None) -> list[int]:
        """The ids of a whole conversation with the prompt for the next answer. Raises `TemplateRefused`."""
        ...

    def bridge(self, messages: Sequence[Message], known: int, tools: Tools | None, last: int) -> list[int] | None:
        """The ids between an answer and the next one, without rendering the answer.

        `messages[known - 1]` is the answer, `last` the last id that was drawn for it: a stop id that it ends with is not repeated.
        None where the template does not let new messages be appended; the conversation is then rendered whole.
        """
        ...

    def shortened(self, text: str, tokens: int) -> str:
        """Its first tokens with a mark that says so; all of it if it has no more than `tokens`."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Their text, special tokens included."""
        ...

    def parse(self, token_ids: Sequence[int], before: Sequence[int], tools: Tools | None, calls: int) -> Said:
        """The answer in the drawn ids; `before` are the last ids of its context, `calls` the tool calls so far, which number new ones."""
        ...
