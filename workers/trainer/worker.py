"""The trainer: `groups` become optimizer steps, `ledger` entries and new `weights`.

One ledger record commits a step; headers and the schedule's integers decide what it trains. After a restart the committed plans since the
newest checkpoint are trained again from the log and must give the same bits.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from penstock.infra.engines.shared_device import POLL_S as DEVICE_POLL_S
from penstock.infra.engines.shared_device import SharedDevice
from penstock.infra.errors import Diverged, Unrecoverable
from penstock.infra.log import Transactions
from penstock.infra.tensors.stream import HASH, hash_of
from penstock.pipeline.learner.ledger_history import read_ledger_history
from penstock.pipeline.learner.policy_trainer import PolicyTrainer
from penstock.pipeline.learner.train_step import Step, StepOutcome
from penstock.pipeline.runtime.factories import open_device
from penstock.pipeline.runtime.registration.run_registry import set_status
from penstock.pipeline.runtime.reporting.reporter import peak_rss
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.weights.read import fetch
from penstock.pipeline.scheduling import rules
from penstock.pipeline.scheduling.rules import lag_summary
from penstock.topics.groups import Group
from penstock.topics.ledger import ALL_DONE, Planned
from penstock.topics.metrics import Activity
from penstock.workers.trainer.inbox import POLL_S, Arrivals, DropLimit
from penstock.workers.trainer.other_ranks import follow, other_ranks
from penstock.workers.trainer.resuming import OlderNeeded, Resumed, read_resumed, recover, saved_steps
from penstock.workers.trainer.run_writer import RunWriter

if TYPE_CHECKING:
    from penstock.infra.backends.ranks.process_set import ProcessSet

__all__ = ["follow", "main"]

PUBLISHING_POLL_S = 0.02
"""Longest wait for records while a version is being sent."""
LOOK_S = 60.0
"""After waiting this long for groups the trainer checks that workers can read the newest weights."""


def main(session: Session) -> None:
    """Train until the run's steps are done, an evaluator requests the end, or too many groups are dropped."""
    # Fence before reading: no write of an earlier trainer can follow the records read now.
    transactions = session.transactions()
    resumed = read_resumed(session.log, session.run, saved=saved_steps(session))
    past = resumed.past
    if past.ledger_state.closed is not None:
        session.reporter.notify("nothing to train: the run has already ended")
        set_status(session.log, session.record, status=past.ended)  # the trainer that closed it may have crashed before setting it
        return
    device = open_device(session.config, session.run)
    with contextlib.ExitStack() as ends:
        if device is not None:
            ends.callback(device.close)
            session.reporter.doing(Activity.NO_DEVICE, "waiting for the device", now=True)
            if not device.wait(session.stop, meanwhile=session.reporter.status):
                return
        session.reporter.doing(Activity.START, "loading the model", now=True)
        trainer = Trainer.open(session, transactions, resumed, ends.enter_context(other_ranks(session)), device)
        session.reporter.values["stale_groups"] = 0.0
        session.ready(finishing=trainer.finishing, outage=lambda: trainer.arrivals.tail.outage_s)
        set_status(session.log, session.record, status="running")
        trainer.start(resumed)
        try:
            while trainer.policy.steps_done < session.steps and trainer.arrivals.end_reason is None and not session.stop.is_set():
                if not trainer.train_step():
                    break
            trainer.end()
        except Diverged as error:
            raise Diverged(f"{error}: {trainer.way_back()}") from error
        if device is not None and device.owned:
            device.release()  # the process may take a while to end, and a rollout worker has evaluations left


