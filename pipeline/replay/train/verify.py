"""`penstock replay train`: the recorded plans trained again from the log alone, every bit compared with the ledger.

The rule: the first difference is told with all that is known of it; nothing is written anywhere.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock.infra.errors import PenstockError
from penstock.pipeline.config.load import ConfigError
from penstock.pipeline.learner.policy_trainer import PolicyTrainer, Say
from penstock.pipeline.learner.repeat_step import Repetition, repeat
from penstock.pipeline.replay.plan_reader import ReadAhead, check_kept
from penstock.pipeline.replay.recording import Recording
from penstock.pipeline.replay.restore_policy import PROGRESS_S, Start, arithmetic, bring_to, opened, weights_of
from penstock.pipeline.replay.train import differing
from penstock.pipeline.replay.train.first_difference import difference, published_as, published_version
from penstock.topics.ledger import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Which steps, and what to do at a difference."""

    from_step: int = 0
    to_step: int | None = None
    """The last one; None for all there are."""
    follow: bool = False
    """Whether to wait for more until the run is closed."""
    keep_going: bool = False


@dataclass(slots=True)
class Replayed:
    """What a replay found, so far."""

    run: str
    fingerprint: list[dict[str, object]] = field(default_factory=list)
    start: Start | None = None
    steps: int = 0
    matching: int = 0
    digests: int = 0
    """Steps whose weights digest the ledger has and that was compared."""
    first: dict[str, Any] | None = None
    drift: list[dict[str, float]] = field(default_factory=list)
    digest: str | None = None
    start_s: float = 0.0
    replay_s: float = 0.0
    waited_s: float = 0.0
    compute_s: float = 0.0
    recorded_busy_s: float = 0.0
    whole: bool = False
    """Whether all that was asked for was trained."""

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        start = self.start
        busy_s = self.replay_s - self.waited_s
        return {
            "run": self.run,
            "kind": "exact",
            "steps": self.steps,
            "matching_steps": self.matching,
            "first_difference": self.first,
            "whole": self.whole,
            "digests_compared": self.digests,
            "digest": self.digest,
            "fingerprint": self.fingerprint,
            "start": start and {"step": start.step, "checkpoint": start.checkpoint, "repeated": start.repeated},
            "drift": self.drift,
            "times": {
                "start_s": self.start_s,
                "replay_s": busy_s,
                "waited_s": self.waited_s,
                "compute_s": self.compute_s,
                "recorded_busy_s": self.recorded_busy_s,
                "ratio": busy_s / self.recorded_busy_s if self.recorded_busy_s else None,
            },
        }


def replay(recording: Recording, asked: Asked, *, result: Replayed, say: Say) -> None:
    """Train the recorded steps again; what is found is in `result`, also when this is interrupted.

    Raises `ConfigError` for steps that are not there, `PenstockError` for those that cannot be read.
    """
    began = time.monotonic()
    check_steps(recording, asked)
    await_weights(recording, asked)
    with opened(recording, recording.config, say=say) as course:
        result.fingerprint = arithmetic(recording, course)
        tell_arithmetic(result.fingerprint, say)
        result.start = bring_to(course, recording, asked.from_step, say=say)
        ahead = ReadAhead(recording)
        try:
            check_kept(recording, recording.steps[course.steps_done : None if asked.to_step is None else asked.to_step + 1])
            result.start_s = time.monotonic() - began
            _train(course, recording, asked, ahead, result, say)
        finally:
            ahead.close()


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
    while asked.follow and not recording.over and 0 not in recording.story.manifests:
        recording.wait()


def tell_arithmetic(found: list[dict[str, object]], say: Say) -> None:
    """Say what is different here before anything is computed."""
    if found:
        told = ", ".join(f"{row['name']} {row['recorded']} -> {row['here']}" for row in found)
        say(f"the arithmetic is not the one of the run, so bits may differ: {told}")


def recorded_steps(recording: Recording, asked: Asked, waited: list[float], say: Say) -> Iterator[Entry]:
    """The recorded steps from the first to the last asked for, waiting for those to come if wanted; adds the seconds it waited."""
    step = asked.from_step
    while asked.to_step is None or step <= asked.to_step:
        if step < len(recording.steps):
            yield recording.steps[step]
            step += 1
        elif not asked.follow or recording.over:
            return
        else:
            if not waited[0]:
                say(f"up to the newest committed step, {step - 1}; waiting for more until {recording.run} is closed (Ctrl-C ends it)")
            began = time.monotonic()
            recording.wait()
            waited[0] += time.monotonic() - began


def _train(course: PolicyTrainer, recording: Recording, asked: Asked, ahead: ReadAhead, result: Replayed, say: Say) -> None:
    began = told = time.monotonic()
    waited = [0.0]
    try:
        for entry in recorded_steps(recording, asked, waited, say):
            found = ahead.take(entry, last=asked.to_step)
            altered = [one for one in found if one.problem]
            if altered and (unreadable := [one for one in altered if one.group is None]):
                result.first = result.first or difference(recording, entry, altered, None)
                say(f"step {entry.step} cannot be trained: {unreadable[0].problem}")
                return
            repetition = repeat(course, entry, [one.group for one in found if one.group is not None])
            _count(result, recording, entry, repetition)
            differs = bool(altered or repetition.differences or not published_as(recording, repetition))
            result.matching += not differs
            if differs and result.first is None:
                result.first = difference(recording, entry, altered, repetition)
                if not asked.keep_going:
                    return
            if result.first is not None and (version := published_version(recording, entry)) is not None:
                result.drift.append(
                    {"step": entry.step or 0, **differing.drift(repetition.weights.tensors, weights_of(recording, version))}
                )
            if time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                say(_progress(result, recording, entry))
        result.whole = True
    finally:
        result.replay_s, result.waited_s = time.monotonic() - began, waited[0]
        result.recorded_busy_s = busy_s(recording, recording.steps[asked.from_step : asked.from_step + result.steps])


def _count(result: Replayed, recording: Recording, entry: Entry, repetition: Repetition) -> None:
    result.steps += 1
    result.digests += entry.digest is not None or published_version(recording, entry) is not None
    if entry.digest is not None or published_version(recording, entry) is not None:
        result.digest = repetition.weights.digest
    result.compute_s += repetition.outcome.metrics["compute_s"]


def busy_s(recording: Recording, steps: list[Entry]) -> float:
    """Seconds in which the recorded trainer computed these steps, hashed their weights and published their versions."""
    numbers = {entry.step for entry in steps}
    published = (
        entry.metrics.get("publish_s", 0.0) for entry in recording.entries if entry.kind == "version" and (entry.step or 0) - 1 in numbers
    )
    return sum(entry.metrics.get("compute_s", 0.0) + entry.metrics.get("digest_s", 0.0) for entry in steps) + sum(published)


def _progress(result: Replayed, recording: Recording, entry: Entry) -> str:
    told = f"step {entry.step} of {recording.planned_steps}: {result.matching} of {result.steps} the same"
    return told + (f", weights {result.drift[-1]['relative']:.2e} away" if result.drift else "")
