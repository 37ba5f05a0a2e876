"""A simulated rollout worker: a continuously batching engine, and the loop that starts groups and loads weights.

`penstock.pipeline.scheduling.rules` decides when groups start and weights change, as in the live worker.
"""

import heapq
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import simpy

from penstock.pipeline.launch.planning.workload import Workload
from penstock.pipeline.scheduling import rules

Process = Generator[Any, Any, None]


class AdmittedPrompt(NamedTuple):
    """A prompt that was assigned to a worker."""

    group: int
    min_version: int


class SimulatedSample(NamedTuple):
    """A finished sample: its tokens, the version of its first token, and the mean version of its tokens."""

    tokens: int
    version_min: int
    version_mean: float


@dataclass(slots=True)
class SimulatedGroup:
    """A group in flight or finished, with its finished samples."""

    group: int
    started_s: float
    samples_per_prompt: int
    samples: list[SimulatedSample] = field(default_factory=list)
    ended_s: float = 0.0
    aborted: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of all finished samples."""
        return sum(sample.tokens for sample in self.samples)


class _Row(NamedTuple):
    """A sample in the engine. `start` and `end` count decode steps of the engine; `versions` is the engine's sum of versions at `start`."""

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
        finished: Callable[["SimulatedWorker", SimulatedGroup], None],
    ) -> None:
        self._world, self._work, self._newest, self._finished = world, work, newest, finished
        self.version = 0
        self.unfinished = 0
        """Groups of this worker without an outcome."""
        self.busy_s = self.load_s = self.no_prompt_s = self.no_weights_s = 0.0
        self.row_s = 0.0
        """Sample-seconds in the engine; divided by `busy_s`, the mean batch size."""
        self.stopped = False
        """True after the run's last step."""
        self._waiting: list[AdmittedPrompt] = []
        self._queue: list[tuple[int, int, int]] = []
        self._rows: list[_Row] = []
        self._groups: dict[int, SimulatedGroup] = {}
        self._steps = 0.0
        self._versions = 0.0
        self._abort_checked = 0
        self._wake = world.event()
        world.process(self._loop())

    def assign(self, prompt: AdmittedPrompt) -> None:
        """Queue a prompt."""
        self._waiting.append(prompt)
        self.wake()

    def wake(self) -> None:
        """Interrupt the decode step or the idle wait: the worker's inputs have changed."""
        if not self._wake.triggered:
            self._wake.succeed()

    def _loop(self) -> Process:
        while not self.stopped:
            yield from self._refresh()
            yield from self._start()
            if self._wake.triggered:
                self._wake = self._world.event()
            if self._rows:
                yield from self._decode()
            else:
                yield from self._idle()

    def _idle(self) -> Process:
        started_s, cause = self._world.now, "no_weights_s" if self._waiting else "no_prompt_s"
        yield self._wake
        setattr(self, cause, getattr(self, cause) + self._world.now - started_s)

    def _decode(self) -> Process:
        """Decode until the next sample ends or `wake` is called."""
        started_s, count = self._world.now, len(self._rows)
        step_s = self._step_s(count)
        remaining = self._rows[0].end - self._steps
        yield self._world.timeout(remaining * step_s) | self._wake
        elapsed_s = self._world.now - started_s
        self.busy_s += elapsed_s
        self.row_s += elapsed_s * count
        steps = min(elapsed_s / step_s, remaining) if step_s else remaining
        self._steps += steps
        self._versions += steps * self.version
        while self._rows and self._rows[0].end <= self._steps + 1e-6:
            self._ended(heapq.heappop(self._rows))
        self._fill()

    def _step_s(self, count: int) -> float:
        if self._work.continuous_batching:
            return self._work.decode(count)
        return self._work.decode(self._work.concurrency) * self._work.group_pace.get(self._rows[0].group, 1.0)

    def _ended(self, row: _Row) -> None:
        group = self._groups.get(row.group)
        if group is None:
            return  # the group was closed without this sample
        version_sum = self._versions - row.versions
        group.samples.append(
            SimulatedSample(row.tokens, self._oldest_trained(row.version), version_sum / max(self._steps - row.start, 1e-9))
        )
        if len(group.samples) == group.samples_per_prompt:
            self._close(group)

    def _oldest_trained(self, version: int) -> int:
        """The oldest trained version: under `continue` tokens beyond `max_lag` are not trained."""
        schedule = self._work.schedule
        return max(version, self._newest() - schedule.max_lag) if schedule.stale_in_hand == "continue" else version

    def _close(self, group: SimulatedGroup) -> None:
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
        """Load newer weights and abort groups that will be stale, if the schedule does so between decode steps."""
        schedule = self._work.schedule
        if schedule.loads_at != "step":
            return
        if self._newest() > self.version and self._groups:
            yield from self._load()
        if schedule.stale_in_hand == "abort" and self._newest() > self._abort_checked:
            self._abort_checked = self._newest()
            stale_groups = {
                row.group
                for row in self._rows
                if rules.will_be_stale(newest_version=self._abort_checked, policy_version_min=row.version, max_lag=schedule.max_lag)
            }
            for number in sorted(stale_groups):
                self._forget(number)
                self._groups[number].aborted = True
                self._close(self._groups[number])
            self._fill()

    def _load(self) -> Process:
        started_s = self._world.now
        version = self._newest()
        if self._work.load_s:
            yield self._world.timeout(self._work.load_s)
        self.load_s += self._world.now - started_s
        self.version = version

    @property
    def _has_room(self) -> bool:
        if not self._work.continuous_batching:
            return not self._groups
        return not self._queue and len(self._rows) < self._work.concurrency

    def _start(self) -> Process:
        """Start prompts while the engine has room, the lowest group number first."""
        schedule = self._work.schedule
        while self._has_room and self._waiting:
            newest = self._newest()
            index = rules.next_in_line(
                [(prompt.group, prompt.min_version) for prompt in self._waiting], loaded_version=self.version, newest_version=newest
            )
            if index is None:
                return
            prompt = self._waiting[index]
            version = rules.version_to_load(schedule, min_version=prompt.min_version, newest_version=newest, loaded_version=self.version)
            if version is not None:
                if self._groups and schedule.loads_at != "step":
                    return
                yield from self._load()
            del self._waiting[index]
            if self._work.prefill_s:
                yield self._world.timeout(self._work.prefill_s)
                self.busy_s += self._work.prefill_s
            self._submit(prompt.group)

    def _submit(self, group: int) -> None:
        schedule = self._work.schedule
        lengths = self._work.lengths.of_group(group, samples=schedule.samples_begun, seed=self._work.seed)
        self._groups[group] = SimulatedGroup(group, self._world.now, schedule.samples_per_prompt)
        for number, tokens in enumerate(lengths.tolist()):
            heapq.heappush(self._queue, (group, number, tokens))
        self._fill()

    def _fill(self) -> None:
        most = self._work.concurrency if self._work.continuous_batching else len(self._queue)
        while self._queue and (len(self._rows) < most or not self._work.continuous_batching):
            group, number, tokens = heapq.heappop(self._queue)
            heapq.heappush(self._rows, _Row(self._steps + tokens, group, number, tokens, self._steps, self.version, self._versions))
