"""The requests of one agent as a trajectory: each request is a turn, recorded when its completion is returned.

A request that the client repeats, because the response was lost, gets the same completion; no turn is generated twice for it.
"""

import asyncio
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.pipeline.agents.gateway.chat import BadRequest, ChatRequest, chat_request, completion
from penstock.pipeline.agents.record import Generate, Generation
from penstock.pipeline.data.conversation.messages import Message, TemplateRefused
from penstock.pipeline.data.conversation.segments import Context, Conversation

MAX_OPEN = 64
"""Largest number of concurrent requests of one agent."""


class TrajectoryEnded(Exception):
    """No more turns are generated, because the trajectory is stale or the run ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of an agent's trajectory."""

    max_turns: int
    turn_tokens: int
    longest: int
    """Maximum number of tokens of context and completion together."""


@dataclass(slots=True, eq=False)
class _PendingTurn:
    """A turn that is being generated: its context, and the chat completion once it is recorded."""

    context: Context
    generation: "asyncio.Task[Generation]"
    delivered: dict[str, Any] | None = None


@dataclass(slots=True, eq=False)
class AgentSession:
    """The requests and turns of one trajectory; used in one asyncio loop only."""

    conversation: Conversation
    generate: Generate
    bounds: Bounds
    on_generation: Callable[[bool], None] = lambda _: None
    """Called with True at the start of each generation and with False at its end."""
    reward: float | None = None
    """Reward of the trajectory, sent by the agent."""
    truncated: bool = False
    """True once a request exceeded a limit of the trajectory."""
    aborted: bool = False
    completions: dict[int, tuple[Sequence[Message], dict[str, Any]]] = field(default_factory=dict)
    """Turn number -> new messages of its request, and the generated message."""
    replaced: int = 0
    """Largest number of lone surrogates in one request, replaced by U+FFFD."""
    _pending: dict[bytes, _PendingTurn] = field(default_factory=dict)
    waiting: int = 0
    _turns_started: int = 0

    @property
    def last_turn(self) -> int:
        """Number of the last completed turn; -1 if there is none."""
        return max(self.completions, default=-1)

    def record(self) -> tuple[list[dict[str, Any]], list[int]]:
        """The messages of all completed turns, in the order of their requests, and the indices of the generated ones.

        A request that continues an earlier turn contributes its new messages; any other request contributes all of its messages.
        """
        messages: list[dict[str, Any]] = []
        generated = list[int]()
        for _, (new, message) in sorted(self.completions.items()):
            messages += [*map(dict, new), message]
            generated.append(len(messages) - 1)
        return messages, generated

    async def chat(self, body: Any, *, retry: bool = False) -> tuple[ChatRequest, dict[str, Any]]:
        """Generate the turn for a request; returns the parsed request and its chat completion. `retry`: the client repeats a request.

        If the caller is cancelled, a later request with the same body receives the turn. Raises `BadRequest`, `TrajectoryEnded`.
        """
        request = chat_request(body)
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest()
        turn = self._pending.get(key)
        if turn is None or (turn.delivered is not None and not retry):
            turn = self._pending[key] = self._new_turn(request)
        self.waiting += 1
        try:
            generation = await asyncio.shield(turn.generation)
        except asyncio.CancelledError:
            if turn.generation.cancelled():
                raise TrajectoryEnded("the trajectory was ended") from None
            raise
        finally:
            self.waiting -= 1
        if turn.delivered is None:
            turn.delivered = self._deliver(request, turn, generation)
        return request, turn.delivered

    def set_reward(self, body: Any) -> None:
        """Set the reward from the body `{"reward": 0.5}`. Raises `BadRequest`."""
        value = body.get("reward") if isinstance(body, dict) else None
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise BadRequest('invalid body: expected {"reward": NUMBER} with a finite number')
        self.reward = float(value)

    def close(self) -> None:
        for turn in self._pending.values():
            turn.generation.cancel()

    def _new_turn(self, request: ChatRequest) -> _PendingTurn:
        if self.aborted:
            raise TrajectoryEnded("the trajectory was ended")
        if self.waiting >= MAX_OPEN:
            raise BadRequest(f"an agent may send at most {MAX_OPEN} concurrent requests", status=429, code="rate_limit_exceeded")
        if self._turns_started >= self.bounds.max_turns:
            self.truncated = True
            raise BadRequest(f"the trajectory has reached environment.max_turns = {self.bounds.max_turns}", code="turn_limit_exceeded")
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
        self._turns_started += 1
        limit = min(room, self.bounds.turn_tokens, request.max_tokens or self.bounds.turn_tokens)
        return _PendingTurn(context, asyncio.create_task(self._generate(context, limit)))

    async def _generate(self, context: Context, limit: int) -> Generation:
        self.on_generation(True)
        try:
            generation = await self.generate(context.token_ids, turn=context.number, max_new_tokens=limit)
            self.aborted |= generation.finish == "abort"
            return generation
        finally:
            self.on_generation(False)

    def _deliver(self, request: ChatRequest, pending: _PendingTurn, generation: Generation) -> dict[str, Any]:
        context, token_ids, finish = pending.context, generation.token_ids, generation.finish
        turn = self.conversation.add_completion(context, token_ids, generation.logprobs, generation.versions, finish, stop=request.stop)
        if finish == "abort":
            raise TrajectoryEnded("the trajectory was ended: its policy is stale")
        self.completions[context.number] = request.messages[context.prefix_messages :], turn.message
        return completion(request, turn, generation, context)
