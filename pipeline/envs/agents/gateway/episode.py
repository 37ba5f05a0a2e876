"""One trajectory of an agent: its program runs as a child with a key of its own, and each of its requests is a turn.

The rule: a trajectory ends when its program does. One that fails, hangs or never asks is an aborted sample with its cause, not a reward.
"""

import asyncio
import json
import re
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from penstock.infra.sandbox.program import Program, how_it_ended
from penstock.infra.sandbox.rules import ENVIRONMENT, ChildRules
from penstock.pipeline.envs.agents.draw import Drawing
from penstock.pipeline.envs.agents.driver import BACKOFF_S, EnvironmentBroken, Limits, seed_of
from penstock.pipeline.envs.agents.gateway.clock import AgentClock
from penstock.pipeline.envs.agents.gateway.server import Gateway
from penstock.pipeline.envs.agents.gateway.sessions import AgentSession, Bounds
from penstock.pipeline.envs.agents.record import EpisodeRequest, EpisodeState, Trajectory, trajectory_of
from penstock.pipeline.envs.conversation import Conversation, Template
from penstock.pipeline.envs.conversation.messages import text_of
from penstock.pipeline.envs.datasets.answers import with_facts
from penstock.pipeline.envs.environments.sources import AGENT, PYTHON


def command_of(source: str, row: Mapping[str, Any]) -> list[str]:
    """The program and its arguments in `agent:COMMAND`, each `{column}` replaced by the row's value; no shell reads it.

    `python` is this process's own.

    Example:
        command_of("agent:python solve.py --task {prompt}", {"prompt": "1 + 1"})  # -> [sys.executable, "solve.py", "--task", "1 + 1"]
    """

    def value(match: re.Match[str]) -> str:
        found = row.get(match[1], match[0])
        return found if isinstance(found, str) else json.dumps(found)

    program, *arguments = shlex.split(source.removeprefix(AGENT))
    return [PYTHON.get(program, program), *(re.sub(r"\{(\w+)\}", value, word) for word in arguments)]


def version_of(source: str) -> str | None:
    """The first 16 digits of the SHA-256 of the files that are arguments of a command; None if none is."""
    words = shlex.split(source.removeprefix(AGENT))
    files = [Path(word) for word in words[1:] if Path(word).is_file()]
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16] if files else None


