"""Runs one trajectory in an environment: `reset -> (generate, step)* -> record`.

A trajectory ends with "stop" (by its environment), "length" (by a limit) or "abort" (stale policy, or a broken environment with the
cause, which is never a reward). After a lost session it is replayed from its seed. Generated turns are reused while the contexts are equal;
a different context means that the environment is not deterministic, and the trajectory restarts without them.
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
from penstock.pipeline.agents.record import EpisodeRequest, EpisodeState, Generate, Generation, Trajectory, trajectory_of
from penstock.pipeline.data.conversation.messages import TOOLS, TemplateRefused, text_of, tools_of
from penstock.pipeline.data.conversation.segments import Conversation
from penstock.pipeline.data.conversation.template import ChatTemplate

BACKOFF_S = 0.5
"""Seconds before the first retry; doubled after each."""
MALFORMED_LIMIT = 3
"""Consecutive turns with unreadable tool calls that end a trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a trajectory, and time limits of its environment."""

    max_turns: int
    turn_tokens: int
    trajectory_tokens: int
    """Largest number of tokens of context and completion together."""
    reset_timeout_s: float
    step_timeout_s: float
    trajectory_timeout_s: float
    """Limit of the environment's time in one trajectory; excludes the time of generation."""
    retries: int
    replay: bool
    """True to reuse generated turns after a lost session."""
    history: Literal["exact", "template"] = "exact"
    result_tokens: int | None = None
    """Length to which a message of a step is cut; None for no limit."""


