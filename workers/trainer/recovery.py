"""Recovers a trainer's policy: loads the newest usable checkpoint and repeats the committed steps after it from the log.

A repeated step must give the bits of the ledger. Any difference stops the run, or under `trainer.on_mismatch = "rebase"` is recorded
with both values, and the run continues from the repeated weights.
"""

import time
from functools import partial

from penstock.infra import faults
from penstock.infra.errors import RecordMissing, Unrecoverable
from penstock.pipeline.learner.fingerprint import arithmetic_of, changed_arithmetic, rebases
from penstock.pipeline.learner.ledger_history import LedgerHistory, read_planned
from penstock.pipeline.learner.policy_trainer import PolicyTrainer
from penstock.pipeline.learner.repeat_step import Difference, Repetition, other_weights, repeat
from penstock.topics.groups import Group
from penstock.topics.ledger import Entry
from penstock.topics.metrics import Activity
from penstock.workers.trainer.run_writer import RunWriter


class OlderNeeded(Exception):
    """No checkpoint within the ledger's read entries can be used: the full ledger has to be read."""


def recover(policy: PolicyTrainer, writer: RunWriter, past: LedgerHistory) -> None:
    """Bring a new policy to the last step of the ledger; returns early if the worker is stopped.

    Raises `Unrecoverable` if a repeated step differs and the run does not rebase, `LogError` if the log cannot be read, and
    `OlderNeeded` if `past` starts too late.
    """
    done, reporter, started = past.steps_done, writer.session.reporter, time.monotonic()
    if not done:
        return
    now = arithmetic_of(policy.backend, policy.config)
    if changed := changed_arithmetic(past.entries, now):
        text = ", ".join(f"{name} {recorded} -> {here}" for name, (recorded, here) in changed.items())
        reporter.notify(f"the arithmetic is not the one the run was computed with: {text}")
    if (store := writer.checkpoints.store) is not None:
        at_most = writer.lost.step if writer.lost is not None else None  # a lost version is sent again at its own step
        doing = partial(reporter.doing, Activity.START, now=True)
        state = policy.load_newest(store, past.recorded(), notify=reporter.notify, doing=doing, at_most=at_most)
        if state is not None:
            writer.checkpoints.saved_steps = state.steps
            reporter.values.update(step=state.steps, version=state.version)
            if writer.lost is not None and writer.lost.step == state.steps:
                writer.publish(policy.weights(), version=writer.lost.version, step=state.steps)
        policy.release_weights()
    loaded, loading_s = policy.steps_done, time.monotonic() - started
    if loaded < past.first_step:
        raise OlderNeeded(f"the steps before step {past.first_step} have to be repeated")
    faults.reach("recovery.loaded")
    differences = _repeat(policy, writer, past.steps[loaded - past.first_step :], stop=not rebases(policy.config, changed, now))
    if policy.steps_done < done:
        return
    if differences or changed:
        writer.rebase(policy, differences=differences, changed=changed, fingerprint=now)
    took, repeated = time.monotonic() - started, done - loaded
    reporter.values.update(recovered_from_step=loaded, repeated_steps=repeated, recovery_s=took)
    origin = f"checkpoint of step {loaded} loaded in {loading_s:.1f} s" if loaded else "no checkpoint to start from"
    reporter.notify(f"recovered in {took:.1f} s: {origin}, {repeated} of {done} steps repeated from the log")


def _repeat(policy: PolicyTrainer, writer: RunWriter, steps: list[Entry], *, stop: bool) -> list[tuple[Entry, Difference]]:
    """Repeat these steps; returns all differences, or with `stop` raises `Unrecoverable` at the first one."""
    reporter, mismatches = writer.session.reporter, list[tuple[Entry, Difference]]()
    for entry in steps:
        if writer.session.stop.is_set():
            break
        reporter.doing(Activity.START, f"repeating step {entry.step} of {writer.state.steps}")
        reporter.status()
        repetition = repeat(policy, entry, _groups_of(entry, writer))
        differences = _all_differences(policy, writer, repetition)
        if differences and stop:
            command = f"penstock run --resume {writer.session.run} --set trainer.on_mismatch=rebase"
            raise Unrecoverable(
                f"step {entry.step} repeated from the log gave {' and '.join(map(str, differences))}. Restore the arithmetic "
                f"(package versions, threads, device), or continue with the difference recorded: {command}"
            )
        mismatches += [(entry, difference) for difference in differences]
        if not mismatches:
            writer.after_step(policy)
        policy.release_weights()
        faults.reach("recovery.repeated")
    return mismatches


def _groups_of(entry: Entry, writer: RunWriter) -> list[Group]:
    session = writer.session
    try:
        return read_planned(session.log, session.run, entry.plan)
    except RecordMissing as error:
        raise Unrecoverable(
            f"step {entry.step} has to be repeated, as no checkpoint after it can be read here, and its groups are not in the log any "
            f"more ({error}): restore the run's checkpoints, or continue from a published version: penstock fork {session.run}"
        ) from error


def _all_differences(policy: PolicyTrainer, writer: RunWriter, repetition: Repetition) -> list[Difference]:
    """Differences from the ledger and, for a model whose steps have no digest, from the version published after the step."""
    published, differences, done = writer.state.manifests.get(policy.version), list(repetition.differences), policy.steps_done
    unchecked = repetition.entry.digest is None and published is not None and published.step == done
    if unchecked and published is not None and (here := repetition.weights.digest) != published.digest:
        differences.append(other_weights(here, published.digest))
    return differences
