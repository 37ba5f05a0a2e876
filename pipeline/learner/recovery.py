"""How a trainer comes back: the newest good checkpoint, then the committed plans after it once more from the log.

The rule: what is repeated must give the bits that the ledger holds, step by step; anything else stops the run with the numbers.
"""

import time

from penstock.infra import faults
from penstock.infra.errors import Unrecoverable
from penstock.pipeline.learner.fingerprint import arithmetic_of, changed_arithmetic
from penstock.pipeline.learner.ledger_history import Past, read_planned
from penstock.pipeline.learner.policy_trainer import PolicyTrainer
from penstock.pipeline.learner.repeat_step import repeat
from penstock.pipeline.learner.run_writer import RunWriter


def recover(policy: PolicyTrainer, writer: RunWriter, past: Past) -> None:
    """Bring a policy that was just opened to where the ledger ends; returns early when the worker is asked to stop.

    Raises `Unrecoverable` when a repetition differs, `LogError` when the log does not answer.
    """
    steps, reporter, started = past.steps, writer.session.reporter, time.monotonic()
    if not steps:
        return
    if changed := changed_arithmetic(past.story.opened, arithmetic_of(policy.backend, policy.config)):
        text = ", ".join(f"{name} {recorded} -> {now}" for name, (recorded, now) in changed.items())
        reporter.say(f"the arithmetic is not the one the run was opened with: {text}")
    if writer.store is not None:
        state = policy.load_newest(writer.store, past.recorded(), say=reporter.say, doing=lambda text: reporter.doing(text, now=True))
        if state is not None:
            writer.saved_steps = state.steps
            reporter.values.update(step=state.steps, version=state.version)
        policy.release_weights()
    loaded, loading_s = policy.steps_done, time.monotonic() - started
    faults.reach("recovery.loaded")
    for entry in steps[loaded:]:
        if writer.session.stop.is_set():
            return
        reporter.doing(f"repeating step {entry.step} of {len(steps)}")
        reporter.status()
        repetition = repeat(policy, entry, read_planned(writer.session.log, writer.session.run, entry.plan))
        if repetition.differences:
            raise Unrecoverable(
                f"step {entry.step} repeated from the log gave {' and '.join(map(str, repetition.differences))}; "
                "is the arithmetic (versions, threads, device) the same?"
            )
        writer.after_step(policy)
        faults.reach("recovery.repeated")
    took, repeated = time.monotonic() - started, len(steps) - loaded
    reporter.values.update(recovered_from_step=loaded, repeated_steps=repeated, recovery_s=took)
    origin = f"checkpoint of step {loaded} loaded in {loading_s:.1f} s" if loaded else "no checkpoint to start from"
    reporter.say(f"recovered in {took:.1f} s: {origin}, {repeated} of {len(steps)} steps repeated from the log")
