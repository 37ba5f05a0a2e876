"""Finds an environment by its name in the configuration.

A name is `file.py:Class`, `package:Class`, `gymnasium:ID`, `textarena:ID`, `openenv:ws://HOST:PORT` or `tiny:lake`.

The rule: what is loaded here runs in a child process only; `check` loads it once, in a child too, when a run is created.
"""

import importlib.metadata
import inspect
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.pipeline.config.plugins import PluginError, load, source_digest, split_options
from penstock.pipeline.envs.environments.interfaces import Episode, episode_of, waits

AGENT = "agent:"
"""What the name of an agent's command begins with; agents are programs, which no child loads."""
PYTHON = {"python": sys.executable, "python3": sys.executable}
"""An agent in Python has the worker's own packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentKind:
    """An environment by name: how an episode of it is made, and which source it is."""

    source: str
    version: str
    """The first 16 digits of its source's SHA-256, or the release of the package it comes from."""
    make: Callable[[], Any]
    waits: bool
    """True if its methods are coroutines."""

    def episode(self) -> Episode:
        """A new episode. Raises `EnvironmentFault` for an object that is no environment."""
        return episode_of(self.make())


def _gymnasium(name: str, options: Mapping[str, Any]) -> EnvironmentKind:
    from penstock.pipeline.envs.environments.gymnasium_text import GymnasiumText

    return EnvironmentKind(
        source=f"gymnasium:{name}", version=_release("gymnasium"), make=lambda: GymnasiumText(name, dict(options)), waits=False
    )


def _textarena(name: str, options: Mapping[str, Any]) -> EnvironmentKind:
    from penstock.pipeline.envs.environments.textarena_game import TextArenaGame

    return EnvironmentKind(
        source=f"textarena:{name}", version=_release("textarena"), make=lambda: TextArenaGame(name, dict(options)), waits=False
    )


def _openenv(name: str, options: Mapping[str, Any]) -> EnvironmentKind:
    _release("websockets")
    from penstock.pipeline.envs.environments.openenv_text import OpenEnvText, ask_server

    server = ask_server(name, options)
    return EnvironmentKind(source=f"openenv:{name}", version=server.version, make=lambda: OpenEnvText(server), waits=True)


def _tiny(name: str, options: Mapping[str, Any]) -> EnvironmentKind:
    if name != "lake":
        raise PluginError(f"'tiny:{name}' is no environment: there is 'tiny:lake'")
    return _own("penstock.pipeline.envs.tiny.lake:Lake", options)


SCHEMES: Mapping[str, Callable[[str, Mapping[str, Any]], EnvironmentKind]] = {
    "gymnasium": _gymnasium,
    "textarena": _textarena,
    "openenv": _openenv,
    "tiny": _tiny,
}
"""Scheme of a source -> the function that opens it."""


def check_agent(source: str) -> None:
    """Raises `PluginError` if the program of `agent:COMMAND` is not on this machine."""
    program = next(iter(shlex.split(source.removeprefix(AGENT))), None)
    if program is None:
        raise PluginError('environment.source: "agent:" names no program; expected agent:COMMAND, such as agent:python agent.py')
    if shutil.which(program) is None and program not in PYTHON:
        raise PluginError(f"environment.source: there is no program {program} on PATH, nor a file of that name that can be run")


def check_source(source: str, *, rewards: Iterable[Sequence[str]]) -> None:
    """Raises `PluginError` if an agent's program is not on this machine, or if episodes of a class can have no reward.

    `rewards`: sets of reward functions, each of which has to give one.
    """
    if source.startswith(AGENT):
        check_agent(source)
    elif any(set(functions) == {"environment"} for functions in rewards) and _unrewarded(split_options(source)[0]):
        raise PluginError(
            f"environment.source: {source} has neither step nor get_reward(), and 'environment' is the only one of reward.functions; add "
            "a reward function, or get_reward() to the class"
        )


def _unrewarded(plain: str) -> bool:
    """True for an own class that gives no rewards; its package may be on environment workers' machines alone, which then find out."""
    if plain.partition(":")[0] in SCHEMES:
        return False
    try:
        kind = load(plain)
    except PluginError:
        return False
    return inspect.isclass(kind) and not any(hasattr(kind, name) for name in ("step", "get_reward"))


def open_environment(source: str) -> EnvironmentKind:
    """The environment of that name; options for its constructor follow a question mark. Raises `PluginError`.

    Example:
        open_environment("gymnasium:FrozenLake-v1?is_slippery=false").version  # -> "1.4.0"
    """
    plain, options = split_options(source)
    scheme, colon, name = plain.partition(":")
    if scheme in SCHEMES and colon and name:
        return SCHEMES[scheme](name, options)
    if not colon:
        raise PluginError(f"{source!r} is no environment: expected file.py:Class, package:Class, or {', '.join(SCHEMES)} with a name")
    return _own(plain, options)


def _own(plain: str, options: Mapping[str, Any]) -> EnvironmentKind:
    kind = load(plain)
    return EnvironmentKind(source=plain, version=source_digest(plain)[:16], make=lambda: kind(**options), waits=waits(kind))


def _release(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise PluginError(f"there is no package {package} here: pip install '.[agents]' in the checkout") from None
