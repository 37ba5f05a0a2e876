"""TextArena's games for one player as text environments.

The rule: an episode is a function of its seed and actions, whatever else is played in its process: TextArena draws from Python's common
random numbers, so each game keeps a state of its own for them.
"""

import random
from typing import Any

from penstock.pipeline.config.plugins import PluginError

GAME = -1
"""Who speaks in a game, where no player does."""


class TextArenaGame:
    """One game of TextArena by its id; `options` go to `textarena.make`. The reward comes with the last turn."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        import textarena
        from textarena.envs.registration import ENV_REGISTRY

        bare = f"{name.removesuffix('-train')}-raw"  # as the conversation keeps what was said, no wrapper needs to say it again
        if bare not in ENV_REGISTRY:
            raise PluginError(f"textarena:{name}: TextArena has no such game; textarena.envs.registration lists them")
        self._name, self._game = name, textarena.make(bare, **options)
        self._numbers: Any = None

    def reset(self, *, seed: int) -> str:
        """The rules, and what is seen first."""
        common = random.getstate()
        try:
            self._game.reset(num_players=1, seed=seed)
        except AssertionError as error:
            raise PluginError(f"textarena:{self._name}: {error}; only games of one player can be played") from error
        finally:
            self._numbers = random.getstate()
            random.setstate(common)
        return self._heard()

    def step(self, action: str) -> tuple[str, float, bool]:
        """What the game says, reward, ended."""
        common = random.getstate()
        random.setstate(self._numbers)
        try:
            ended, _ = self._game.step(action=action)
        finally:
            self._numbers = random.getstate()
            random.setstate(common)
        if not ended:
            return self._heard(), 0.0, False
        rewards, _ = self._game.close()
        return "", float((rewards or {}).get(0, 0.0)), True

    def _heard(self) -> str:
        """What the game has said to the player since the last call."""
        _, said = self._game.get_observation()
        return "\n".join(text.strip() for speaker, text, *_ in said if speaker == GAME)
