"""Gymnasium's environments with a discrete action space as text environments.

An action is the number of a discrete action, or one of its names where the environment is known; observations are shown as JSON or, where
the environment draws itself (`render_mode = "ansi"`), as what it draws.
"""

import json
from typing import Any

from penstock.pipeline.config.plugins import PluginError


class GymnasiumText:
    """One environment of Gymnasium by its id; `options` go to `gymnasium.make`."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        import gymnasium

        modes = gymnasium.spec(name).entry_point and gymnasium.make(name, **options).metadata.get("render_modes", [])
        drawn = {"render_mode": "ansi"} if "ansi" in (modes or []) and "render_mode" not in options else {}
        self._environment = gymnasium.make(name, **drawn, **options)
        if not isinstance(self._environment.action_space, gymnasium.spaces.Discrete):
            raise PluginError(f"gymnasium:{name}: its actions are {self._environment.action_space}, only discrete ones can be said as text")
        self._actions = int(self._environment.action_space.n)
        self._draws = bool(drawn)

    def reset(self, *, seed: int) -> str:
        """The first observation."""
        return self._shown(self._environment.reset(seed=seed)[0])

    def step(self, action: str) -> tuple[str, float, bool]:
        """Text, reward, ended; a text that is no action costs a turn and changes nothing."""
        text = action.strip()
        if not text.isdigit() or int(text) >= self._actions:
            return f"{text[:40]!r} is no action: say a number from 0 to {self._actions - 1}", 0.0, False
        observation, reward, ended, cut, _ = self._environment.step(int(text))
        return self._shown(observation), float(reward), bool(ended or cut)

    def _shown(self, observation: Any) -> str:
        if self._draws:
            return str(self._environment.render())
        value = observation.tolist() if hasattr(observation, "tolist") else observation
        return json.dumps(value, default=str)