class EnvironmentBroken(Exception):
    """An environment failed; `kind` is reset, step or timeout, or exit for an agent's program."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"environment-{kind}: {reason}")


class _Diverged(Exception):
    """After replaying the same actions, the environment returned another context."""


class _Lost(Exception):
    """The child process was killed because of another session in it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Episode:
    """One trajectory in an environment, and its state."""

    request: EpisodeRequest
    sample: int
    seed: int
    template: Any
    sessions: Sessions
    limits: Limits
    generate: Generate
    on_loss: Callable[[str], None] = lambda _: None
    """Called with one line for each recovered failure."""
    version: int = 0
    """Policy version at the start."""
    episode_state: EpisodeState = field(init=False)
    _conversation: Conversation = field(init=False)
    _recorded_turns: dict[int, tuple[bytes, Generation]] = field(default_factory=dict)
    """Number of a turn -> SHA-256 of its context's token ids, and the generated turn."""
    _session: Session | None = None

    def __post_init__(self) -> None:
        self._start()

    async def run(self) -> Trajectory:
        """Run the episode to its end, with retries. Raises `ChildError` if no environment can be started."""
        failures = 0
        while True:
            try:
                return await self._run_once()
            except _Lost as lost:
                self.on_loss(f"{lost}; running the episode again")
            except _Diverged as diverged:
                self.on_loss(str(diverged))
                self._recorded_turns.clear()
            except EnvironmentBroken as broken:
                failures += 1
                if failures > self.limits.retries:
                    return self.ended("abort", cause=str(broken))
                self.on_loss(f"{broken}; retrying")
                await asyncio.sleep(BACKOFF_S * 2 ** (failures - 1))
            finally:
                self._leave()
            if not self.limits.replay:
                self._recorded_turns.clear()
            self._start()

    def ended(self, finish: Literal["stop", "length", "abort"], *, cause: str | None = None) -> Trajectory:
        """Return the trajectory so far, to be published as a sample with this `finish`; `cause` is why the environment failed."""
        self.episode_state.ended_ns = time.time_ns()
        segments = self._conversation.segments()
        return trajectory_of(
            segments, self.request, self.sample, episode_state=self.episode_state, finish=finish, cause=cause, version=self.version
        )

    def _start(self) -> None:
        """Set the state of an episode before its first turn; a restarted episode keeps its start time."""
        request = self.request
        messages = json.loads(request.messages) if request.messages else [{"role": "user", "content": request.prompt}]
        started = time.time_ns() if not hasattr(self, "episode_state") else self.episode_state.started_ns
        self.episode_state = EpisodeState(messages=messages, rewards={}, seed=self.seed, started_ns=started)
        self._conversation = Conversation(self.template, history=self.limits.history)

    async def _run_once(self) -> Trajectory:
        """Reset the environment, then alternate turns of policy and environment until either ends the episode or a limit is reached.

        Raises `EnvironmentBroken`, `_Lost` or `_Diverged`, after which `run` retries.
        """
        episode_state, limits = self.episode_state, self.limits
        try:
            tools = await self._reset()
        except TemplateRefused as error:
            raise EnvironmentBroken("reset", f"the chat template cannot render the environment's texts: {error}") from error
        # An environment without tools may parse tool calls itself: the row has the tools.
        prompt_tools = tools or (tools_of(self.request.row.get(TOOLS)) if isinstance(self.template, ChatTemplate) else None)
        self._conversation = Conversation(self.template, prompt_tools or None, history=limits.history, reads_calls=bool(tools))
        malformed = 0
        for _ in range(limits.max_turns):
            try:
                context = self._conversation.context(episode_state.messages)
            except TemplateRefused as error:
                raise EnvironmentBroken("step", f"the chat template rejects the environment's messages: {error}") from error
            room = min(limits.turn_tokens, limits.trajectory_tokens - len(context.token_ids))
            if room < 1:
                break
            new = await self._generate(context.token_ids, turn=context.number, room=room)
            turn = self._conversation.add_completion(context, new.token_ids, new.logprobs, new.versions, new.finish)
            episode_state.generated.append(len(episode_state.messages))
            episode_state.messages.append(turn.message)
            if new.finish == "abort":
                return self.ended("abort")
            if new.finish == "length":
                break
            malformed = malformed + 1 if turn.malformed and not turn.message.get("tool_calls") else 0
            if malformed:
                episode_state.messages.append({"role": "user", "content": "\n".join(turn.malformed)})
                if malformed == MALFORMED_LIMIT:
                    break
                continue
            observed = await self._call("step", {"message": turn.message}, limits.step_timeout_s)
            episode_state.messages += _with_refused_calls([*map(self._shortened, observed["messages"])], turn.malformed)
            if observed["reward"] is not None:
                episode_state.rewards[context.number] = observed["reward"]
            if observed["ended"]:
                return await self._finished("stop", context.number)
        return await self._finished("length", self._conversation.turns - 1)

    def _shortened(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return an environment's message, cut to `environment.max_result_tokens` if it is longer."""
        limit, content = self.limits.result_tokens, message.get("content")
        if limit is None or not content:
            return message
        try:
            text = text_of(message)
        except TemplateRefused:  # reported when the template renders it
            return message
        if (cut := self.template.shortened(text, limit)) == text:
            return message
        self.episode_state.results_cut += 1
        return {**message, "content": cut}

    async def _reset(self) -> list[Mapping[str, Any]]:
        """Start a session, reset its environment and add the messages that it returns; return its tools, [] if it has none."""
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

    async def _finished(self, finish: Literal["stop", "length"], turn: int) -> Trajectory:
        """End the trajectory and return it; the environment's reward for the episode is added to that of turn `turn`."""
        reward = await self._call("reward", {}, self.limits.step_timeout_s)
        if turn >= 0 and reward is not None:
            self.episode_state.rewards[turn] = self.episode_state.rewards.get(turn, 0.0) + reward
        return self.ended(finish)

    async def _generate(self, token_ids: npt.NDArray[np.int32], *, turn: int, room: int) -> Generation:
        """Return a turn of at most `room` tokens: the one generated before a restart, or a new one. Raises `_Diverged`."""
        digest = hashlib.sha256(np.ascontiguousarray(token_ids, "<i4").tobytes()).digest()
        if turn not in self._recorded_turns:
            self._recorded_turns[turn] = digest, await self.generate(token_ids, turn=turn, max_new_tokens=room)
        recorded, generation = self._recorded_turns[turn]
        if recorded != digest:
            raise _Diverged(f"turn {turn}: the environment returned a different text for the same actions; restarting the trajectory")
        return generation

    async def _call(self, do: str, payload: Mapping[str, Any], timeout_s: float) -> Any:
        """Call the environment; the call's time counts towards `trajectory_timeout_s`. Raises `EnvironmentBroken` or `_Lost`."""
        session = self._session
        assert session is not None
        remaining_s = self.limits.trajectory_timeout_s - self.episode_state.environment_s
        if remaining_s <= 0:
            raise EnvironmentBroken("timeout", f"it took over {self.limits.trajectory_timeout_s:g} s (environment.trajectory_timeout_s)")
        try:
            return await session.call({"do": do, **payload}, timeout_s=min(timeout_s, remaining_s))
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
        """Close the session with the environment, if it is open."""
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(RuntimeError, OSError):
                session.close()


def _with_refused_calls(messages: list[dict[str, Any]], refused: Sequence[str]) -> list[dict[str, Any]]:
    """Return the environment's messages; the reasons why the policy's unreadable tool calls were refused are added to the last."""
    if not refused or not messages:
        return messages
    *before, last = messages
    return [*before, {**last, "content": "\n".join([str(last.get("content") or ""), *refused])}]


def seed_of(row: Mapping[str, Any], *, seed: int, group: int) -> int:
    """Return the seed of a group's environment: the row's `seed`, or a hash of the run's seed and the group.

    All samples of a group start in the same state, so that their rewards can be compared.
    """
    own = row.get("seed")
    if isinstance(own, int) and not isinstance(own, bool):
        return own
    return int.from_bytes(hashlib.blake2b(f"{seed}:{group}".encode(), digest_size=4).digest(), "big") >> 1
