"""A simulated rollout worker: an engine that draws samples side by side, and the loop that starts groups and loads weights.

The rule: what may start and when weights change is decided by `penstock.pipeline.scheduling.rules`, as in the live worker.
"""

import heapq
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import simpy

from penstock.pipeline.planning.workload import Workload
from penstock.pipeline.scheduling import rules

Process = Generator[Any, Any, None]


class Asked(NamedTuple):
    """A prompt that has reached its worker."""

    group: int
    min_version: int


class GeneratedSample(NamedTuple):
    """A sample that ended: its tokens, the version of its first token, and the mean version of its tokens."""

    tokens: int
    version_min: int
    version_mean: float


@dataclass(slots=True)
class GeneratedGroup:
    """A group in hand or drawn: what its samples came to."""

    group: int
    started_s: float
    wanted: int
    samples: list[GeneratedSample] = field(default_factory=list)
    ended_s: float = 0.0
    aborted: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of all its samples."""
        return sum(sample.tokens for sample in self.samples)


class _Row(NamedTuple):
    """A sample in the engine; `end` and `start` are decode steps of this engine, `versions` the sum over them of its version at `start`."""

    end: float
    group: int
    number: int
    tokens: int
    start: float
    version: int
    versions: float


class SimulatedWorker:
    """One rollout worker in simulated time."""

    def __init__(
        self,
        world: simpy.Environment,
        work: Workload,
        *,
        newest: Callable[[], int],
        finished: Callable[["SimulatedWorker", GeneratedGroup], None],
    ) -> None:
        self._world, self._work, self._newest, self._finished = world, work, newest, finished
        self.version = 0
        self.unfinished = 0
        """Groups of this worker without an outcome, as the feeder counts them."""
        self.busy_s = self.load_s = self.no_prompt_s = self.no_weights_s = 0.0
        self.row_s = 0.0
        """Seconds of samples in the engine: by `busy_s`, the mean number of them."""
        self.hold = False
        """True once the run's last step is done."""
        self._waiting: list[Asked] = []
        self._queue: list[tuple[int, int, int]] = []
        self._rows: list[_Row] = []
        self._groups: dict[int, GeneratedGroup] = {}
        self._steps = 0.0
        self._versions = 0.0
        self._judged = 0
        self._wake = world.event()
        world.process(self._loop())

    def ask(self, prompt: Asked) -> None:
        """A prompt has arrived."""
        self._waiting.append(prompt)
        self.wake()

    def wake(self) -> None:
        """Something has changed that the worker looks at before its next decode step."""
        if not self._wake.triggered:
            self._wake.succeed()

    def _loop(self) -> Process:
        while not self.hold:
            yield from self._refresh()
            yield from self._start()
            if self._wake.triggered:
                self._wake = self._world.event()
            if self._rows:
                yield from self._draw()
            else:
                yield from self._idle()

    def _idle(self) -> Process:
        began, cause = self._world.now, "no_weights_s" if self._waiting else "no_prompt_s"
        yield self._wake
        setattr(self, cause, getattr(self, cause) + self._world.now - began)

    def _draw(self) -> Process:
        """Decode until the next sample ends, or something changes."""
        began, count = self._world.now, len(self._rows)
        step_s = self._step_s(count)
        left = self._rows[0].end - self._steps
        yield self._world.timeout(left * step_s) | self._wake
        passed = self._world.now - began
        self.busy_s += passed
        self.row_s += passed * count
        drawn = min(passed / step_s, left) if step_s else left
        self._steps += drawn
        self._versions += drawn * self.version
        while self._rows and self._rows[0].end <= self._steps + 1e-6:
            self._ended(heapq.heappop(self._rows))
        self._fill()

    def _step_s(self, count: int) -> float:
        if self._work.side_by_side:
            return self._work.decode(count)
        return self._work.decode(self._work.concurrency) * self._work.group_pace.get(self._rows[0].group, 1.0)

    def _ended(self, row: _Row) -> None:
        group = self._groups.get(row.group)
        if group is None:
            return  # closed without this sample
        drawn_versions = self._versions - row.versions
        group.samples.append(
            GeneratedSample(row.tokens, self._oldest_trained(row.version), drawn_versions / max(self._steps - row.start, 1e-9))
        )
        if len(group.samples) == group.wanted:
            self._close(group)

    def _oldest_trained(self, version: int) -> int:
        """The oldest version that counts: under `continue` older tokens are not trained."""
        schedule = self._work.schedule
        return max(version, self._newest() - schedule.max_lag) if schedule.stale_in_hand == "continue" else version

    def _close(self, group: GeneratedGroup) -> None:
        del self._groups[group.group]
        if self._work.schedule.oversample:
            self._forget(group.group)
        group.ended_s = self._world.now
        self._finished(self, group)

    def _forget(self, group: int) -> None:
        self._queue = [entry for entry in self._queue if entry[0] != group]
        self._rows = [row for row in self._rows if row.group != group]
        heapq.heapify(self._queue)
        heapq.heapify(self._rows)

    def _refresh(self) -> Process:
        """Between two decode steps: take newer weights, and abort groups that can no longer be fresh, as far as the schedule says so."""
        schedule = self._work.schedule
        if schedule.loads_at != "step":
            return
        if self._newest() > self.version and self._groups:
            yield from self._load()
        if schedule.stale_in_hand == "abort" and self._newest() > self._judged:
            self._judged = self._newest()
            hopeless = {
                row.group
                for row in self._rows
                if rules.will_be_stale(newest_version=self._judged, policy_version_min=row.version, max_lag=schedule.max_lag)
            }
            for number in sorted(hopeless):
                self._forget(number)
                self._groups[number].aborted = True
                self._close(self._groups[number])
            self._fill()

    def _load(self) -> Process:
        began = self._world.now
        version = self._newest()
        if self._work.load_s:
            yield self._world.timeout(self._work.load_s)
        self.load_s += self._world.now - began
        self.version = version

    @property
    def _has_room(self) -> bool:
        if not self._work.side_by_side:
            return not self._groups
        return not self._queue and len(self._rows) < self._work.concurrency

    def _start(self) -> Process:
        """Give the engine the prompts it has room for, the lowest group number first."""
        schedule = self._work.schedule
        while self._has_room and self._waiting:
            newest = self._newest()
            index = rules.next_in_line(
                [(asked.group, asked.min_version) for asked in self._waiting], loaded_version=self.version, newest_version=newest
            )
            if index is None:
                return
            asked = self._waiting[index]
            wanted = rules.version_to_load(schedule, min_version=asked.min_version, newest_version=newest, loaded_version=self.version)
            if wanted is not None:
                if self._groups and schedule.loads_at != "step":
                    return
                yield from self._load()
            del self._waiting[index]
            if self._work.begin_s:
                yield self._world.timeout(self._work.begin_s)
                self.busy_s += self._work.begin_s
            self._begin(asked.group)

    def _begin(self, group: int) -> None:
        schedule = self._work.schedule
        lengths = self._work.lengths.of_group(group, samples=schedule.samples_begun, seed=self._work.seed)
        self._groups[group] = GeneratedGroup(group, self._world.now, schedule.samples_per_prompt)
        for number, tokens in enumerate(lengths.tolist()):
            heapq.heappush(self._queue, (group, number, tokens))
        self._fill()

    def _fill(self) -> None:
        most = self._work.concurrency if self._work.side_by_side else len(self._queue)
        while self._queue and (len(self._rows) < most or not self._work.side_by_side):
            group, number, tokens = heapq.heappop(self._queue)
            heapq.heappush(self._rows, _Row(self._steps + tokens, group, number, tokens, self._steps, self.version, self._versions))
