"""The steps of a replay: the recorded plans with their groups, or plans made anew, one after the other.

The rule: the plan of the next step is read while one is trained, and time spent waiting for a run to go on is counted apart.
"""

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from penstock.infra.errors import ConfigError, PenstockError
from penstock.pipeline.learner.policy_trainer import Notify
from penstock.pipeline.replay.plan_reader import Found, PlannedGroups, ReadAhead
from penstock.pipeline.replay.recording import Recording
from penstock.pipeline.replay.restore_policy import PROGRESS_S
from penstock.pipeline.replay.train.reselect import Selection
from penstock.topics.ledger import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Which steps, and what to do at a difference."""

    from_step: int = 0
    to_step: int | None = None
    """The last one; None for all there are."""
    follow: bool = False
    """True to wait for more steps until the run is closed."""
    keep_going: bool = False


@dataclass(slots=True)
class Times:
    """[s] How long a replay took."""

    start_s: float = 0.0
    """Until the first step: loading the model and getting to where it begins."""
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
    """The step of this number as the ledger has it."""
    members: list[Found]
    """The groups of its plan."""


def replay_steps(
    recording: Recording, asked: Asked, *, times: Times, progress: Callable[[], None], notify: Notify, selection: Selection | None = None
) -> Generator[StepToTrain, None, None]:
    """Step after step, of the recorded plans or of those that `selection` makes; `progress` is called every few seconds between two.

    Close it where it is left early: the times are complete then.
    """
    began = shown = time.monotonic()
    steps = _recorded(recording, asked, times, notify) if selection is None else _selected(recording, asked, times, selection)
    try:
        for step in steps:
            yield step
            if time.monotonic() - shown > PROGRESS_S:
                shown = time.monotonic()
                progress()
    finally:
        times.replay_s = time.monotonic() - began


def check_steps(recording: Recording, asked: Asked) -> None:
    """Refuse steps that are not committed, unless they are to be waited for. Raises `ConfigError`, `PenstockError`."""
    count, run = len(recording.steps), recording.run
    if asked.to_step is not None and asked.to_step < asked.from_step:
        raise ConfigError(f"--to-step {asked.to_step} is before --from-step {asked.from_step}")
    waits = asked.follow and not recording.over
    if not waits and not count:
        more = "changes to a what-if that select groups anew need none" if recording.over else "--follow waits for some"
        raise PenstockError(f"{run} has no committed step; {more}")
    if asked.from_step > count or (not waits and max(asked.from_step, asked.to_step or 0) >= count):
        raise ConfigError(
            f"{run} has committed steps 0 to {count - 1}" + (" so far; --follow waits for more" if not recording.over else "")
        )


def await_weights(recording: Recording, asked: Asked) -> None:
    """Wait until a run that is to be followed has published the weights it begins with."""
    while asked.follow and not recording.over and 0 not in recording.ledger_state.manifests:
        recording.wait()


def _recorded(recording: Recording, asked: Asked, times: Times, notify: Notify) -> Iterator[StepToTrain]:
    """The recorded plans from the first to the last asked for; those to come are waited for if wanted."""
    ahead, number, waiting = ReadAhead(recording), asked.from_step, False
    try:
        while asked.to_step is None or number <= asked.to_step:
            if number < len(recording.steps):
                entry = recording.steps[number]
                yield StepToTrain(number=number, recorded=entry, members=ahead.take(entry, last=asked.to_step))
                number += 1
            elif not asked.follow or recording.over:
                return
            else:
                if not waiting:
                    notify(
                        f"up to the newest committed step, {number - 1}; waiting for more until {recording.run} is closed (Ctrl-C ends it)"
                    )
                waiting, began = True, time.monotonic()
                recording.wait()
                times.waited_s += time.monotonic() - began
    finally:
        ahead.close()


def _selected(recording: Recording, asked: Asked, times: Times, selection: Selection) -> Iterator[StepToTrain]:
    """Plans that are made anew."""
    planned = PlannedGroups(recording.log, recording.run)
    for number, plan in enumerate(selection.plans()):
        if asked.to_step is not None and number > asked.to_step:
            return
        times.waited_s = selection.waited_s
        recorded = recording.steps[number] if number < len(recording.steps) else None
        yield StepToTrain(number=number, recorded=recorded, members=planned.read(plan))