@dataclass(slots=True)
class Trainer:
    """Selects groups, trains on them and commits the steps."""

    session: Session
    policy: PolicyTrainer
    writer: RunWriter
    arrivals: Arrivals
    drops: DropLimit
    committed: int = 0
    """Steps in the ledger; exceeds the steps of the policy only while they are repeated."""
    _waited_s: float = 0.0
    """Seconds waited before this step."""
    _look_s: float = 0.0
    """After waiting this long within one step the newest weights are checked."""
    _compute_s: float | None = None
    """Computing time of the newest step."""
    device: SharedDevice | None = None
    """Shared with a rollout worker; None if the trainer has a device of its own."""

    @classmethod
    def open(
        cls,
        session: Session,
        transactions: Transactions,
        resumed: Resumed,
        processes: "ProcessSet | None" = None,
        device: SharedDevice | None = None,
    ) -> "Trainer":
        """Load the model and start to follow the groups; on a shared device the model moves off while others use it."""
        past, manifests = resumed.past, resumed.past.ledger_state.manifests
        policy = PolicyTrainer.open(
            session.config,
            steps=session.steps,
            weights_of=lambda version: fetch(session.log, manifests, version, run=session.run),
            processes=processes,
            hash_name=hash_of(manifests[0].digest) if 0 in manifests else HASH,
        )
        writer = RunWriter(session, transactions, past.ledger_state)
        arrivals = Arrivals.open(session, writer, resumed)
        trainer = cls(session, policy, writer, arrivals, DropLimit(arrivals.inbox), device=device)
        if device is not None:
            device.model = policy
        return trainer

    def start(self, resumed: Resumed) -> None:
        """Open the run with version 0, or recover the state at the end of the ledger."""
        self._settle(resumed)
        self.writer.open_run(self.policy)
        try:
            recover(self.policy, self.writer, resumed.past)
        except OlderNeeded as error:
            self.session.reporter.notify(f"{error}: reading the ledger from its start")
            resumed = Resumed(past=read_ledger_history(self.session.log, self.session.run))
            self.writer.state.manifests.update(resumed.past.ledger_state.manifests)
            self.arrivals.start_over()
            self._settle(resumed)
            recover(self.policy, self.writer, resumed.past)
        if resumed.past.entries:
            self.session.reporter.doing(Activity.START, "reading the existing groups")
            self.arrivals.catch_up()
            self.drops.tolerate()

    def _settle(self, resumed: Resumed) -> None:
        """Restore the trained and dropped groups and the number of committed steps."""
        self.arrivals.settle(resumed)
        past, resume = resumed.past, resumed.resume_point
        self.drops.at_last_step, self.committed = past.drops if resume is None else resume.dropped, past.steps_done

    def train_step(self) -> bool:
        """Run one optimizer step: select fresh groups, run each micro-batch backward as it fills, update, commit, publish weights.

        Returns False if a stop was requested, or the prompts ended, first. A shared device is acquired once all groups have arrived: the
        generating worker never waits for a step that waits for it.
        """
        schedule, number, started = self.session.schedule, self.policy.steps_done, time.time()
        version = rules.version_after(number, steps_per_version=schedule.steps_per_version)
        self._waited_s, self._look_s = self.session.reporter.waited_s(), LOOK_S
        if not self._round_is_ready():
            return False
        plan, held = list[Planned](), deque[tuple[Group, Planned]]()
        step = self._start_step(plan, held) if self.device is None else None
        while len(plan) < schedule.prompts_per_step:
            selected = self.arrivals.inbox.take(learner_version=version)
            self._record_stale()
            if selected is None:
                if self.arrivals.no_more:
                    if not number:
                        self._stop_run(self.drops.without_a_step(requested=self.arrivals.inbox.selector.finished_groups))
                    self.arrivals.end_reason = "every prompt of the run's epochs was used"
                    return False
                if not self._wait(f"step {number}: {len(plan)} of {schedule.prompts_per_step} groups are here"):
                    return False
                continue
            self.writer.finish_pending(wait=False)
            candidate, group = selected
            plan.append(candidate.planned)
            held.append((group, plan[-1]))
            if self.device is not None and len(plan) < schedule.prompts_per_step:
                continue
            if not self._has_device():
                return False
            step = step or self._start_step(plan, held)
            while held:
                self.session.reporter.doing(
                    Activity.COMPUTE, f"training step {number}, group {len(plan) - len(held) + 1} of {schedule.prompts_per_step}"
                )
                step.add(*held.popleft())
        assert step is not None
        self.writer.finish_pending(wait=False)
        outcome = step.finish(learner_version=version)
        self.writer.finish_publishing()  # a step is never committed before the version that the last one completed
        self._commit(outcome, plan, version=version, started=started)
        self.policy.steps_done += 1
        self.writer.after_step(self.policy)
        self.session.reporter.status()
        return True

    def _start_step(self, plan: Sequence[Planned], held: Sequence[tuple[Group, Planned]]) -> Step:
        """Start the step that trains on the groups of `plan`; those in `held` have already arrived."""
        step = self.policy.step()
        step.on_batch = lambda batch, count: self._report_batch(step.number, batch, count, groups=len(plan) - len(held))
        return step

    def _has_device(self) -> bool:
        """Acquire the device if it is shared; False if a stop is requested before that."""
        while self.device is not None and not self.device.acquire():
            if not self._wait("waiting for the device", Activity.NO_DEVICE):
                self.device.leave_queue()
                return False
        return True

    def _report_batch(self, step: int, batch: int, count: int | None, *, groups: int) -> None:
        """Report the current micro-batch, at once if micro-batches take long, because no other report follows meanwhile."""
        about = max(batch, round(batch * self.session.schedule.prompts_per_step / groups))
        of = f"of {count}" if count is not None else f"of ~{about}"
        slow = self._compute_s is None or self._compute_s > 1.0
        self.session.reporter.doing(Activity.COMPUTE, f"training step {step}, micro-batch {batch} {of}", now=slow)

    def end(self) -> None:
        """Close the run, or after a stop request write a checkpoint, so that resuming is fast."""
        session, done = self.session, self.policy.steps_done
        if session.stop.is_set() and done < session.steps and self.arrivals.end_reason is None:
            if done == self.committed > 0:
                self.writer.checkpoint(self.policy)
            self.writer.stop()
            session.reporter.notify(f"stopped after {self.committed} steps; the run can be resumed")
            return
        self.writer.finish_pending()
        self.writer.export(self.policy)
        reason = self.arrivals.end_reason
        if reason is not None:
            selector = self.arrivals.inbox.selector
            unused = selector.finished_groups - selector.drops - self.committed * session.schedule.prompts_per_step
            reason += f"; {unused} scored groups are unused, because a step needs {session.schedule.prompts_per_step}" if unused > 0 else ""
            session.reporter.notify(f"the run ends after {done} of {session.steps} steps: {reason}")
        self.writer.close_run(steps=done, status="finished", reason=reason or ALL_DONE, evaluations=self.arrivals.evaluations)
        set_status(session.log, session.record, status="finished")

    def way_back(self) -> str:
        """Advice for a run that has diverged: fork it from the newest published version, whose weights are finite."""
        run, lr = self.session.run, self.session.config.trainer.lr
        good = max(self.writer.state.manifests.values(), key=lambda manifest: manifest.version).step
        fork = f"penstock fork {run} --from-step {good} --set trainer.lr={lr / 10:g} --start"
        return f"inspect the samples of step {self.policy.steps_done}, or continue from step {good} with a lower learning rate: {fork}"

    def finishing(self) -> str:
        """Describe the remaining work after a stop request, and how long it takes, as text for the user."""
        saving_s = self.session.reporter.values.get("checkpoint_s")
        text = f"finishes step {self.policy.steps_done} if all its groups have arrived{_about(self._compute_s)}, otherwise drops it"
        return text if self.writer.checkpoints.store is None else f"{text}; then writes a checkpoint{_about(saving_s)}"

    def _round_is_ready(self) -> bool:
        """Under `starts_on = "round"`, wait at a round's start until all its groups are scored; False if the run ends first."""
        schedule, done = self.session.schedule, self.policy.steps_done
        if schedule.starts_on == "groups" or done % schedule.steps_per_version:
            return True
        left = (self.session.steps - done) * schedule.prompts_per_step
        while not self.arrivals.inbox.selector.ready(min(schedule.round_groups, left)):
            if self.arrivals.no_more:
                break
            if not self._wait(f"step {done}: the round is not scored yet"):
                return False
        return True

    def _wait(self, why: str, activity: Activity = Activity.NO_GROUP) -> bool:
        """Wait briefly for records and apply them; False if the step must end: on a stop request, or if the run ends.

        `why` and `activity` are reported. Raises `Unrecoverable` if too many groups are dropped.
        """
        reporter, device = self.session.reporter, self.device
        reporter.doing(activity, why)
        self.writer.finish_pending(wait=False)
        soon = PUBLISHING_POLL_S if self.writer.publishing else POLL_S if device is None else DEVICE_POLL_S
        arrived = self.arrivals.take_in(soon)
        if device is not None and device.owned and device.contended and not arrived:  # records that arrived may complete a step
            reporter.doing(Activity.NO_DEVICE, "releasing the device", now=True)
            device.release()
        waited = reporter.waited_s() - self._waited_s
        if waited > self._look_s:
            self._look_s = 2 * waited
            self.writer.repair_newest()
        if (passed := self.drops.passed(steps_done=self.policy.steps_done)) is not None:
            reason, solved = passed
            if not solved:  # an error, so that the run can be resumed once its cause is corrected
                self._stop_run(reason)
            self.arrivals.end_reason = reason
        reporter.status()
        return not self.session.stop.is_set() and self.arrivals.end_reason is None

    def _record_stale(self) -> None:
        """Commit the groups that have become stale since the last call to the ledger, and count them as dropped."""
        stale = self.arrivals.inbox.selector.newly_stale
        if stale:
            groups = tuple(candidate.group for candidate in stale)
            self.writer.write("stale", step=self.policy.steps_done, groups=groups)
            self.arrivals.inbox.drop_causes["stale"] += len(stale)
            self.session.reporter.add("stale_groups", len(stale))
            stale.clear()

    def _stop_run(self, reason: str) -> NoReturn:
        """Register the run as stopped, and raise `Unrecoverable`, so that an operator can resume it."""
        set_status(self.session.log, self.session.record, status="stopped")
        raise Unrecoverable(reason)

    def _commit(self, outcome: StepOutcome, plan: Sequence[Planned], *, version: int, started: float) -> None:
        """Commit the step to the ledger: the plan of its groups, its exact numbers, metrics and the resume point."""
        lags = [version - oldest for oldest in self.arrivals.inbox.selector.queued()]
        measured = {**outcome.metrics, "started_at": started, "dropped": float(self.drops.since_last_step)}
        measured["wait_s"] = self.session.reporter.waited_s() - self._waited_s
        measured["peak_rss_bytes"] = peak_rss()
        measured |= {"queued_groups": float(len(lags)), **{f"queued_{name}": value for name, value in lag_summary(lags).items()}}
        hashing = time.monotonic()
        digest = self.writer.step_digest(self.policy)
        measured["digest_s"] = time.monotonic() - hashing
        self.writer.write(
            "step", step=self.policy.steps_done, version=version, plan=tuple(plan), boundaries=outcome.boundaries,
            loss_bits=outcome.loss_bits, grad_norm_bits=outcome.grad_norm_bits, digest=digest, metrics=measured,
            details=self.arrivals.resume_point().to_json(evaluations=self.arrivals.evaluations),
        )  # fmt: skip
        self.arrivals.list_evaluations()
        self.committed += 1
        self.arrivals.offsets.steps[self.committed] = self.writer.newest_offset
        self.drops.committed()
        self._compute_s = outcome.metrics["compute_s"]
        self.session.reporter.add("compute_s", self._compute_s)


def _about(seconds: float | None) -> str:
    """A duration that was measured before, as text such as ` (about 4 s)`; empty if unknown."""
    return "" if seconds is None else f" (about {math.ceil(seconds)} s)"
