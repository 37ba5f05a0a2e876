"""An environment that sleeps; its times follow from its seed and the number of its sample."""

import asyncio
from collections import Counter
from random import Random


class Together:
    """Lock-step of `size` trajectories: a turn starts when all that have not ended have finished the previous one."""

    def __init__(self) -> None:
        self.ended, self.waiting = 0, list[asyncio.Future[None]]()

    async def wait(self, size: int) -> None:
        """Wait for the other trajectories."""
        self.waiting.append(asyncio.get_running_loop().create_future())
        last = self.waiting[-1]
        self._release(size)
        await last

    def end(self, size: int) -> None:
        """Count an ended trajectory; after the last one the next round starts."""
        self.ended += 1
        self._release(size)
        if self.ended == size:
            self.ended = 0

    def _release(self, size: int) -> None:
        if len(self.waiting) == size - self.ended:
            for waiting in self.waiting:
                waiting.set_result(None)
            self.waiting.clear()


STARTED: Counter[int] = Counter()
TOGETHER = Together()


class Sleeping:
    """A trajectory of about `turns` turns (standard deviation `uneven` of that), each N(`mean`, `sigma`) seconds, cut at zero.

    `between` and `within` multiply all times of a group, and of a sample, by log-normal factors of these deviations. A reset fails with
    probability `failing`, after `failing_s`. With `together`, that many trajectories run in lock-step. A row's column `turns`, if it has
    one, replaces `turns`.
    """

    def __init__(
        self, mean: float = 0.1, sigma: float = 0.0, turns: int = 10, uneven: float = 0.0, between: float = 0.0, within: float = 0.0,
        failing: float = 0.0, failing_s: float = 0.0, together: int = 0,
    ) -> None:  # fmt: skip
        self.mean, self.sigma, self.turns, self.uneven = mean, sigma, turns, uneven
        self.between, self.within, self.failing, self.failing_s, self.together = between, within, failing, failing_s, together

    async def reset(self, *, seed: int, turns: int | None = None) -> str:
        """Start; raises if the reset fails."""
        number = STARTED[seed]
        STARTED[seed] += 1
        self.random = Random(f"{seed}/{number}")
        if self.random.random() < self.failing:
            await asyncio.sleep(self.failing_s)
            raise RuntimeError("no free instance")
        self.left = max(1, round(self.random.gauss(turns or self.turns, self.uneven * (turns or self.turns))))
        self.factor = Random(f"group {seed}").lognormvariate(0.0, self.between) * self.random.lognormvariate(0.0, self.within)
        if self.together:
            await TOGETHER.wait(self.together)
        return "go"

    async def step(self, text: str) -> tuple[str, float, bool]:
        """Text, reward, ended; the reward differs between samples, so that no group is filtered."""
        del text
        self.left -= 1
        await asyncio.sleep(max(0.0, self.random.gauss(self.mean, self.sigma)) * self.factor)
        if not self.left:
            if self.together:
                TOGETHER.end(self.together)
            return "end", self.random.random(), True
        if self.together:
            await TOGETHER.wait(self.together)
        return "on", 0.0, False
