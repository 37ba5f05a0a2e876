"""A simulated rollout worker: a continuously batching engine, and the loop that starts groups and loads weights."""

import heapq
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import simpy

from penstock.pipeline.launch.planning.workload import Workload
from penstock.pipeline.scheduling import rules

Process = Generator[Any, Any, None]


class SimulatedSample(NamedTuple):
    """A finished sample: number of tokens, version of the first token, mean version of all tokens."""

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
    """A sample being generated. `start` and `end` count decode steps; `versions` is the engine's sum of versions at `start`."""

    end: float
    group: int
    number: int
    tokens: int
    start: float
    version: int
    versions: float


class SimulatedWorker:
    """A rollout worker in simulated time."""

    def __init__(
        self,
        world: simpy.Environment,
        work: Workload,
        *,
        newest: Callable[[], int],
        finished: Callable[["SimulatedWorker", SimulatedGroup], None],
    ) -> None:
        """Start the worker's process in `world`. `newest` returns the newest published version; `finished` is called with each group."""
        self._world, self._work, self._newest, self._finished = world, work, newest, finished
        self.version = 0
        self.unfinished = 0
        """Groups of this worker without an outcome."""
        self.busy_s = 0.0
        self.row_s = 0.0
        """Sample-seconds in the engine; divided by `busy_s`, the mean batch size."""
        self.stopped = False
        """True after the run's last step."""
        self._waiting: list[tuple[int, int]] = []
        """(group, oldest version that may generate it) of each assigned prompt."""
        self._queue: list[tuple[int, int, int]] = []
        self._rows: list[_Row] = []
        self._groups: dict[int, SimulatedGroup] = {}
        self._steps = 0.0
        self._versions = 0.0
        self._abort_checked = 0
        self._wake = world.event()
        world.process(self._loop())

    def assign(self, group: int, min_version: int) -> None:
        self._waiting.append((group, min_version))
        self.wake()

    def wake(self) -> None:
        """Interrupt the decode step or the idle wait: the worker's inputs have changed."""
        if not self._wake.triggered:
            self._wake.succeed()

    def _loop(self) -> Process:
        """The worker's process: load weights, start groups, decode, until the run's last step."""
        while not self.stopped:
            yield from self._refresh()
            yield from self._start()
            if self._wake.triggered:
                self._wake = self._world.event()
            if self._rows:
                yield from self._decode()
            else:
                yield self._wake

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
        """Add a finished sample to its group, and close the group if it is the last one needed."""
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
        """Report a group as finished, and drop its samples in flight, if it was oversampled."""
        del self._groups[group.group]
        if self._work.schedule.oversample:
            self._forget(group.group)
        group.ended_s = self._world.now
        self._finished(self, group)

    def _forget(self, group: int) -> None:
        """Drop a group's samples, waiting and in flight."""
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
        """Load the newest version; the engine decodes nothing meanwhile."""
        version = self._newest()
        if self._work.load_s:
            yield self._world.timeout(self._work.load_s)
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
            index = rules.next_in_line(self._waiting, loaded_version=self.version, newest_version=newest)
            if index is None:
                return
            group, min_version = self._waiting[index]
            version = rules.version_to_load(schedule, min_version=min_version, newest_version=newest, loaded_version=self.version)
            if version is not None:
                if self._groups and schedule.loads_at != "step":
                    return
                yield from self._load()
            del self._waiting[index]
            if self._work.prefill_s:
                yield self._world.timeout(self._work.prefill_s)
                self.busy_s += self._work.prefill_s
            self._submit(group)

    def _submit(self, group: int) -> None:
        """Queue the samples of a group, with lengths from the workload."""
        schedule = self._work.schedule
        lengths = self._work.lengths.of_group(group, samples=schedule.samples_begun, seed=self._work.seed)
        self._groups[group] = SimulatedGroup(group, self._world.now, schedule.samples_per_prompt)
        for number, tokens in enumerate(lengths.tolist()):
            heapq.heappush(self._queue, (group, number, tokens))
        self._fill()

    def _fill(self) -> None:
        """Move queued samples into the free rows of the engine."""
        most = self._work.concurrency if self._work.continuous_batching else len(self._queue)
        while self._queue and (len(self._rows) < most or not self._work.continuous_batching):
            group, number, tokens = heapq.heappop(self._queue)
            heapq.heappush(self._rows, _Row(self._steps + tokens, group, number, tokens, self._steps, self.version, self._versions))