@dataclass(slots=True, kw_only=True, eq=False)
class AgentEpisode:
    """The state of one trajectory; `run` drives it to its end."""

    request: EpisodeRequest
    sample: int
    seed: int
    source: str
    template: Template
    gateway: Gateway
    programs: asyncio.Semaphore
    """As many programs run at a time as it lets through."""
    limits: Limits
    draw: Drawing
    rules: ChildRules = ENVIRONMENT
    on_loss: Callable[[str], None] = lambda _: None
    """Gets a line for every loss that is made good."""
    version: int = 0
    """The newest weights when it was begun."""
    _started_ns: int = field(default_factory=time.time_ns)
    _session: AgentSession | None = None
    _clock: AgentClock | None = None

    async def run(self) -> Trajectory:
        """Run the program to its end; one that failed is run again, from the beginning."""
        failures = 0
        while True:
            try:
                async with self.programs:
                    return await self._play()
            except EnvironmentBroken as broken:
                failures += 1
                if failures > self.limits.retries:
                    return self.ended("abort", cause=str(broken))
                self.on_loss(f"{broken}; tried again")
            await asyncio.sleep(BACKOFF_S * 2 ** (failures - 1))

    def ended(self, finish: Literal["stop", "length", "abort"], *, cause: str | None = None) -> Trajectory:
        """The trajectory as it stands."""
        session = self._session
        messages, answers = session.record() if session else ([], [])
        episode_state = EpisodeState(
            messages=messages,
            answers=answers,
            rewards={session.last_turn: session.reward} if session and answers and session.reward is not None else {},
            environment=self.source,
            version=version_of(self.source),
            seed=self.seed,
            environment_s=self._clock.spent_s if self._clock else 0.0,
            started_ns=self._started_ns,
            ended_ns=time.time_ns(),
            replaced=session.replaced if session else 0,
        )
        segments = session.conversation.segments() if session else ()
        return trajectory_of(
            segments, self.request, self.sample, episode_state=episode_state, finish=finish, cause=cause, version=self.version
        )

    async def _play(self) -> Trajectory:
        limits = self.limits
        clock = self._clock = AgentClock()
        bounds = Bounds(max_turns=limits.max_turns, turn_tokens=limits.turn_tokens, longest=limits.trajectory_tokens)
        conversation = Conversation(self.template, history=limits.history)
        session = self._session = AgentSession(conversation, self.draw, bounds, clock.note)
        key = self.gateway.open(session)
        row = self._row()
        program = await Program.start(
            command_of(self.source, row), given=json.dumps(row).encode() + b"\n", environment=self._environment(key), rules=self.rules
        )
        try:
            status = await self._watched(program, clock, session)
        finally:
            self.gateway.close_session(key)
            await program.kill()
        if session.aborted:
            return self.ended("abort")
        if status != 0:
            raise EnvironmentBroken("exit", f"the agent ended with {how_it_ended(status, program.output)}")
        if session.last_turn < 0:
            raise EnvironmentBroken("exit", "the agent ended without asking the policy: does it use OPENAI_BASE_URL and OPENAI_API_KEY?")
        return self.ended("length" if session.truncated else "stop")

    async def _watched(self, program: Program, clock: AgentClock, session: AgentSession) -> int:
        """The program's exit status, -1 if the policy gave it up. Raises `EnvironmentBroken` for one that is silent for too long."""
        ending = asyncio.create_task(program.wait())
        try:
            while not ending.done():
                if session.aborted:
                    return -1
                clock.changed.clear()
                changed = asyncio.create_task(clock.changed.wait())
                await asyncio.wait({ending, changed}, timeout=clock.left_s(self.limits), return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                if not ending.done() and clock.left_s(self.limits) == 0.0:
                    raise EnvironmentBroken("timeout", f"the agent neither asked nor ended in its time: {self._allowed(clock)}")
            return ending.result()
        finally:
            ending.cancel()

    def _allowed(self, clock: AgentClock) -> str:
        limits = self.limits
        each = f"{limits.step_timeout_s:g} s after an answer" if clock.asked else f"{limits.reset_timeout_s:g} s until its first request"
        return f"{each}, {limits.trajectory_timeout_s:g} s in all"

    def _row(self) -> dict[str, Any]:
        """What the program gets: the row's columns, the prompt's text and messages, and the seed."""
        request = self.request
        messages = json.loads(request.messages) if request.messages else [{"role": "user", "content": request.prompt}]
        asked = text_of(messages[-1]) if request.messages else request.prompt
        return with_facts(request.row, {"prompt": asked, "messages": messages, "seed": self.seed, "sample": self.sample})

    def _environment(self, key: str) -> dict[str, str]:
        url = self.gateway.base_url
        return {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,
            "OPENAI_API_KEY": key,
            "PENSTOCK_REWARD_URL": f"{url}/reward",
            # A proxy of this machine does not know its loopback.
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }


@dataclass(slots=True, kw_only=True)
class AgentEpisodes:
    """Trajectories of an agent, with one endpoint for all of them."""

    source: str
    template: Template
    gateway: Gateway
    programs: asyncio.Semaphore
    limits: Limits
    rules: ChildRules
    on_loss: Callable[[str], None]

    @classmethod
    def open(
        cls, source: str, *, template: Template, limits: Limits, processes: int, rules: ChildRules, on_loss: Callable[[str], None]
    ) -> "AgentEpisodes":
        """Serve the endpoint in the running loop; at most `processes` programs run at a time."""
        programs = asyncio.Semaphore(processes)
        return cls(source=source, template=template, gateway=Gateway(), programs=programs, limits=limits, rules=rules, on_loss=on_loss)

    def episode(self, request: EpisodeRequest, sample: int, *, draw: Drawing, version: int) -> AgentEpisode:
        """A trajectory that asks `draw` for its turns; `version`: the newest weights."""
        seed = seed_of(request.row, seed=request.seed, group=request.drawn_as)
        return AgentEpisode(
            request=request, sample=sample, seed=seed, source=self.source, template=self.template, gateway=self.gateway,
            programs=self.programs, limits=self.limits, rules=self.rules, draw=draw, on_loss=self.on_loss, version=version,
        )  # fmt: skip

    async def close(self) -> None:
        """Stop serving."""
        await self.gateway.close()
