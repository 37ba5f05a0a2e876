"""Opens an environment by its source.

A source is `file.py:Class`, `package:Class`, `gymnasium:ID`, `textarena:ID`, `openenv:ws://HOST:PORT` or `tiny:lake`. Environments are
loaded in child processes only, also when a run is created.
"""

import importlib.metadata
import inspect
import json
import random
import re
import shlex
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from penstock.pipeline.agents.environments.interfaces import Episode, episode_of, waits
from penstock.pipeline.config.plugins import PluginError, load, source_digest, split_options

CHILD = "penstock.pipeline.agents.environments.sources:child"
"""Target of `infra.sandbox.sessions.Sessions`; its `init` is `{"source": …}`."""
AT_ONCE = 1024
"""Concurrent calls of a process if the environment's methods are coroutines."""
AGENT = "agent:"
"""Prefix of an agent's command; agents are programs and are not loaded here."""
PYTHON = {"python": sys.executable, "python3": sys.executable}
"""An agent in Python uses the worker's interpreter and packages."""
HIGHLIGHTED = re.compile(r"\x1b\[\d+(?:;\d+)*m(.*?)\x1b\[0m", re.DOTALL)
GAME = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentKind:
    """A loaded environment: constructor, source and version."""

    source: str
    version: str
    """First 16 digits of the source's SHA-256, or the release of the package."""
    make: Callable[[], Any]
    waits: bool
    """True if its methods are coroutines."""

    def episode(self) -> Episode:
        """Start a new episode. Raises `EnvironmentFault` if the constructed object is not an environment."""
        return episode_of(self.make())


class GymnasiumText:
    """A Gymnasium environment with a discrete action space as a text environment; `options` go to `gymnasium.make`.

    An action is the number of a discrete action. Observations are the text that the environment renders (`render_mode = "ansi"`), with
    highlighted parts in brackets, or else JSON.
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        import gymnasium
        from gymnasium.envs.registration import load_env_creator

        entry = gymnasium.spec(name).entry_point
        creator = load_env_creator(entry) if isinstance(entry, str) else entry
        self._renders = "ansi" in getattr(creator, "metadata", {}).get("render_modes", ()) and options.get("render_mode", "ansi") == "ansi"
        self._environment = gymnasium.make(name, **{**options, **({"render_mode": "ansi"} if self._renders else {})})
        if not isinstance(self._environment.action_space, gymnasium.spaces.Discrete):
            raise PluginError(f"gymnasium:{name}: the action space is {self._environment.action_space}; it must be discrete")
        self._actions = int(self._environment.action_space.n)

    def reset(self, *, seed: int) -> str:
        return self._shown(self._environment.reset(seed=seed)[0])

    def step(self, action: str) -> tuple[str, float, bool]:
        """Take an action; return text, reward, and True at the end. An invalid action costs a turn and changes nothing."""
        text = action.strip()
        if not text.isdecimal() or int(text) >= self._actions:
            return f"{text[:40]!r} is not an action: write a number from 0 to {self._actions - 1}", 0.0, False
        observation, reward, ended, cut, _ = self._environment.step(int(text))
        return self._shown(observation), float(reward), bool(ended or cut)

    def _shown(self, observation: Any) -> str:
        if self._renders:
            return HIGHLIGHTED.sub(r"[\1]", str(self._environment.render()))
        value = observation.tolist() if hasattr(observation, "tolist") else observation
        return json.dumps(value, default=str)


class TextArenaGame:
    """A single-player game of TextArena as a text environment; `options` go to `textarena.make`. The last turn has the reward.

    TextArena uses Python's global random numbers, so each game has a random state of its own: an episode depends on its seed and actions
    alone.
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        import textarena
        from textarena.envs.registration import ENV_REGISTRY

        bare = f"{name.removesuffix('-train')}-raw"  # without wrappers that repeat the conversation
        if bare not in ENV_REGISTRY:
            raise PluginError(f"textarena:{name}: TextArena has no such game; see textarena.envs.registration for the names")
        self._name, self._game = name, textarena.make(bare, **options)
        self._numbers: Any = None

    def reset(self, *, seed: int) -> str:
        """Start the game and return its first messages. Raises `PluginError` if it is not for a single player."""
        shared_state = random.getstate()
        try:
            self._game.reset(num_players=1, seed=seed)
        except AssertionError as error:
            raise PluginError(f"textarena:{self._name}: {error}; only single-player games are supported") from error
        finally:
            self._numbers = random.getstate()
            random.setstate(shared_state)
        return self._new_messages()

    def step(self, action: str) -> tuple[str, float, bool]:
        """Make a move; return the new messages, and after the last move "", the reward and True."""
        shared_state = random.getstate()
        random.setstate(self._numbers)
        try:
            ended, _ = self._game.step(action=action)
        finally:
            self._numbers = random.getstate()
            random.setstate(shared_state)
        if not ended:
            return self._new_messages(), 0.0, False
        rewards, _ = self._game.close()
        return "", float((rewards or {}).get(0, 0.0)), True

    def _new_messages(self) -> str:
        """Return the messages of the game to the player since the last call."""
        _, messages = self._game.get_observation()
        return "\n".join(text.strip() for speaker, text, *_ in messages if speaker == GAME)