@dataclass(slots=True)
class SimulatedStep:
    """One optimizer step; times are seconds since the start of the run."""

    number: int
    started_s: float
    first_group_s: float = 0.0
    ended_s: float = 0.0
    wait_s: float = 0.0
    compute_s: float = 0.0
    first_sample_s: float = float("inf")
    last_sample_s: float = 0.0
    tokens: int = 0
    groups: list[int] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    """Lag of each of its groups, in versions."""
    token_lag: float = 0.0
    """Sum over its tokens of their lag in versions."""

    def take(self, group: SimulatedGroup, *, learner_version: int) -> None:
        """Add a group that this step trains on."""
        self.groups.append(group.group)
        self.tokens += group.tokens
        self.lags.append(learner_version - min(sample.version_min for sample in group.samples))
        self.token_lag += sum(sample.tokens * (learner_version - sample.version_mean) for sample in group.samples)
        self.first_sample_s = min(self.first_sample_s, group.started_s)
        self.last_sample_s = max(self.last_sample_s, group.ended_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Measurements of a simulated run."""

    wall_s: float
    """Seconds from the start of the first sample to the end of the last step."""
    samples: int
    """Number of trained samples."""
    tokens: int
    """Number of tokens of the trained samples."""
    trainer_wait_s: float
    """Time that the trainer waited for groups."""
    trainer_compute_s: float
    rollout_to_train_end_s: tuple[float, ...]
    """Per round, from the start of its first sample to the end of its last step (arXiv 2606.26997)."""
    first_dispatch_s: tuple[float, ...]
    """Per round, from the start of its first sample to the start of training on its first group."""
    generate_s: float
    """Time spent generating, mean over the rollout workers."""
    batch: float
    """Mean batch size of a busy engine."""
    lag_mean: float
    """Mean lag of trained groups, in versions."""
    lag_max: int
    token_lag_mean: float
    """Mean lag of trained tokens, in versions."""
    dropped: dict[str, int]
    steps: tuple[SimulatedStep, ...] = field(repr=False)

    @classmethod
    def of(
        cls, work: Workload, *, steps: Sequence[SimulatedStep], workers: Sequence[SimulatedWorker], dropped: dict[str, int]
    ) -> "Outcome":
        """The measurements of a finished simulation."""
        rounds = [steps[low : low + work.schedule.steps_per_version] for low in range(0, len(steps), work.schedule.steps_per_version)]
        starts = [min(step.first_sample_s for step in members) for members in rounds]
        tokens, count = sum(step.tokens for step in steps), len(workers)
        lags = [lag for step in steps for lag in step.lags]
        busy = sum(worker.busy_s for worker in workers)
        return cls(
            wall_s=steps[-1].ended_s - min(starts), samples=len(lags) * work.schedule.samples_per_prompt, tokens=tokens,
            trainer_wait_s=sum(step.wait_s for step in steps), trainer_compute_s=sum(step.compute_s for step in steps),
            rollout_to_train_end_s=tuple(members[-1].ended_s - start for members, start in zip(rounds, starts, strict=True)),
            first_dispatch_s=tuple(members[0].first_group_s - start for members, start in zip(rounds, starts, strict=True)),
            generate_s=busy / count, batch=sum(worker.row_s for worker in workers) / busy if busy else 0.0,
            lag_mean=statistics.fmean(lags), lag_max=max(lags),
            token_lag_mean=sum(step.token_lag for step in steps) / tokens, dropped=dropped, steps=tuple(steps),
        )  # fmt: skip

    @property
    def trainer_waiting_ratio(self) -> float:
        """Waiting time of the trainer as a share of its waiting and compute time."""
        return self.trainer_wait_s / (self.trainer_wait_s + self.trainer_compute_s)

    @property
    def rollout_busy_share(self) -> float:
        """Share of the run in which an engine generates."""
        return min(1.0, self.generate_s / self.wall_s)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s

    def as_json(self) -> dict[str, Any]:
        """The measurements as plain data, of the rounds their medians."""
        return {
            "wall_s": self.wall_s, "samples_per_s": self.samples / self.wall_s, "tokens_per_s": self.tokens_per_s,
            "trainer_waiting_ratio": self.trainer_waiting_ratio, "trainer_wait_s": self.trainer_wait_s,
            "trainer_compute_s": self.trainer_compute_s, "rollout_to_train_end_s": statistics.median(self.rollout_to_train_end_s),
            "first_dispatch_s": statistics.median(self.first_dispatch_s), "rollout_busy_share": self.rollout_busy_share,
            "batch": self.batch, "lag_mean": self.lag_mean, "lag_max": self.lag_max, "token_lag_mean": self.token_lag_mean,
            "dropped": self.dropped,
        }  # fmt: skip
