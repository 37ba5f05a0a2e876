"""How a trainer comes back: the newest good checkpoint, then the committed plans after it once more from the log.

The rule: what is repeated must give the bits that the ledger holds, step by step; anything else stops the run with the numbers.
"""

import json
import time
from collections.abc import Mapping
from typing import Any

from penstock.infra import faults
from penstock.infra.errors import Unrecoverable
from penstock.pipeline.learner import policy_trainer
from penstock.pipeline.learner.ledger_history import Past, read_planned
from penstock.pipeline.learner.run_writer import Training, arithmetic_of
from penstock.topics.ledger import Entry


def recover(training: Training, past: Past) -> None:
    """Bring a just opened `training` to where the ledger ends; returns early when the worker is asked to stop.

    Raises `Unrecoverable` when a repetition differs, `LogError` when the log does not answer.
    """
    session, started = training.session, time.monotonic()
    steps = past.steps
    if not steps:
        return
    if changed := other_arithmetic(past, arithmetic_of(training.backend, session.config)):
        told = ", ".join(f"{name} {before} -> {now}" for name, (before, now) in changed.items())
        session.say(f"the arithmetic is not the one the run was opened with: {told}")
    load_newest(training, past)
    loaded, loading_s = training.steps_done, time.monotonic() - started
    faults.reach("recovery.loaded")
    for entry in steps[loaded:]:
        if session.stop.is_set():
            return
        session.doing(f"repeating step {entry.step} of {len(steps)}")
        session.status()
        repeat(training, entry)
        faults.reach("recovery.repeated")
    took, repeated = time.monotonic() - started, len(steps) - loaded
    session.values.update(recovered_from_step=loaded, repeated_steps=repeated, recovery_s=took)
    origin = f"checkpoint of step {loaded} loaded in {loading_s:.1f} s" if loaded else "no checkpoint to start from"
    session.say(f"recovered in {took:.1f} s: {origin}, {repeated} of {len(steps)} steps repeated from the log")


def load_newest(training: Training, past: Past) -> None:
    """Load the newest checkpoint that can be used; without one nothing changes."""
    session, store = training.session, training.store
    if store is None:
        return
    state = policy_trainer.load_newest(
        training.course, store, past.recorded(), say=session.say, doing=lambda text: session.doing(text, now=True)
    )
    if state is not None:
        training.saved = state.steps
        training.digest = training.chronicle.story.manifests[state.version].digest
        session.values.update(step=state.steps, version=state.version)
    training.course.let_go()


def repeat(training: Training, entry: Entry) -> None:
    """Train a committed plan again from the log and compare its bits with the ledger's."""
    repetition = policy_trainer.repeat(training.course, entry, read_planned(training.session.log, training.session.run, entry.plan))
    if repetition.differences:
        raise Unrecoverable(
            f"step {entry.step} repeated from the log gave {' and '.join(map(str, repetition.differences))}; "
            "is the arithmetic (versions, threads, device) the same?"
        )
    training.follow_up()


def other_arithmetic(past: Past, now: Mapping[str, str | int]) -> dict[str, tuple[Any, Any]]:
    """What the last bits depend on and is not as it was when the run was opened: name -> (then, now)."""
    opened = past.story.opened
    before: Mapping[str, Any] = json.loads((opened.details if opened else None) or "{}").get("fingerprint", {})
    return {name: (before[name], now.get(name)) for name in before if before[name] != now.get(name)}