def _packaged(package: str, text: Callable[[str, dict[str, Any]], Any], name: str, options: Mapping[str, Any]) -> EnvironmentKind:
    """Return the environment `name` of a package, which `text` constructs as a text environment."""
    return EnvironmentKind(source=f"{package}:{name}", version=_release(package), make=lambda: text(name, dict(options)), waits=False)


def _openenv(name: str, options: Mapping[str, Any]) -> EnvironmentKind:
    """Return the environment of the OpenEnv server at the address `name`. Raises `PluginError`."""
    _release("websockets")
    from penstock.pipeline.agents.environments.openenv import OpenEnvText, open_server

    server = open_server(name, options)
    return EnvironmentKind(source=f"openenv:{name}", version=server.version, make=lambda: OpenEnvText(server), waits=True)


def _tiny(name: str, options: Mapping[str, Any]) -> EnvironmentKind:
    if name != "lake":
        raise PluginError(f"'tiny:{name}' is not an environment: use 'tiny:lake'")
    return _own("penstock.pipeline.data.tiny.lake:Lake", options)


SCHEMES: Mapping[str, Callable[[str, Mapping[str, Any]], EnvironmentKind]] = {
    "gymnasium": partial(_packaged, "gymnasium", GymnasiumText),
    "textarena": partial(_packaged, "textarena", TextArenaGame),
    "openenv": _openenv,
    "tiny": _tiny,
}


def check_source(source: str, *, rewards: Iterable[Sequence[str]]) -> None:
    """Raise `PluginError` if an agent's program is not on this machine, or if episodes of a class can have no reward.

    `rewards`: the sets of reward functions, of training and of evaluation.
    """
    if source.startswith(AGENT):
        program = next(iter(shlex.split(source.removeprefix(AGENT))), None)
        if program is None:
            raise PluginError('environment.source: "agent:" names no program; expected agent:COMMAND, such as agent:python agent.py')
        if shutil.which(program) is None and program not in PYTHON:
            raise PluginError(f"environment.source: {program} is neither a command on PATH nor an executable file")
    elif any(set(functions) == {"environment"} for functions in rewards) and _unrewarded(split_options(source)[0]):
        raise PluginError(
            f"environment.source: {source} returns no rewards (it has neither step nor get_reward()), but reward.functions contains only "
            "'environment'; add a reward function, or get_reward() to the class"
        )


def _unrewarded(plain: str) -> bool:
    """True for a class without rewards; False also if it is installed only where environment workers run."""
    if plain.partition(":")[0] in SCHEMES:
        return False
    try:
        kind = load(plain)
    except PluginError:
        return False
    return inspect.isclass(kind) and not any(hasattr(kind, name) for name in ("step", "get_reward"))


def open_environment(source: str) -> EnvironmentKind:
    """Load an environment; options for its constructor follow a question mark. Raises `PluginError`."""
    plain, options = split_options(source)
    scheme, colon, name = plain.partition(":")
    if scheme in SCHEMES and colon and name:
        return SCHEMES[scheme](name, options)
    if not colon:
        raise PluginError(f"{source!r} is not an environment: expected file.py:Class, package:Class, or {', '.join(SCHEMES)} with a name")
    return _own(plain, options)


def _own(plain: str, options: Mapping[str, Any]) -> EnvironmentKind:
    """Return the environment of a user's class, FILE.py:CLASS or PACKAGE:CLASS. Raises `PluginError`."""
    kind = load(plain)
    return EnvironmentKind(source=plain, version=source_digest(plain)[:16], make=lambda: kind(**options), waits=waits(kind))


def _release(package: str) -> str:
    """Return the installed release of a package. Raises `PluginError` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise PluginError(f"the package {package} is not installed: pip install '.[agents]' in the checkout") from None


def child(init: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Awaitable[Any]]:
    """Return the function that serves calls in a child process; `init` has the source. A session is one episode at a time."""
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
            return {**asdict(observed), "tools": list(episode.tools), "source": kind.source, "version": kind.version}
        episode = episodes[number]
        return asdict(await episode.step(payload["message"])) if do == "step" else await episode.reward()

    handle.at_once = AT_ONCE if kind.waits else 1  # type: ignore[attr-defined]
    return handle
