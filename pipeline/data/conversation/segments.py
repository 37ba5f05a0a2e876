"""One trajectory as token ids: the engine's context for each turn, and the segments (sequences) to train.

Each generated token is trained once, in the sequence it was generated in; it is never decoded and encoded again. A turn whose context
starts with all ids of a segment extends it; any other turn starts a new segment.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.infra.engines.base import Finish
from penstock.pipeline.data.conversation.messages import Message, Template, Tools, digests
from penstock.topics.wire.columns import Float32s, Int32s

RESERVED = frozenset({"prompt", "model", "environment"})
"""Sources that are not roles; a message with such a role is recorded as a user's."""
History = Literal["exact", "template"]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Tokens `start` to `end` of a segment: a completion (`source` "model") or input."""

    start: int
    end: int
    source: str
    """ "model"; "prompt" for a segment's first context; otherwise the role of the last message in it, such as "user" or "tool"."""
    turn: int
    """Number of the completion, or of the completion after the input."""
    finish: Finish | None = None
    """Finish reason of the completion; None for input."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One sequence to train, of L tokens."""

    token_ids: Int32s
    """[L] token ids."""
    mask: npt.NDArray[np.bool_]
    """[L] True on tokens generated in this segment. Over all segments, each generated token is True exactly once."""
    logprobs: Float32s
    """[L] nats, of the sampling distribution; NaN if the mask is False."""
    versions: Int32s
    """[L] policy version; an input token has the version of the next generated one."""
    parts: tuple[Part, ...]
    """Parts of the sequence, from token 0 to L without gaps."""

    @property
    def prompt(self) -> int:
        return self.parts[0].end


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """Input of one turn; recorded only together with its completion."""

    number: int
    """0, 1, ... in the order of creation."""
    token_ids: Int32s
    """[L] token ids of the engine's prompt."""
    history: bytes = field(repr=False)
    parent: "_Turn | None" = field(repr=False)
    prefix_tokens: int = 0
    """Leading tokens that are in a segment already; 0 for a new segment."""
    prefix_messages: int = 0
    """Leading messages up to an earlier completion, included."""
    source: str = "prompt"
    messages: tuple[Message, ...] = field(repr=False, default=())
    tools: Tools | None = field(repr=False, default=None)


@dataclass(frozen=True, slots=True, eq=False)
class AssistantTurn:
    """A completion as a message for the environment or the agent."""

    message: dict[str, Any]
    """OpenAI's format, with `tool_calls` and `reasoning_content` if there are any."""
    malformed: tuple[str, ...]
    """One error message for the policy per unreadable tool call."""
    finish: Finish
    tokens: int
    """Recorded tokens: all generated ones, or fewer if a stop text ended the turn."""

    @property
    def finish_reason(self) -> str:
        """OpenAI's `finish_reason`: "tool_calls", "stop" or "length"."""
        return "tool_calls" if self.message.get("tool_calls") and self.finish == "stop" else self.finish


@dataclass(slots=True, eq=False)
class _Turn:
    number: int
    parent: "_Turn | None"
    context: Int32s
    """Context after the parent's last token; the full context without a parent."""
    completion: Int32s
    logprobs: Float32s
    versions: Int32s
    finish: Finish
    source: str
    continued: bool = False
    """True once a later context extends this turn."""

    def ids(self) -> list[Int32s]:
        """Return the token ids from the start of the conversation to the end of this turn, in pieces."""
        pieces: list[Int32s] = []
        turn: _Turn | None = self
        while turn is not None:
            pieces += [turn.completion, turn.context]
            turn = turn.parent
        return pieces[::-1]


