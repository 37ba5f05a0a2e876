"""One trajectory: `reset -> (draw, step)* -> record`, a coroutine that knows nothing of its neighbours or of who draws.

The rule: a trajectory ends in exactly one way: its environment ended it ("stop"), a limit did ("length"), or it is aborted: its policy
became too old, or its environment broke, which is said with the cause and never as a reward. After a loss it is played again from its
seed: a turn that was drawn for the same context is taken and not drawn again; another context means that the environment is not a
function of its seed and the actions, and the trajectory begins anew.
"""

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.infra.sandbox.sessions import CallFailed, Session, SessionLost, Sessions
from penstock.pipeline.envs.agents.draw import Draw, Drawing
from penstock.pipeline.envs.agents.record import EpisodeRequest, EpisodeState, Trajectory, trajectory_of
from penstock.pipeline.envs.conversation import ChatTemplate, Conversation, TemplateRefused
from penstock.pipeline.envs.conversation.messages import text_of
from penstock.pipeline.envs.datasets.messages import TOOLS, tools_of

BACKOFF_S = 0.5
"""Before the first retry; doubles with each."""
MALFORMED_LIMIT = 3
"""Turns in a row whose tool calls cannot be read, after which the trajectory is cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What ends a trajectory, and how patient it is with its environment."""

    max_turns: int
    turn_tokens: int
    trajectory_tokens: int
    """Of a context with what is drawn after it."""
    reset_timeout_s: float
    step_timeout_s: float
    trajectory_timeout_s: float
    """Of its environment alone: time in which the policy draws costs nothing."""
    retries: int
    replay: bool
    """Whether turns that were drawn are taken again after a loss."""
    history: Literal["exact", "template"] = "exact"
    result_tokens: int | None = None
    """Of one message of a step, which is cut there; None: none is cut."""


class EnvironmentBroken(Exception):
    """An environment failed in the way `kind` says: reset, step or timeout."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"environment-{kind}: {reason}")


class _Diverged(Exception):
    """The same actions led to another context."""


class _Lost(Exception):
    """The session is gone through another one's fault."""


@dataclass(slots=True, kw_only=True)
class _Known:
    context: bytes
    draw: Draw


