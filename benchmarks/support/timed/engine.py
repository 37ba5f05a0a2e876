"""An engine that takes the time of a paper's: concurrent samples share decode steps whose time depends on their number.

It is exact between events: a sample ends at the time at which its last decode step does, whenever its owner calls `step`.
"""

import heapq
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from benchmarks.support.timed.stages import Stages
from penstock.infra.engines.base import (
    DIRECTORY_VERSION,
    Completion,
    EngineKind,
    Finish,
    GroupInFlight,
    GroupRequest,
    Span,
    check_tensors,
)
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.agents.engine import turn_of

LONGEST_STEP_S = 0.05
"""After this long `step` returns, so that its owner reads new prompts and weights. Samples end at decode steps, as in any engine."""
TOKEN, LOGPROB = 10, -1.0


@dataclass(slots=True, order=True)
class _Row:
    end: float
    """In decode steps of the engine."""
    group: int
    sample: int
    tokens: int = field(compare=False)
    start: float = field(compare=False)
    started_s: float = field(compare=False)
    spans: list[Span] = field(compare=False)


class TimedEngine:
    """Generates as many samples as `stages.concurrency` at once, and the others after them."""

    def __init__(self, stages: Stages, *, slot: int = 0) -> None:
        self._stages, self.version = stages, DIRECTORY_VERSION
        self._paces = stages.paces[slot] if stages.paces else ()
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._requests: dict[int, GroupRequest] = {}
        self._ended: dict[int, int] = {}
        """Group -> its samples that have ended."""
        self._waiting: list[tuple[int, int]] = []
        self._rows: list[_Row] = []
        self._steps = self._at_s = 0.0
        self._random = random.Random(stages.seed)
        self._wall_offset_s = time.time() - time.monotonic()
        self._stats = {"groups": 0.0, "tokens": 0.0, "decode_steps": 0.0, "busy_s": 0.0, "row_s": 0.0, "loads": 0.0}

    @property
    def pending(self) -> int:
        return len(self._requests)

    @property
    def idle(self) -> bool:
        return not self._requests

    @property
    def has_room(self) -> bool:
        return not self._stages.by_group or len(self._waiting) + len(self._rows) < self._stages.concurrency

    def submit(self, request: GroupRequest) -> None:
        if self.idle:
            self._at_s = time.monotonic()
        self._requests[request.group], self._ended[request.group] = request, 0
        self._waiting += [(request.group, sample) for sample in request.samples]
        self._fill()

    def step(self) -> list[Completion]:
        if not self._rows:
            return []
        now, each = time.monotonic(), self._step_s
        next_end = self._at_s + (self._rows[0].end - self._steps) * each
        time.sleep(min(max(next_end - now, each), LONGEST_STEP_S))
        return self._advance(time.monotonic())

    def abort(self, group: int) -> list[Completion]:
        if self._requests.pop(group, None) is None:
            return []
        del self._ended[group]
        rows = [row for row in self._rows if row.group == group]
        waiting = [sample for number, sample in self._waiting if number == group]
        self._rows = [row for row in self._rows if row.group != group]
        self._waiting = [entry for entry in self._waiting if entry[0] != group]
        heapq.heapify(self._rows)
        aborted = [self._completion(row, tokens=int(self._steps - row.start), finish="abort") for row in rows]
        aborted += [self._completion(self._row(group, sample), tokens=0, finish="abort") for sample in waiting]
        self._fill()
        return aborted

    def groups_in_flight(self) -> list[GroupInFlight]:
        rows = {group: [row for row in self._rows if row.group == group] for group in sorted(self._requests)}
        return [
            GroupInFlight(
                group=group,
                tokens=sum(int(self._steps - row.start) for row in members),
                oldest_version=min((row.spans[0].version for row in members), default=None),
            )
            for group, members in rows.items()
        ]

    def load_weights(self, version: int, tensors: Iterable[TensorBytes]) -> None:
        weights = list(tensors)
        shapes = self._shapes or {tensor.name: tuple(tensor.shape) for tensor in weights}
        check_tensors(weights, shapes, version=version)
        if self._stages.load_s:
            time.sleep(self._stages.load_s / self._stages.speed_up)
            self._at_s = time.monotonic()  # it decodes nothing meanwhile
        self._shapes, self.version = shapes, version
        self._stats["loads"] += 1
        for row in self._rows:
            done = int(self._steps - row.start)
            row.spans = [span for span in row.spans if span.start < done] + [Span(version, done)]

    def stats(self) -> dict[str, float]:
        return dict(self._stats)

    def close(self) -> None:
        self._requests.clear()
        self._rows.clear()
        self._waiting.clear()

    @property
    def _step_s(self) -> float:
        """Seconds of a decode step here."""
        return self._stages.decode(len(self._rows)) / self._stages.speed_up

    def _advance(self, now: float) -> list[Completion]:
        """Decode up to now, sample by sample: each that ends makes room for the next."""
        ended: list[Completion] = []
        while self._rows:
            count, each = len(self._rows), self._step_s
            next_end = self._at_s + (self._rows[0].end - self._steps) * each
            until = min(next_end, now)
            if until > self._at_s:
                self._stats["busy_s"] += until - self._at_s
                self._stats["row_s"] += (until - self._at_s) * count
                self._stats["decode_steps"] += (until - self._at_s) / each
                self._steps, self._at_s = self._steps + (until - self._at_s) / each, until
            if next_end > now:
                break
            row = heapq.heappop(self._rows)
            self._steps = max(self._steps, row.end)
            ended.append(self._completion(row, tokens=row.tokens, finish="stop"))
            self._stats["tokens"] += row.tokens
            self._ended[row.group] += 1
            if self._ended[row.group] == len(self._requests[row.group].samples):
                del self._requests[row.group], self._ended[row.group]
                self._stats["groups"] += 1
            self._fill()
        return ended

    def _fill(self) -> None:
        while self._waiting and len(self._rows) < self._stages.concurrency:
            index = 0 if self._stages.by_group else self._random.randrange(len(self._waiting))
            heapq.heappush(self._rows, self._row(*self._waiting.pop(index)))

    def _row(self, group: int, sample: int) -> _Row:
        tokens = self._stages.lengths_of(group)[sample]
        pace = self._paces[turn_of(group)[0] % len(self._paces)] if self._paces else 1.0
        return _Row(self._steps + tokens * pace, group, sample, tokens, self._steps, self._at_s, [Span(self.version, 0)])

    def _completion(self, row: _Row, *, tokens: int, finish: Finish) -> Completion:
        ids = np.full(tokens, TOKEN, np.int32)
        if finish == "stop":
            ids[-1] = 2
        spans = [span for number, span in enumerate(row.spans) if span.start < tokens or not number]
        return Completion(
            group=row.group, sample=row.sample, token_ids=ids, logprobs=np.full(tokens, LOGPROB, np.float32), finish=finish,
            spans=tuple(spans), started_ns=self._ns(row.started_s), ended_ns=self._ns(self._at_s),
        )  # fmt: skip

    def _ns(self, monotonic_s: float) -> int:
        return int((monotonic_s + self._wall_offset_s) * 1e9)


def kind(stages: Stages, *, slot: int = 0) -> EngineKind:
    """The engine of the rollout worker `slot`, for the registry."""
    return EngineKind(open=lambda _: TimedEngine(stages, slot=slot), swaps_in_flight=True, continuous_batching=True)
