"""One trajectory as token ids: which ids the engine is given for each turn, and which sequences are trained afterwards.

The rule: what the engine drew is trained once, in the sequence it was drawn in, and is never decoded and encoded again, shortened or
repaired. A turn whose context begins with all ids of a segment extends it; any other turn begins a segment of its own.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.pipeline.envs.conversation.base import Template
from penstock.pipeline.envs.conversation.messages import Message, Tools, digests

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]
RESERVED = frozenset({"prompt", "model", "environment"})
"""Sources of turns that are no roles: a message whose role has such a name is said by a user."""
Finish = Literal["stop", "length", "abort"]
History = Literal["exact", "template"]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Tokens `start` to `end` of a segment: an answer of the policy (`source` "model"), or what was said to it."""

    start: int
    end: int
    source: str
    """ "model"; "prompt" for a segment's first context; otherwise the role of the last message in it, such as "user" or "tool"."""
    turn: int
    """The number of the answer that it is, or that it leads to."""
    finish: Finish | None = None
    """How the answer ended; None for what was said to the policy."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One sequence to train, of L tokens."""

    token_ids: Int32s
    """[L]"""
    mask: npt.NDArray[np.bool_]
    """[L] True on tokens that the policy drew in this segment. Over all segments, each token drawn is True exactly once."""
    logprobs: Float32s
    """[L] nats, of the distribution drawn from; NaN where the mask is False."""
    versions: Int32s
    """[L] policy version; a token that was said to the policy carries the version of the next drawn one."""
    parts: tuple[Part, ...]
    """From 0 to L without gaps."""

    @property
    def prompt(self) -> int:
        """Tokens before the first drawn one."""
        return self.parts[0].end


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """A question to the policy. One that is never answered leaves nothing behind."""

    number: int
    """0, 1, ... in the order of asking."""
    token_ids: Int32s
    """[L] what the engine is given."""
    history: bytes = field(repr=False)
    parent: "_Turn | None" = field(repr=False)
    held: int = 0
    """Leading tokens that a segment already holds; 0 where a segment begins."""
    known: int = 0
    """Leading messages that are the conversation up to an earlier answer of the policy, that answer included."""
    source: str = "prompt"
    messages: tuple[Message, ...] = field(repr=False, default=())
    tools: Tools | None = field(repr=False, default=None)


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What the policy said, for the environment or the agent."""

    message: dict[str, Any]
    """In the OpenAI shape, with `tool_calls` and `reasoning_content` where there are any; goes into the messages as it is."""
    malformed: tuple[str, ...]
    """What is wrong with tool calls that cannot be read, a line each, for the policy to read."""
    finish: Finish
    tokens: int
    """How many of the drawn tokens are kept: all, unless a text ended the answer."""

    @property
    def finish_reason(self) -> str:
        """As the OpenAI API names it: "tool_calls", "stop" or "length"."""
        return "tool_calls" if self.message.get("tool_calls") and self.finish == "stop" else self.finish


@dataclass(slots=True, eq=False)
class _Turn:
    number: int
    parent: "_Turn | None"
    said: Int32s
    """Context after the parent's last token; all of it without a parent."""
    drawn: Int32s
    logprobs: Float32s
    versions: Int32s
    finish: Finish
    source: str
    asked_on: bool = False
    """True once a later question goes on from here."""

    def ids(self) -> list[Int32s]:
        """All tokens up to the end of this turn, in pieces."""
        pieces: list[Int32s] = []
        turn: _Turn | None = self
        while turn is not None:
            pieces += [turn.drawn, turn.said]
            turn = turn.parent
        return pieces[::-1]


