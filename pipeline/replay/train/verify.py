"""`penstock replay train`: the recorded plans trained again from the log alone, every bit compared with the ledger.

The rule: the first difference is reported with everything that led to it; nothing is written anywhere.
"""

import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from penstock.pipeline.learner.policy_trainer import Notify, PolicyTrainer
from penstock.pipeline.learner.repeat_step import Repetition, repeat
from penstock.pipeline.replay.plan_reader import check_kept
from penstock.pipeline.replay.recording import Recording
from penstock.pipeline.replay.restore_policy import Start, arithmetic, bring_to, cross_rebase, opened, weights_of
from penstock.pipeline.replay.train.diff import difference, drift, published_as, published_version
from penstock.pipeline.replay.train.steps import Asked, Times, await_weights, check_steps, replay_steps
from penstock.topics.ledger import Entry


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
    times: Times = field(default_factory=Times)
    compute_s: float = 0.0
    recorded_busy_s: float = 0.0
    whole: bool = False
    """True if every step that was asked for was trained."""

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        start = self.start
        times = self.times
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
                "start_s": times.start_s,
                "replay_s": times.busy_s,
                "waited_s": times.waited_s,
                "compute_s": self.compute_s,
                "recorded_busy_s": self.recorded_busy_s,
                "ratio": times.busy_s / self.recorded_busy_s if self.recorded_busy_s else None,
            },
        }


def replay(recording: Recording, asked: Asked, *, result: Replayed, notify: Notify) -> None:
    """Train the recorded steps again; what is found is in `result`, also when this is interrupted.

    Raises `ConfigError` for steps that are not there, `PenstockError` for those that cannot be read.
    """
    began = time.monotonic()
    check_steps(recording, asked)
    await_weights(recording, asked)
    with opened(recording, recording.config, notify=notify) as policy:
        result.fingerprint = arithmetic(recording, policy)
        tell_arithmetic(result.fingerprint, notify)
        result.start = bring_to(policy, recording, asked.from_step, notify=notify)
        check_kept(recording, recording.steps[policy.steps_done : None if asked.to_step is None else asked.to_step + 1])
        result.times.start_s = time.monotonic() - began
        try:
            _train(policy, recording, asked, result, notify)
        finally:
            result.recorded_busy_s = busy_s(recording, recording.steps[asked.from_step : asked.from_step + result.steps])


def tell_arithmetic(changes: list[dict[str, object]], notify: Notify) -> None:
    """Say which part of the arithmetic differs here, before anything is computed."""
    if changes:
        text = ", ".join(f"{row['name']} {row['recorded']} -> {row['here']}" for row in changes)
        recorded = {str(row["name"]): row["recorded"] for row in changes}
        wider = "cpu_capability" in recorded and f"; ATEN_CPU_CAPABILITY={str(recorded['cpu_capability']).lower()} may compute as there"
        notify(f"the arithmetic is not the one of the run, so bits may differ: {text}{wider or ''}")


def _train(policy: PolicyTrainer, recording: Recording, asked: Asked, result: Replayed, notify: Notify) -> None:
    progress = lambda: notify(_progress(result, recording))  # noqa: E731
    with closing(replay_steps(recording, asked, times=result.times, progress=progress, notify=notify)) as steps:
        for step in steps:
            entry = step.recorded
            assert entry is not None
            cross_rebase(policy, recording, notify=notify)
            altered = [member for member in step.members if member.problem]
            if unreadable := [member for member in altered if member.group is None]:
                result.first = result.first or difference(recording, entry, altered, None)
                notify(f"step {entry.step} cannot be trained: {unreadable[0].problem}")
                return
            repetition = repeat(policy, entry, [member.group for member in step.members if member.group is not None])
            _count(result, recording, entry, repetition)
            if altered or repetition.differences or not published_as(recording, repetition):
                result.first = result.first or difference(recording, entry, altered, repetition)
                if not asked.keep_going:
                    return
            else:
                result.matching += 1
            if result.first is not None and (version := published_version(recording, entry)) is not None:
                away = drift(repetition.weights.tensors, weights_of(recording, version))
                result.drift.append({"step": entry.step or 0, **away})
    result.whole = True


def _count(result: Replayed, recording: Recording, entry: Entry, repetition: Repetition) -> None:
    result.steps += 1
    if entry.digest is not None or published_version(recording, entry) is not None:
        result.digests += 1
        result.digest = repetition.weights.digest
    result.compute_s += repetition.outcome.metrics["compute_s"]


def busy_s(recording: Recording, steps: list[Entry]) -> float:
    """Seconds in which the recorded trainer computed these steps, hashed their weights and published their versions."""
    numbers = {entry.step for entry in steps}
    published = (
        entry.metrics.get("publish_s", 0.0) for entry in recording.entries if entry.kind == "version" and (entry.step or 0) - 1 in numbers
    )
    return sum(entry.metrics.get("compute_s", 0.0) + entry.metrics.get("digest_s", 0.0) for entry in steps) + sum(published)


def _progress(result: Replayed, recording: Recording) -> str:
    done = f"{result.steps} of {recording.planned_steps} steps trained: {result.matching} the same"
    return done + (f", weights {result.drift[-1]['relative']:.2e} away" if result.drift else "")
