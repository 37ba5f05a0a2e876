"""The time that an agent takes: it stands still while a turn is drawn for it."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.pipeline.envs.agents.driver import Limits


@dataclass(slots=True, eq=False)
class AgentClock:
    """Runs from its making on; `now` counts seconds."""

    now: Callable[[], float] = time.monotonic
    spent_s: float = 0.0
    """Up to the last turn that began or ended."""
    asked: bool = False
    """True once the agent has asked for a turn."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _drawing: int = 0
    _since: float = 0.0

    def __post_init__(self) -> None:
        self._since = self.now()

    def note(self, drawing: bool) -> None:
        """A turn begins to be drawn, or has ended."""
        now = self.now()
        if not self._drawing:
            self.spent_s += now - self._since
        self._drawing += 1 if drawing else -1
        self._since, self.asked = now, True
        self.changed.set()

    def left_s(self, limits: Limits) -> float | None:
        """How long the agent may still be silent; None while a turn is drawn for it."""
        if self._drawing:
            return None
        silent = self.now() - self._since
        patience = limits.step_timeout_s if self.asked else limits.reset_timeout_s
        return max(0.0, min(patience - silent, limits.trajectory_timeout_s - self.spent_s - silent))
