"""The steps of a replay: recorded plans or new ones, with their groups. Time spent waiting for a followed run is counted apart."""

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from penstock.infra.errors import ConfigError, PenstockError
from penstock.pipeline.learner.policy_trainer import Notify
from penstock.pipeline.replay.plan_reader import PlanMember, PlannedGroups, ReadAhead
from penstock.pipeline.replay.recording import Recording
from penstock.pipeline.replay.restore_policy import PROGRESS_S
from penstock.pipeline.replay.train.reselect import Selection
from penstock.topics.ledger import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """Range of steps, and the reaction to a difference."""

    from_step: int = 0
    to_step: int | None = None
    """Last step; None for all."""
    follow: bool = False
    """True to wait for more steps until the run is closed."""
    keep_going: bool = False


@dataclass(slots=True)
class Times:
    """Durations of a replay in seconds."""

    start_s: float = 0.0
    """Until the first step: loading the model and restoring its state."""
    replay_s: float = 0.0
    waited_s: float = 0.0
    """The part of `replay_s` spent waiting for the followed run to commit a step."""

    @property
    def busy_s(self) -> float:
        """`replay_s` without the waiting."""
        return self.replay_s - self.waited_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepToTrain:
    """One step of a replay."""

    number: int
    recorded: Entry | None
    """The ledger entry of this step."""
    members: list[PlanMember]
    """The groups of its plan."""


def replay_steps(
    recording: Recording,
    request: ReplayRequest,
    *,
    times: Times,
    progress: Callable[[], None],
    notify: Notify,
    selection: Selection | None = None,
) -> Generator[StepToTrain, None, None]:
    """Yield the steps of the recorded plans, or of those of `selection`; calls `progress` every few seconds between steps.

    Close the generator to complete the times if iteration stops early.
    """
    start = shown = time.monotonic()
    steps = _recorded(recording, request, times, notify) if selection is None else _selected(recording, request, times, selection)
    try:
        for step in steps:
            yield step
            if time.monotonic() - shown > PROGRESS_S:
                shown = time.monotonic()
                progress()
    finally:
        times.replay_s = time.monotonic() - start


def check_steps(recording: Recording, request: ReplayRequest) -> None:
    """Refuse steps that are not committed, unless the replay follows the run. Raises `ConfigError`, `PenstockError`."""
    count, run = len(recording.steps), recording.run
    if request.to_step is not None and request.to_step < request.from_step:
        raise ConfigError(f"--to-step {request.to_step} is before --from-step {request.from_step}")
    waits = request.follow and not recording.over
    if not waits and not count:
        more = "a what-if that selects its own groups needs none" if recording.over else "--follow waits for some"
        raise PenstockError(f"{run} has no committed step; {more}")
    if request.from_step > count or (not waits and max(request.from_step, request.to_step or 0) >= count):
        raise ConfigError(
            f"{run} has committed steps 0 to {count - 1}" + (" so far; --follow waits for more" if not recording.over else "")
        )


def await_weights(recording: Recording, request: ReplayRequest) -> None:
    """Wait until a followed run has published its initial weights."""
    while request.follow and not recording.over and 0 not in recording.ledger_state.manifests:
        recording.wait()


def _recorded(recording: Recording, request: ReplayRequest, times: Times, notify: Notify) -> Iterator[StepToTrain]:
    """The requested recorded plans; waits for later ones if the replay follows the run."""
    ahead, number, waiting = ReadAhead(recording), request.from_step, False
    try:
        while request.to_step is None or number <= request.to_step:
            if number < len(recording.steps):
                entry = recording.steps[number]
                yield StepToTrain(number=number, recorded=entry, members=ahead.take(entry, last=request.to_step))
                number += 1
            elif not request.follow or recording.over:
                return
            else:
                if not waiting:
                    notify(
                        f"replayed up to step {number - 1}, the newest; waiting for more until {recording.run} is closed (Ctrl-C to stop)"
                    )
                waiting, start = True, time.monotonic()
                recording.wait()
                times.waited_s += time.monotonic() - start
    finally:
        ahead.close()


def _selected(recording: Recording, request: ReplayRequest, times: Times, selection: Selection) -> Iterator[StepToTrain]:
    """The plans of `selection`."""
    planned = PlannedGroups(recording.log, recording.run)
    for number, plan in enumerate(selection.plans()):
        if request.to_step is not None and number > request.to_step:
            return
        times.waited_s = selection.waited_s
        recorded = recording.steps[number] if number < len(recording.steps) else None
        yield StepToTrain(number=number, recorded=recorded, members=planned.read(plan))
