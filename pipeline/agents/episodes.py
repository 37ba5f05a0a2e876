"""Trajectories by kind of source: environments in child processes, or an agent's programs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from penstock.infra.errors import PenstockError
from penstock.infra.sandbox.rules import ENVIRONMENT, ChildRules
from penstock.infra.sandbox.sessions import Sessions
from penstock.pipeline.agents.driver import Episode, Limits, seed_of
from penstock.pipeline.agents.environments.sources import AGENT, CHILD
from penstock.pipeline.agents.generation import Generate
from penstock.pipeline.agents.record import EpisodeRequest, Trajectory
from penstock.pipeline.data.conversation import Template


class EpisodeEngine(Protocol):
    """One trajectory."""

    async def run(self) -> Trajectory:
        """Run to the end."""
        ...

    def ended(self, finish: Literal["stop", "length", "abort"]) -> Trajectory:
        """The trajectory so far."""
        ...


class Episodes(Protocol):
    """Makes trajectories of one source; used in one asyncio loop."""

    def episode(self, request: EpisodeRequest, sample: int, *, generate: Generate, version: int) -> EpisodeEngine:
        """A trajectory whose turns come from `generate`; `version` is the newest policy version."""
        ...

    async def close(self) -> None:
        """Stop the processes behind the trajectories."""
        ...


@dataclass(slots=True, kw_only=True)
class EnvironmentEpisodes:
    """Trajectories of an environment whose sessions are in child processes."""

    sessions: Sessions
    template: Template
    limits: Limits
    on_loss: Callable[[str], None]

    def episode(self, request: EpisodeRequest, sample: int, *, generate: Generate, version: int) -> Episode:
        seed = seed_of(request.row, seed=request.seed, group=request.random_group)
        return Episode(
            request=request, sample=sample, seed=seed, template=self.template, sessions=self.sessions, limits=self.limits,
            generate=generate, on_loss=self.on_loss, version=version,
        )  # fmt: skip

    async def close(self) -> None:
        await self.sessions.close()


async def open_episodes(
    source: str,
    *,
    template: Template,
    limits: Limits,
    processes: int,
    rules: ChildRules = ENVIRONMENT,
    on_loss: Callable[[str], None] = lambda _: None,
) -> Episodes:
    """Open `source` in the running loop, with at most `processes` child processes; `on_loss` gets a line for each recovered failure."""
    if source.startswith(AGENT):
        try:
            from penstock.pipeline.agents.gateway.episode import AgentEpisodes
        except ImportError as error:
            raise PenstockError(f"{source!r} needs the endpoint for agents: pip install '.[agents]' in the checkout ({error})") from error
        return AgentEpisodes.open(source, template=template, limits=limits, processes=processes, rules=rules, on_loss=on_loss)
    sessions = Sessions(CHILD, size=processes, init={"source": source}, rules=rules)
    return EnvironmentEpisodes(sessions=sessions, template=template, limits=limits, on_loss=on_loss)