class Conversation:
    """A trajectory between a policy and whoever talks to it; does no I/O and reads no clock.

    `tools` are in the OpenAI shape. `history`: "exact" keeps every token once drawn in the context, thinking too; "template" renders each
    context as the deployed model would see it, so that a template that strips thinking begins a segment at every turn.
    `reads_calls`: calls of tools are taken out of the texts of answers.
    Several questions may be open at a time; side conversations become segments of their own.
    """

    def __init__(self, template: Template, tools: Tools | None = None, *, history: History = "exact", reads_calls: bool = True) -> None:
        self._template, self._tools, self._exact, self._reads_calls = template, tools, history == "exact", reads_calls
        self._turns: list[_Turn] = []
        self._heard: dict[bytes, list[_Turn]] = {}
        self._asked = 0
        self._tool_calls = 0

    @property
    def turns(self) -> int:
        """Answers drawn."""
        return len(self._turns)

    def context(self, messages: Sequence[Message], tools: Tools | None = None) -> Context:
        """What the engine is given for the next turn of a conversation that consists of `messages`, earlier answers included.

        Raises:
            TemplateRefused: the template cannot render the messages.
        """
        tools = self._tools if tools is None else tools
        history = digests(messages, tools)
        parent, known = self._parent(history)
        parent, ids, held = self._extension(messages, tools, parent, known)
        if ids is None:
            ids = np.asarray(self._template.render(messages, tools), dtype=np.int32)
            parent, held = self._longest_fit(ids)
        if parent is not None:
            parent.asked_on = True
        role = str(messages[-1].get("role")) if messages else ""
        source = "prompt" if parent is None or not messages else "user" if role in RESERVED else role
        number, self._asked = self._asked, self._asked + 1
        return Context(number, ids, history[-1], parent, held, known, source, tuple(messages), tools)

    def drawn(
        self,
        context: Context,
        token_ids: npt.ArrayLike,
        logprobs: npt.ArrayLike,
        versions: npt.ArrayLike,
        finish: Finish,
        *,
        stop: Sequence[str] = (),
    ) -> Answer:
        """Keep what the engine drew for a context: T token ids with the stop id, T logprobs (nats), T policy versions.

        `stop` are texts that end an answer: tokens after the first one are as if they had not been drawn, and the message ends before it.
        Nothing is kept of an answer without tokens. Raises `ValueError` if the lengths differ.
        """
        ids, nats, policy = np.array(token_ids, np.int32), np.array(logprobs, np.float32), np.array(versions, np.int32)
        if not ids.shape == nats.shape == policy.shape or ids.ndim != 1:
            raise ValueError(
                f"turn {context.number}: {ids.shape} token ids, {nats.shape} logprobs and {policy.shape} versions do not match"
            )
        if ended := _stopped(ids.tolist(), stop, self._template):
            ids, nats, policy, finish = ids[: ended[0]], nats[: ended[0]], policy[: ended[0]], "stop"
        tools = context.tools if self._reads_calls else None
        said = self._template.parse(ids.tolist(), context.token_ids[-16:].tolist(), tools, self._tool_calls)
        if ended:
            _cut(said.message, ended[1])
        self._tool_calls += len(said.message.get("tool_calls", ()))
        if len(ids):
            # A copy: a view would keep the whole context of every turn in memory.
            new = context.token_ids[context.held :].copy()
            turn = _Turn(context.number, context.parent, new, ids, nats, policy, finish, context.source)
            self._turns.append(turn)
            heard = digests([*context.messages, said.message], context.tools)[-1]
            self._heard.setdefault(heard, []).append(turn)
        return Answer(said.message, said.malformed, finish, len(ids))

    def segments(self) -> tuple[Segment, ...]:
        """The sequences to train, in the order in which their first questions were asked."""
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
        self, messages: Sequence[Message], tools: Tools | None, parent: _Turn | None, known: int
    ) -> tuple[_Turn | None, Int32s | None, int]:
        """The turn that the messages go on from, with the ids up to the next answer and how many of them it holds."""
        if not self._exact or parent is None or any(message.get("role") == "assistant" for message in messages[known:]):
            return None, None, 0
        bridge = self._template.bridge(messages, known, tools, int(parent.drawn[-1]))
        if bridge is None:
            return None, None, 0
        pieces = parent.ids()
        return parent, np.concatenate([*pieces, np.asarray(bridge, np.int32)]), sum(map(len, pieces))

    def _parent(self, history: list[bytes]) -> tuple[_Turn | None, int]:
        """The turn after the longest known beginning of the messages; of several, the last that nothing goes on from yet."""
        for known in range(len(history) - 1, 0, -1):
            if turns := self._heard.get(history[known]):
                return max(turns, key=lambda turn: (not turn.asked_on, turn.number)), known
        return None, 0

    def _longest_fit(self, ids: Int32s) -> tuple[_Turn | None, int]:
        """The turn whose tokens, all up to its end, are the longest beginning of `ids`, and how many they are."""
        ends: dict[_Turn, int] = {}
        best: tuple[int, bool, int, _Turn] | None = None
        for turn in self._turns:
            start = 0 if turn.parent is None else ends.get(turn.parent, -1)
            own = np.concatenate([turn.said, turn.drawn])
            if start < 0 or not np.array_equal(ids[start : start + len(own)], own):
                continue
            ends[turn] = start + len(own)
            fit = (ends[turn], not turn.asked_on, turn.number, turn)
            best = fit if best is None or fit[:3] > best[:3] else best
        return (None, 0) if best is None else (best[3], best[0])


def _stopped(ids: Sequence[int], stop: Sequence[str], template: Template) -> tuple[int, str] | None:
    """The least number of tokens whose text contains one of `stop`, and which; None if there is none."""
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
    ids: list[Int32s] = []
    mask, logprobs, versions, parts = [], [], [], []
    length = 0
    for turn in chain:
        said = turn.said if ids or turn.parent is None else np.concatenate([*turn.parent.ids(), turn.said])
        source = turn.source if ids else "prompt"
        middle = length + len(said)
        parts.append(Part(length, middle, source, turn.number))
        length = middle + len(turn.drawn)
        parts.append(Part(middle, length, "model", turn.number, turn.finish))
        ids += [said, turn.drawn]
        mask += [np.zeros(len(said), np.bool_), np.ones(len(turn.drawn), np.bool_)]
        logprobs += [np.full(len(said), np.nan, np.float32), turn.logprobs]
        versions += [np.full(len(said), turn.versions[0], np.int32), turn.versions]
    return Segment(np.concatenate(ids), np.concatenate(mask), np.concatenate(logprobs), np.concatenate(versions), tuple(parts))
