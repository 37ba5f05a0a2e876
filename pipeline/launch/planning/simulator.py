"""Discrete-event simulation of a run: feeder, rollout workers and trainer."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import simpy

from penstock.pipeline.launch.planning.engine import Outcome, SimulatedGroup, SimulatedStep, SimulatedWorker
from penstock.pipeline.launch.planning.workload import Workload
from penstock.pipeline.scheduling import rules
from penstock.pipeline.scheduling.step_selector import Candidate, Selector

Process = Generator[Any, Any, None]


def simulate(work: Workload) -> Outcome:
    """Run the workload to the end of its last step. Raises `ValueError` if the run deadlocks."""
    run = _Run(work)
    done = run.world.process(run.train())
    try:
        run.world.run(until=done)
    except RuntimeError as error:  # simpy: no event is scheduled
        raise ValueError(f"schedule {work.schedule.mode!r} deadlocks after {len(run.steps)} of {work.steps} steps") from error
    return Outcome.of(work, steps=run.steps, workers=run.workers, dropped=dict(run.dropped))


@dataclass(slots=True)
class _Run:
    """State that the simulated workers share; in a live run the topics contain it."""

    work: Workload
    world: simpy.Environment = field(default_factory=simpy.Environment)
    newest: int = 0
    admitted: int = 0
    steps: list[SimulatedStep] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=lambda: {"filtered": 0, "stale": 0, "abandoned": 0})
    selector: Selector = field(init=False)
    workers: list[SimulatedWorker] = field(init=False)
    groups: dict[int, SimulatedGroup] = field(default_factory=dict)
    """Groups with an outcome that are not trained yet."""
    arrived: simpy.Event = field(init=False)

    def __post_init__(self) -> None:
        """Create the workers, and admit the first prompts."""
        self.selector = Selector(self.work.schedule)
        self.arrived = self.world.event()
        self.workers = [
            SimulatedWorker(self.world, self.work, newest=lambda: self.newest, finished=self.generated) for _ in range(self.work.engines)
        ]
        self.feed()

    def feed(self) -> None:
        """Admit prompts up to the limit of the rules and of the workers' free slots."""
        work, dropped = self.work, sum(self.dropped.values())
        limit = rules.admission_limit(work.schedule, newest_version=self.newest, dropped=dropped, steps=work.steps)
        slots, owners = [work.group_slots] * work.engines, [str(number) for number in range(work.engines)]
        while self.admitted < limit:
            partition = rules.choose_partition(unfinished=[worker.unfinished for worker in self.workers], slots=slots, owners=owners)
            if partition is None:
                return
            slot = rules.slot_of(admitted=self.admitted, dropped=dropped)
            min_version = rules.min_version(work.schedule, slot=slot, newest_version=self.newest)
            self.workers[partition].unfinished += 1
            self.workers[partition].assign(self.admitted, min_version)
            self.admitted += 1

    def generated(self, worker: SimulatedWorker, group: SimulatedGroup) -> None:
        """Give a group that a worker has finished or aborted its outcome, after the time that delivery takes."""
        self._after(self.work.deliver_s, partial(self._outcome, worker, group))

    def _outcome(self, worker: SimulatedWorker, group: SimulatedGroup) -> None:
        """Apply a group's outcome, which feeder and trainer read from the log."""
        worker.unfinished -= 1
        outcome = "abandoned" if group.aborted else "filtered" if self._is_filtered(group.group) else "scored"
        if outcome != "scored":
            self.dropped[outcome] += 1
        self.feed()
        self._after(self.work.take_s, partial(self._taken, group, outcome))

    def _after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Call a function after a delay, or at once without one."""

        def later() -> Process:
            yield self.world.timeout(delay_s)
            act()

        self.world.process(later()) if delay_s else act()

    def _taken(self, group: SimulatedGroup, outcome: str) -> None:
        """Give a finished group to the step selector, and wake the trainer if it waits for groups."""
        oldest = min((sample.version_min for sample in group.samples), default=0)
        self.selector.add(Candidate(group=group.group, outcome=outcome, policy_version_min=oldest, partition=0, offset=0, sha256=""))
        if outcome == "scored":
            self.groups[group.group] = group
        if not self.arrived.triggered:
            self.arrived.succeed()

    def _is_filtered(self, group: int) -> bool:
        """True if a group is filtered: as recorded, or at random with the workload's share."""
        recorded = self.work.filtered_groups.get(group)
        if recorded is not None or not self.work.filtered:
            return bool(recorded)
        return bool(np.random.default_rng((self.work.seed, group, 1)).random() < self.work.filtered)

    def train(self) -> Process:
        """The trainer's process, to the end of the last step."""
        schedule = self.work.schedule
        released: simpy.Event = self.world.timeout(0.0)
        for number in range(self.work.steps):
            step = SimulatedStep(number=number, started_s=self.world.now)
            if schedule.starts_on == "round" and number % schedule.steps_per_version == 0:
                remaining = (self.work.steps - number) * schedule.prompts_per_step
                while not self.selector.ready(min(schedule.round_groups, remaining)):
                    yield from self._wait(step)
            version = rules.version_after(number, steps_per_version=schedule.steps_per_version)
            while len(step.groups) < schedule.prompts_per_step:
                yield from self._next_group(step, version=version)
            yield self.world.timeout(self.work.step_s)
            step.compute_s += self.work.step_s
            yield released
            step.ended_s = self.world.now
            self.steps.append(step)
            if rules.publishes(number, steps=self.work.steps, steps_per_version=schedule.steps_per_version):
                released = self.world.timeout(self.work.release_s)
                self.world.timeout(self.work.release_s + self.work.publish_s, version + 1).callbacks.append(self._published)
            if number + 1 < self.work.steps:
                yield self.world.timeout(self.work.hold_s)
        for worker in self.workers:
            worker.stopped = True

    def _next_group(self, step: SimulatedStep, *, version: int) -> Process:
        """Wait for the next fresh group and train on it; stale groups are dropped."""
        candidate = self.selector.take(learner_version=version)
        if self.selector.newly_stale:
            for stale in self.selector.newly_stale:
                del self.groups[stale.group]
            self.dropped["stale"] += len(self.selector.newly_stale)
            self.selector.newly_stale.clear()
            self.feed()
        if candidate is None:
            yield from self._wait(step)
            return
        group = self.groups.pop(candidate.group)
        if not step.groups:
            step.first_group_s = self.world.now
        step.take(group, learner_version=version)
        seconds = self.work.train_s(group.tokens) * self.work.step_pace.get(step.number, 1.0)
        yield self.world.timeout(seconds)
        step.compute_s += seconds

    def _wait(self, step: SimulatedStep) -> Process:
        """Wait until the next group arrives, and count the time as the step's waiting."""
        started_s = self.world.now
        self.arrived = self.world.event()
        yield self.arrived
        step.wait_s += self.world.now - started_s

    def _published(self, event: Any) -> None:
        """Apply that the version in `event.value` has reached the workers."""
        self.newest = max(self.newest, event.value)
        for worker in self.workers:
            worker.wake()
        self.feed()
