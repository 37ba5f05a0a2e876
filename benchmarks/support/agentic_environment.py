"""Environment of `agentic.toml`: adds the lengths of actions to a number that follows from the seed, with pauses."""

import asyncio


class Counting:
    """Adds the length of each action; ends at 60."""

    def __init__(self, pause: str = "0.1") -> None:
        self.pause, self.total = float(pause), 0

    async def reset(self, *, seed: int, **_: object) -> str:
        """The start number."""
        await asyncio.sleep(self.pause)
        self.total = seed % 10
        return str(self.total)

    async def step(self, text: str) -> tuple[str, float, bool]:
        """The sum so far; the reward is the action's length."""
        await asyncio.sleep(self.pause)
        self.total += len(text)
        return str(self.total), float(len(text)), self.total >= 60
