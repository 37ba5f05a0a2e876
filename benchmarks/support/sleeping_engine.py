"""An engine that sleeps; all turns in flight share its decode steps."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from penstock.infra.engines.base import DIRECTORY_VERSION, Completion, EngineKind, GroupInFlight, GroupRequest, Span
from penstock.infra.tensors.stream import TensorBytes

TOKENS = 5
"""Tokens of every turn, the stop id included."""


@dataclass(slots=True)
class SleepingEngine:
    """Generates any number of turns concurrently; a decode step takes `step_s`, a turn `TOKENS` of them."""

    step_s: float
    version: int = DIRECTORY_VERSION
    busy_s: float = 0.0
    _work: dict[int, tuple[GroupRequest, int]] = field(default_factory=dict)

    @property
    def pending(self) -> int:
        return len(self._work)

    @property
    def idle(self) -> bool:
        return not self._work

    @property
    def has_room(self) -> bool:
        return True

    def submit(self, request: GroupRequest) -> None:
        self._work[request.group] = (request, time.time_ns())

    def step(self) -> list[Completion]:
        if not self._work:
            return []
        time.sleep(self.step_s)
        self.busy_s += self.step_s
        ended = [number for number, (_, since) in self._work.items() if time.time_ns() - since >= 0.99e9 * TOKENS * self.step_s]
        return [self._completion(*self._work.pop(number)) for number in ended]

    def abort(self, group: int) -> list[Completion]:
        self._work.pop(group, None)
        return []

    def groups_in_flight(self) -> list[GroupInFlight]:
        return [GroupInFlight(group=group, tokens=0, oldest_version=self.version) for group in sorted(self._work)]

    def load_weights(self, version: int, tensors: Iterable[TensorBytes]) -> None:
        del tensors
        self.version = version

    def stats(self) -> dict[str, float]:
        return {"busy_s": self.busy_s}

    def close(self) -> None:
        self._work.clear()

    def _completion(self, request: GroupRequest, since: int) -> Completion:
        ids = np.full(TOKENS, 10, np.int32)
        ids[-1] = request.sampling.stop_ids[0]
        return Completion(
            group=request.group, sample=0, token_ids=ids, logprobs=np.full(TOKENS, -1.0, np.float32), finish="stop",
            spans=(Span(self.version, 0),), started_ns=since, ended_ns=time.time_ns(),
        )  # fmt: skip


def kind(step_s: float) -> EngineKind:
    """The engine for the registry."""
    return EngineKind(open=lambda _: SleepingEngine(step_s), swaps_in_flight=True, continuous_batching=True)
