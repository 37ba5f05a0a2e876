"""Arguments and results of a line of the check."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch


class Skipped(Exception):
    """A line cannot run on this machine; the message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measured value and its limits; a figure without a limit is information."""

    name: str
    value: float
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def holds(self) -> bool:
        """False if the value is beyond a limit or is not a number."""
        low = -math.inf if self.at_least is None else self.at_least
        return low <= self.value <= (math.inf if self.at_most is None else self.at_most)

    def __str__(self) -> str:
        limits = [f"{sign} {limit:.4g}" for sign, limit in ((">=", self.at_least), ("<=", self.at_most)) if limit is not None]
        measured = " ".join(filter(None, (self.name, f"{self.value:.4g}", self.unit)))
        return f"{measured} ({', '.join(limits)})" if limits else measured

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The device under check and a folder for files."""

    device: torch.device
    folder: Path

    @property
    def on_gpu(self) -> bool:
        """False on a CPU, where sizes are small and limits that only a GPU can meet are left out."""
        return self.device.type == "cuda"

    def limit(self, value: float) -> float | None:
        """A limit that holds on a GPU alone."""
        return value if self.on_gpu else None

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, action: Callable[[], Any], *, repeats: int = 5) -> float:
        """Median time of an action after one warm-up, with the device's work."""

        def once() -> float:
            started = time.perf_counter()
            action()
            self.synchronize()
            return time.perf_counter() - started

        once()
        return statistics.median(once() for _ in range(repeats))

    def peak_bytes(self, action: Callable[[], Any]) -> int:
        """Largest GPU memory during an action above the memory before it; 0 on a CPU."""
        if not self.on_gpu:
            action()
            return 0
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        action()
        self.synchronize()
        return int(torch.cuda.max_memory_allocated(self.device)) - before


Line = Callable[[Machine], Iterator[Figure]]
gigabytes_per_s = partial(Figure, unit="GB/s")