@dataclass(slots=True, kw_only=True, eq=False)
class Episode:
    """The state of one trajectory; `run` drives it to its end."""

    request: EpisodeRequest
    sample: int
    seed: int
    template: Any
    sessions: Sessions
    limits: Limits
    draw: Drawing
    on_loss: Callable[[str], None] = lambda _: None
    """Gets a line for every loss that is made good."""
    attempt: int = 0
    """Counts the times that it was begun anew with nothing drawn."""
    version: int = 0
    """The newest weights when it was begun."""
    episode_state: EpisodeState = field(init=False)
    _conversation: Conversation = field(init=False)
    _known: dict[int, _Known] = field(default_factory=dict)
    _session: Session | None = None

    def __post_init__(self) -> None:
        self._begin()

    async def run(self) -> Trajectory:
        """Play it to its end. Raises `ChildError` where no environment can be started at all."""
        failures = 0
        while True:
            try:
                return await self._play()
            except _Lost as lost:
                self.on_loss(str(lost))
            except _Diverged as diverged:
                self.on_loss(str(diverged))
                self._known.clear()
                self.attempt += 1
            except EnvironmentBroken as broken:
                failures += 1
                if failures > self.limits.retries:
                    return self.ended("abort", cause=str(broken))
                self.on_loss(f"{broken}; tried again")
                await asyncio.sleep(BACKOFF_S * 2 ** (failures - 1))
            finally:
                self._leave()
            if not self.limits.replay:
                self._known.clear()
                self.attempt += 1
            self._begin()

    def ended(self, finish: Literal["stop", "length", "abort"], *, cause: str | None = None) -> Trajectory:
        """The trajectory as it stands."""
        self.episode_state.ended_ns = time.time_ns()
        segments = self._conversation.segments()
        return trajectory_of(
            segments, self.request, self.sample, episode_state=self.episode_state, finish=finish, cause=cause, version=self.version
        )

    def _begin(self) -> None:
        request = self.request
        messages = json.loads(request.messages) if request.messages else [{"role": "user", "content": request.prompt}]
        started = time.time_ns() if not hasattr(self, "episode_state") else self.episode_state.started_ns
        self.episode_state = EpisodeState(messages=messages, rewards={}, seed=self.seed, started_ns=started)
        self._conversation = Conversation(self.template, history=self.limits.history)

    async def _play(self) -> Trajectory:
        episode_state, limits = self.episode_state, self.limits
        try:
            tools = await self._reset()
        except TemplateRefused as error:
            raise EnvironmentBroken("reset", f"no template takes its words: {error}") from error
        shown = tools or self._tools_of_row()
        self._conversation = Conversation(self.template, shown or None, history=limits.history, reads_calls=bool(tools))
        malformed = 0
        for _ in range(limits.max_turns):
            try:
                context = self._conversation.context(episode_state.messages)
            except TemplateRefused as error:
                raise EnvironmentBroken("step", f"the chat template refuses its messages: {error}") from error
            room = min(limits.turn_tokens, limits.trajectory_tokens - len(context.token_ids))
            if room < 1:
                break
            drawn = await self._drawn(context.token_ids, turn=context.number, room=room)
            answer = self._conversation.drawn(context, drawn.token_ids, drawn.logprobs, drawn.versions, drawn.finish)
            episode_state.answers.append(len(episode_state.messages))
            episode_state.messages.append(answer.message)
            if drawn.finish == "abort":
                return self.ended("abort")
            if drawn.finish == "length":
                break
            malformed = malformed + 1 if answer.malformed and not answer.message.get("tool_calls") else 0
            if malformed:
                episode_state.messages.append({"role": "user", "content": "\n".join(answer.malformed)})
                if malformed == MALFORMED_LIMIT:
                    break
                continue
            observed = await self._call("step", {"message": answer.message}, limits.step_timeout_s)
            episode_state.messages += _with_refused_calls([*map(self._shortened, observed["messages"])], answer.malformed)
            if observed["reward"] is not None:
                episode_state.rewards[context.number] = observed["reward"]
            if observed["ended"]:
                return await self._judged("stop", context.number)
        return await self._judged("length", self._conversation.turns - 1)

    def _shortened(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message of a step, cut where it has more tokens than a result may have."""
        limit, content = self.limits.result_tokens, message.get("content")
        if limit is None or not content:
            return message
        try:
            text = text_of(message)
        except TemplateRefused:  # as the template will say
            return message
        if (cut := self.template.shortened(text, limit)) == text:
            return message
        self.episode_state.results_cut += 1
        return {**message, "content": cut}

    async def _reset(self) -> list[Mapping[str, Any]]:
        """Begin the environment; returns its tools."""
        self._session = await self.sessions.open()
        payload = {"seed": self.seed, "row": dict(self.request.row)}
        observed = await self._call("reset", payload, self.limits.reset_timeout_s)
        self.episode_state.environment, self.episode_state.version = observed["source"], observed["version"]
        for message in observed["messages"]:
            last = self.episode_state.messages[-1]
            if message["role"] == last["role"] == "user" and isinstance(self.template, ChatTemplate):  # many templates refuse two in a row
                try:
                    self.episode_state.messages[-1] = {**last, "content": f"{text_of(last)}\n\n{text_of(message)}"}
                except TemplateRefused as error:
                    raise EnvironmentBroken("reset", str(error)) from error
            else:
                self.episode_state.messages.append(message)
        return list(observed["tools"])

    def _tools_of_row(self) -> Sequence[Mapping[str, Any]] | None:
        """The tools in the row's column, for an environment that has none and reads calls of them in the policy's text."""
        return tools_of(self.request.row.get(TOOLS)) if isinstance(self.template, ChatTemplate) else None

    async def _judged(self, finish: Literal["stop", "length"], turn: int) -> Trajectory:
        """The end of an unbroken trajectory: with the reward of the whole, if its environment gives one."""
        reward = await self._call("reward", {}, self.limits.step_timeout_s)
        if turn >= 0:
            self.episode_state.rewards[turn] = self.episode_state.rewards.get(turn, 0.0) + (reward or 0.0)
        return self.ended(finish)

    async def _drawn(self, token_ids: npt.NDArray[np.int32], *, turn: int, room: int) -> Draw:
        digest = hashlib.sha256(np.ascontiguousarray(token_ids, "<i4").tobytes()).digest()
        known = self._known.get(turn)
        if known is None:
            known = self._known[turn] = _Known(context=digest, draw=await self.draw(token_ids, turn=turn, max_new_tokens=room))
        elif known.context != digest:
            raise _Diverged(f"turn {turn}: the environment said something else to the same actions; the trajectory begins anew")
        return known.draw

    async def _call(self, do: str, payload: Mapping[str, Any], timeout_s: float) -> Any:
        """One call of the environment, whose time is counted."""
        session = self._session
        assert session is not None
        left = self.limits.trajectory_timeout_s - self.episode_state.environment_s
        if left <= 0:
            raise EnvironmentBroken("timeout", f"it took longer than {self.limits.trajectory_timeout_s:g} s in all")
        try:
            return await session.call({"do": do, **payload}, timeout_s=min(timeout_s, left))
        except SessionLost as lost:
            if not lost.guilty:
                raise _Lost(str(lost)) from lost
            raise EnvironmentBroken("reset" if do == "reset" else "step", str(lost)) from lost
        except CallFailed as failed:
            raise EnvironmentBroken("reset" if do == "reset" else "step", str(failed)) from failed
        finally:
            self.episode_state.environment_s += session.last_s
            self.episode_state.replaced += session.last_replaced

    def _leave(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(RuntimeError, OSError):
                session.close()


def _with_refused_calls(messages: list[dict[str, Any]], refused: Sequence[str]) -> list[dict[str, Any]]:
    """The environment's messages after a turn; the last one ends with the reasons why calls of the turn were not run."""
    if not refused or not messages:
        return messages
    *before, last = messages
    return [*before, {**last, "content": "\n".join([str(last.get("content") or ""), *refused])}]


def seed_of(row: Mapping[str, Any], *, seed: int, group: int) -> int:
    """The seed of a group's environment: the row's own, else a number that follows from the run's seed and the group.

    All samples of a group begin alike, so that their rewards can be compared.

    Example:
        seed_of({"seed": 7}, seed=0, group=3)  # -> 7
    """
    own = row.get("seed")
    if isinstance(own, int) and not isinstance(own, bool):
        return own
    return int.from_bytes(hashlib.blake2b(f"{seed}:{group}".encode(), digest_size=4).digest(), "big") >> 1
