"""The child's side: holds episodes by the number of their session and answers `reset`, `step`, `reward` and `close`."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from penstock.pipeline.envs.environments.interfaces import Episode, Observation
from penstock.pipeline.envs.environments.sources import open_environment

CHILD = "penstock.pipeline.envs.environments.child:child"
"""Target of `infra.sandbox.sessions.Sessions`; its `init` is `{"source": …}`."""
AT_ONCE = 1024
"""Calls that a process works on side by side, where the environment's methods are coroutines."""


def child(init: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Awaitable[Any]]:
    """The handler of one child process."""
    kind = open_environment(init["source"])
    episodes: dict[int, Episode] = {}

    async def handle(payload: Mapping[str, Any]) -> Any:
        number, do = payload["session"], payload["do"]
        if do == "close":
            if (episode := episodes.pop(number, None)) is not None:
                await episode.close()
            return None
        if do == "reset":
            episode = episodes[number] = kind.episode()
            observed = await episode.reset(seed=payload["seed"], row=payload["row"])
            return {**_as_json(observed), "tools": list(episode.tools), "source": kind.source, "version": kind.version}
        episode = episodes[number]
        return _as_json(await episode.step(payload["message"])) if do == "step" else await episode.reward()

    handle.at_once = AT_ONCE if kind.waits else 1  # type: ignore[attr-defined]
    return handle


def _as_json(observed: Observation) -> dict[str, Any]:
    return {"messages": list(observed.messages), "reward": observed.reward, "ended": observed.ended}
