"""Gymnasium's environments with a discrete action space as text environments.

An action is the number of a discrete action. Observations are what the environment draws where it draws texts (`render_mode = "ansi"`),
with what it highlights in brackets, else JSON.
"""

import json
import re
from typing import Any

from penstock.pipeline.config.plugins import PluginError

HIGHLIGHTED = re.compile(r"\x1b\[\d+(?:;\d+)*m(.*?)\x1b\[0m", re.DOTALL)


class GymnasiumText:
    """One environment of Gymnasium by its id; `options` go to `gymnasium.make`."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        import gymnasium
        from gymnasium.envs.registration import load_env_creator

        entry = gymnasium.spec(name).entry_point
        creator = load_env_creator(entry) if isinstance(entry, str) else entry
        self._draws = "ansi" in getattr(creator, "metadata", {}).get("render_modes", ()) and options.get("render_mode", "ansi") == "ansi"
        self._environment = gymnasium.make(name, **{**options, **({"render_mode": "ansi"} if self._draws else {})})
        if not isinstance(self._environment.action_space, gymnasium.spaces.Discrete):
            raise PluginError(f"gymnasium:{name}: its actions are {self._environment.action_space}, only discrete ones can be said as text")
        self._actions = int(self._environment.action_space.n)

    def reset(self, *, seed: int) -> str:
        """The first observation."""
        return self._shown(self._environment.reset(seed=seed)[0])

    def step(self, action: str) -> tuple[str, float, bool]:
        """Text, reward, ended; a text that is no action costs a turn and changes nothing."""
        text = action.strip()
        if not text.isdecimal() or int(text) >= self._actions:
            return f"{text[:40]!r} is no action: say a number from 0 to {self._actions - 1}", 0.0, False
        observation, reward, ended, cut, _ = self._environment.step(int(text))
        return self._shown(observation), float(reward), bool(ended or cut)

    def _shown(self, observation: Any) -> str:
        if self._draws:
            return HIGHLIGHTED.sub(r"[\1]", str(self._environment.render()))
        value = observation.tolist() if hasattr(observation, "tolist") else observation
        return json.dumps(value, default=str)