class Conversation:
    """The messages and tokens of a trajectory; does no I/O and reads no clock.

    `tools` are in OpenAI's format. `history`: "exact" keeps every generated token in the context, reasoning included; "template" renders
    each context as at inference, so that a template that strips reasoning starts a segment at every turn.
    `reads_calls`: parse tool calls in completions.
    Several contexts may be open at a time; side conversations become segments of their own.
    """

    def __init__(self, template: Template, tools: Tools | None = None, *, history: History = "exact", reads_calls: bool = True) -> None:
        self._template, self._tools, self._exact, self._reads_calls = template, tools, history == "exact", reads_calls
        self._turns: list[_Turn] = []
        self._turns_by_history: dict[bytes, list[_Turn]] = {}
        self._requested = 0
        self._tool_calls = 0

    @property
    def turns(self) -> int:
        return len(self._turns)

    def context(self, messages: Sequence[Message], tools: Tools | None = None) -> Context:
        """Return the engine's input for the turn after `messages`, which include earlier completions.

        Raises `TemplateRefused` if the template cannot render the messages.
        """
        tools = self._tools if tools is None else tools
        history = digests(messages, tools)
        parent, prefix_messages = self._parent(history)
        parent, ids, prefix_tokens = self._extension(messages, tools, parent, prefix_messages)
        if ids is None:
            ids = np.asarray(self._template.render(messages, tools), dtype=np.int32)
            parent, prefix_tokens = self._longest_prefix(ids)
        if parent is not None:
            parent.continued = True
        role = str(messages[-1].get("role")) if messages else ""
        source = "prompt" if parent is None or not messages else "user" if role in RESERVED else role
        number, self._requested = self._requested, self._requested + 1
        return Context(number, ids, history[-1], parent, prefix_tokens, prefix_messages, source, tuple(messages), tools)

    def add_completion(
        self,
        context: Context,
        token_ids: npt.ArrayLike,
        logprobs: npt.ArrayLike,
        versions: npt.ArrayLike,
        finish: Finish,
        *,
        stop: Sequence[str] = (),
    ) -> AssistantTurn:
        """Record the completion of a context: T token ids with the stop id, T logprobs (nats), T policy versions.

        `stop` are texts that end a completion: tokens after the first one are discarded, and the message ends before it.
        A completion without tokens is not recorded. Raises `ValueError` if the lengths differ.
        """
        ids, nats, policy = np.array(token_ids, np.int32), np.array(logprobs, np.float32), np.array(versions, np.int32)
        if not ids.shape == nats.shape == policy.shape or ids.ndim != 1:
            raise ValueError(f"turn {context.number}: shapes of ids {ids.shape}, logprobs {nats.shape} and versions {policy.shape} differ")
        if ended := _stopped(ids.tolist(), stop, self._template):
            ids, nats, policy, finish = ids[: ended[0]], nats[: ended[0]], policy[: ended[0]], "stop"
        tools = context.tools if self._reads_calls else None
        parsed = self._template.parse(ids.tolist(), context.token_ids[-16:].tolist(), tools, self._tool_calls)
        if ended:
            _cut(parsed.message, ended[1])
        self._tool_calls += len(parsed.message.get("tool_calls", ()))
        if len(ids):
            # A copy: a view would keep the full context of every turn in memory.
            new = context.token_ids[context.prefix_tokens :].copy()
            turn = _Turn(context.number, context.parent, new, ids, nats, policy, finish, context.source)
            self._turns.append(turn)
            history = digests([*context.messages, parsed.message], context.tools)[-1]
            self._turns_by_history.setdefault(history, []).append(turn)
        return AssistantTurn(parsed.message, parsed.malformed, finish, len(ids))

    def segments(self) -> tuple[Segment, ...]:
        """Return the sequences to train, in the order of their first contexts."""
        chains: list[list[_Turn]] = []
        ends: dict[_Turn, list[_Turn]] = {}
        for turn in sorted(self._turns, key=lambda turn: turn.number):
            chain = ends.pop(turn.parent, None) if turn.parent is not None else None
            if chain is None:
                chains.append(chain := [])
            chain.append(turn)
            ends[turn] = chain
        return tuple(map(_segment, chains))

    def _extension(
        self, messages: Sequence[Message], tools: Tools | None, parent: _Turn | None, prefix: int
    ) -> tuple[_Turn | None, Int32s | None, int]:
        """Return the turn that the messages extend, the new context, and how much of it is in the turn's segment; else Nones and 0."""
        if not self._exact or parent is None or any(message.get("role") == "assistant" for message in messages[prefix:]):
            return None, None, 0
        bridge = self._template.bridge(messages, prefix, tools, int(parent.completion[-1]))
        if bridge is None:
            return None, None, 0
        pieces = parent.ids()
        return parent, np.concatenate([*pieces, np.asarray(bridge, np.int32)]), sum(map(len, pieces))

    def _parent(self, history: list[bytes]) -> tuple[_Turn | None, int]:
        """Return the last turn of the longest recorded prefix (preferably one not extended) and its length in messages; else None, 0."""
        for prefix in range(len(history) - 1, 0, -1):
            if turns := self._turns_by_history.get(history[prefix]):
                return max(turns, key=lambda turn: (not turn.continued, turn.number)), prefix
        return None, 0

    def _longest_prefix(self, ids: Int32s) -> tuple[_Turn | None, int]:
        """Return the turn whose tokens up to its end are the longest prefix of `ids`, and their number; (None, 0) if there is none."""
        ends: dict[_Turn, int] = {}
        best: tuple[int, bool, int, _Turn] | None = None
        for turn in self._turns:
            start = 0 if turn.parent is None else ends.get(turn.parent, -1)
            tokens = np.concatenate([turn.context, turn.completion])
            if start < 0 or not np.array_equal(ids[start : start + len(tokens)], tokens):
                continue
            ends[turn] = start + len(tokens)
            match = (ends[turn], not turn.continued, turn.number, turn)
            best = match if best is None or match[:3] > best[:3] else best
        return (None, 0) if best is None else (best[3], best[0])


def _stopped(ids: Sequence[int], stop: Sequence[str], template: Template) -> tuple[int, str] | None:
    """Return the smallest number of tokens whose text contains one of `stop`, and that text; None if no text does."""
    if not any(text in template.decode(ids) for text in stop):
        return None
    fewest = bisect_left(range(len(ids)), True, key=lambda count: any(text in template.decode(ids[:count]) for text in stop))
    text = template.decode(ids[:fewest])
    return fewest, min((word for word in stop if word in text), key=text.index)


def _cut(message: dict[str, Any], stop: str) -> None:
    for key in ("reasoning_content", "content"):
        if text := message.get(key):
            message[key] = text.partition(stop)[0]


def _segment(chain: list[_Turn]) -> Segment:
    """Return the sequence to train from turns each of which extends the one before."""
    ids: list[Int32s] = []
    mask, logprobs, versions, parts = [], [], [], []
    length = 0
    for turn in chain:
        context = turn.context if ids or turn.parent is None else np.concatenate([*turn.parent.ids(), turn.context])
        source = turn.source if ids else "prompt"
        middle = length + len(context)
        parts.append(Part(length, middle, source, turn.number))
        length = middle + len(turn.completion)
        parts.append(Part(middle, length, "model", turn.number, turn.finish))
        ids += [context, turn.completion]
        mask += [np.zeros(len(context), np.bool_), np.ones(len(turn.completion), np.bool_)]
        logprobs += [np.full(len(context), np.nan, np.float32), turn.logprobs]
        versions += [np.full(len(context), turn.versions[0], np.int32), turn.versions]
    return Segment(np.concatenate(ids), np.concatenate(mask), np.concatenate(logprobs), np.concatenate(versions), tuple(parts))
