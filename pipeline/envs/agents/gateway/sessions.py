"""One trajectory as its agent's requests make it: each request is a turn, recorded when its answer reaches the agent.

The rule: a request that is repeated because its answer was lost gets that answer, and no turn is drawn twice for it.
"""

import asyncio
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.pipeline.envs.agents.draw import Draw, Drawing
from penstock.pipeline.envs.agents.gateway.chat import BadRequest, ChatRequest, chat_request, completion
from penstock.pipeline.envs.conversation import Context, Conversation, TemplateRefused
from penstock.pipeline.envs.conversation.messages import Message

MAX_OPEN = 64
"""Requests of one agent that wait for answers at a time."""


class PolicyGone(Exception):
    """The policy gives no more answers: the trajectory is too old, or the run ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What ends a trajectory of an agent."""

    max_turns: int
    turn_tokens: int
    longest: int
    """Tokens of a context with what is drawn after it."""


@dataclass(slots=True, eq=False)
class _Question:
    """A request, its context, and the turn that is drawn for it."""

    context: Context
    drawing: "asyncio.Task[Draw]"
    delivered: dict[str, Any] | None = None


@dataclass(slots=True, eq=False)
class AgentSession:
    """The state of one trajectory; used in one asyncio loop only."""

    conversation: Conversation
    draw: Drawing
    bounds: Bounds
    on_draw: Callable[[bool], None] = lambda _: None
    """Called with True when the policy begins to draw for this agent, and with False when it has ended."""
    reward: float | None = None
    """What the agent called in as the reward of its trajectory."""
    truncated: bool = False
    """True once a request met a limit of the trajectory."""
    aborted: bool = False
    """True once the policy ended a turn before its end."""
    answered: dict[int, tuple[Sequence[Message], dict[str, Any]]] = field(default_factory=dict)
    """Number of a turn -> the messages of its request that no earlier turn has, and its answer."""
    replaced: int = 0
    """Lone surrogates in the request that had the most; U+FFFD is in their places."""
    _questions: dict[bytes, _Question] = field(default_factory=dict)
    waiting: int = 0
    """Requests that wait for an answer."""
    _asked: int = 0

    @property
    def last_turn(self) -> int:
        """Number of the last turn that was answered; -1 without one."""
        return max(self.answered, default=-1)

    def record(self) -> tuple[list[dict[str, Any]], list[int]]:
        """The messages of all turns that were answered, in the order of asking, and the indices of the answers.

        A request that continues an earlier answer adds its new messages; any other adds all of them.
        """
        messages: list[dict[str, Any]] = []
        answers = list[int]()
        for _, (new, answer) in sorted(self.answered.items()):
            messages += [*map(dict, new), answer]
            answers.append(len(messages) - 1)
        return messages, answers

    async def chat(self, body: Any, *, retry: bool = False) -> tuple[ChatRequest, dict[str, Any]]:
        """The request in a body, and its answer as a chat completion; `retry`: the client says that it asks once more.

        A caller that is cancelled leaves the turn to a later request with the same body. Raises `BadRequest`, `PolicyGone`.
        """
        request = chat_request(body)
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest()
        question = self._questions.get(key)
        if question is None or (question.delivered is not None and not retry):
            question = self._questions[key] = self._ask(request)
        self.waiting += 1
        try:
            draw = await asyncio.shield(question.drawing)
        except asyncio.CancelledError:
            if question.drawing.cancelled():
                raise PolicyGone("the trajectory was ended") from None
            raise
        finally:
            self.waiting -= 1
        if question.delivered is None:
            question.delivered = self._deliver(request, question, draw)
        return request, question.delivered

    def set_reward(self, body: Any) -> None:
        """Take the reward in `{"reward": 0.5}`. Raises `BadRequest`."""
        value = body.get("reward") if isinstance(body, dict) else None
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise BadRequest('the body has to be {"reward": NUMBER}, a finite number')
        self.reward = float(value)

    def close(self) -> None:
        """Nobody waits for what is still drawn."""
        for question in self._questions.values():
            question.drawing.cancel()

    def _ask(self, request: ChatRequest) -> _Question:
        if self.aborted:
            raise PolicyGone("the trajectory was ended")
        if self.waiting >= MAX_OPEN:
            raise BadRequest(f"more than {MAX_OPEN} requests of one agent wait for answers", status=429, code="rate_limit_exceeded")
        if self._asked >= self.bounds.max_turns:
            self.truncated = True
            raise BadRequest(f"the trajectory has had its {self.bounds.max_turns} turns", code="turn_limit_exceeded")
        try:
            context = self.conversation.context(request.messages, request.tools or ())
        except TemplateRefused as error:
            raise BadRequest(str(error)) from error
        room = self.bounds.longest - len(context.token_ids)
        if room < 1:
            self.truncated = True
            raise BadRequest(
                f"This model's maximum context length is {self.bounds.longest} tokens. However, your messages resulted in "
                f"{len(context.token_ids)} tokens. Please reduce the length of the messages.",
                code="context_length_exceeded",
            )
        self._asked += 1
        limit = min(room, self.bounds.turn_tokens, request.max_tokens or self.bounds.turn_tokens)
        return _Question(context, asyncio.create_task(self._drawn(context, limit)))

    async def _drawn(self, context: Context, limit: int) -> Draw:
        self.on_draw(True)
        try:
            draw = await self.draw(context.token_ids, turn=context.number, max_new_tokens=limit)
            self.aborted |= draw.finish == "abort"
            return draw
        finally:
            self.on_draw(False)

    def _deliver(self, request: ChatRequest, question: _Question, draw: Draw) -> dict[str, Any]:
        """Record a turn, whose answer now goes to the agent."""
        context = question.context
        answer = self.conversation.drawn(context, draw.token_ids, draw.logprobs, draw.versions, draw.finish, stop=request.stop)
        if draw.finish == "abort":
            raise PolicyGone("the trajectory was ended: its policy is too old")
        self.answered[context.number] = request.messages[context.known :], answer.message
        return completion(request, answer, draw, context)
