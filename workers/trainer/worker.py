"""The trainer: `groups` become optimizer steps, `ledger` entries and new `weights`.

The rule: one ledger record commits a step; what it trains is decided by headers and the schedule's integers; after a restart the
committed plans since the newest checkpoint are trained again from the log and must give the same bits.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.infra.errors import PenstockError
from penstock.infra.log import Partition, Start, Tail
from penstock.pipeline.learner.chronicle import Chronicle
from penstock.pipeline.learner.ledger_history import Past, read_past
from penstock.pipeline.learner.recovery import recover
from penstock.pipeline.learner.run_writer import Training
from penstock.pipeline.learner.train_step import StepOutcome
from penstock.pipeline.runtime.run_registry import mark
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.scheduling import schedule as rules
from penstock.pipeline.scheduling.staleness import lag_summary
from penstock.topics import metrics
from penstock.topics.ledger import Planned
from penstock.topics.runs import Status
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record
from penstock.workers.trainer.group_inbox import Arrivals

POLL_S = 0.5


def main(session: Session) -> None:
    """Train until the run's steps are done, an evaluator asks for the end, or too many groups are dropped."""
    # Fence first, read afterwards: nothing an earlier trainer still had in hand can follow what is read now.
    transactions = session.log.transactions(f"{session.run}.trainer")
    past = read_past(session.log, session.run)
    if past.story.closed is not None:
        session.say("the run is closed already")
        mark(session.log, session.record, status=past.ended)  # whoever closed it may have died before it said so
        return
    session.doing("loading the model", now=True)
    trainer = Trainer.open(session, Chronicle(session, transactions, past.story, weight_partitions=chunk_partitions(session)))
    session.ready()
    mark(session.log, session.record, status="running")
    trainer.begin(past)
    while trainer.training.steps_done < session.steps and trainer.asked_to_end is None and not session.stop.is_set():
        if not trainer.train_step():
            break
    trainer.end()


def chunk_partitions(session: Session) -> int:
    """How many partitions of `weights` carry chunks."""
    return (session.log.partitions(session.topic("weights")) or 2) - 1


@dataclass(slots=True)
class Trainer:
    """The trainer's state between two steps."""

    session: Session
    training: Training
    arrivals: Arrivals
    tail: Tail
    follows: Sequence[Partition]
    asked_to_end: str | None = None
    committed: int = 0
    """Steps in the ledger; more than `training` has done only while they are repeated."""
    _drops: int = 0
    """Dropped groups when the last step was committed."""
    _wait_s: float = 0.0

    @classmethod
    def open(cls, session: Session, chronicle: Chronicle) -> "Trainer":
        """Load the model and begin to follow the groups."""
        follow: dict[tuple[str, int], Start] = {(session.topic("groups"), p): "earliest" for p in range(session.config.partitions)}
        follow[session.topic("weights"), 0] = "earliest"
        if session.config.eval.target is not None or session.config.eval.patience is not None:
            follow[session.topic("metrics"), 0] = "earliest"
        training = Training.open(session, chronicle)
        return cls(session, training, Arrivals(session, session.rules), session.log.tail(follow), list(follow))

    def begin(self, past: Past) -> None:
        """Open the run with version 0, or go back to where the ledger ends."""
        selector = self.arrivals.selector
        selector.settle([*past.stale, *past.trained])
        selector.drops = self.arrivals.rewards_of_dropped["stale"] = len(past.stale)
        self._drops, self.committed = past.drops, len(past.steps)
        self.training.begin()
        recover(self.training, past)
        if past.steps:
            self._catch_up()

    def train_step(self) -> bool:
        """One step: plan it, run it backward as its groups come, commit it, publish; False when the worker was stopped meanwhile."""
        session, training, started = self.session, self.training, time.time()
        version = rules.version_after(training.steps_done, steps_per_version=session.rules.steps_per_version)
        self._wait_s = 0.0
        if not self._round_is_ready():
            return False
        step, plan = training.step(), list[Planned]()
        while len(plan) < session.rules.prompts_per_step:
            found = self.arrivals.take(learner_version=version)
            self._record_stale()
            if found is None:
                if not self._wait(f"step {training.steps_done}: {len(plan)} of {session.rules.prompts_per_step} groups are here"):
                    return False
                continue
            candidate, group = found
            plan.append(Planned(group=candidate.group, sha256=candidate.sha256, partition=candidate.partition, offset=candidate.offset))
            session.doing(f"training step {training.steps_done}")
            step.add(group)
        outcome = step.finish(learner_version=version)
        self._commit(outcome, plan, version=version, started=started)
        training.advance()
        session.status()
        return True

    def end(self) -> None:
        """Close the run, unless the worker was only asked to stop; then a checkpoint makes its resumption short."""
        session, training = self.session, self.training
        if session.stop.is_set() and training.steps_done < session.steps and self.asked_to_end is None:
            if training.steps_done == self.committed > 0:
                training.checkpoint()
            session.say(f"stopped after step {self.committed - 1}; the run can be resumed")
            return
        training.export(session.say)
        self._close(status="finished", reason=self.asked_to_end or "all steps done")

    def _close(self, *, status: Status, reason: str) -> None:
        training = self.training
        training.chronicle.close(steps=training.steps_done, digest=training.digest, status=status, reason=reason)
        mark(self.session.log, self.session.record, status=status)

    def _round_is_ready(self) -> bool:
        """Under `starts_on = "round"`, wait at a round's start until all its groups are scored."""
        schedule, done = self.session.rules, self.training.steps_done
        if schedule.starts_on == "groups" or done % schedule.steps_per_version:
            return True
        left = (self.session.steps - done) * schedule.prompts_per_step
        while not self.arrivals.selector.ready(min(schedule.round_groups, left)):
            if not self._wait(f"step {done}: the round is not scored yet"):
                return False
        return True

    def _wait(self, why: str) -> bool:
        """Take what arrives; False when the worker is to stop. Raises when too many groups are dropped."""
        self.session.doing(why)
        started = time.monotonic()
        for record in self.tail.poll(POLL_S):
            self._receive(record)
        waited = time.monotonic() - started
        self._wait_s += waited
        self.session.add("wait_s", waited)
        self._check_drops()
        self.session.status()
        return not self.session.stop.is_set() and self.asked_to_end is None

    def _catch_up(self) -> None:
        """Take all that is there, so that drops which were counted before a restart are not counted again as new ones."""
        self.session.doing("reading the groups that are there")
        behind = self.session.log.end_offsets(self.follows)
        while behind and not self.session.stop.is_set():
            for record in self.tail.poll(POLL_S):
                self._receive(record)
            behind = {partition: end for partition, end in behind.items() if self.tail.position(partition) < end}
            self.session.status()
        if self.arrivals.selector.drops == self._drops:
            self.arrivals.rewards_of_dropped.clear()
        self._check_drops()

    def _receive(self, record: Record) -> None:
        if record.topic == self.session.topic("groups"):
            self.arrivals.receive(record)
        elif record.topic == self.session.topic("weights"):
            self.training.chronicle.check_manifest(record)
        else:
            try:
                with self.session.decoding(record):
                    measurement = metrics.read(record, run=self.session.run)[1]
            except Unusable:
                return  # the tracker owns reading `metrics`
            if measurement.kind == "eval" and measurement.labels.get("ask") == "stop":
                self.asked_to_end = measurement.labels.get("reason", "the evaluator asked for it")

    def _record_stale(self) -> None:
        stale = self.arrivals.selector.newly_stale
        if stale:
            groups = tuple(candidate.group for candidate in stale)
            self.training.chronicle.write("stale", step=self.training.steps_done, groups=groups)
            self.arrivals.rewards_of_dropped["stale"] += len(stale)
            stale.clear()

    def _check_drops(self) -> None:
        dropped = self.arrivals.selector.drops - self._drops
        if dropped <= self.session.rules.max_drops_per_step:
            return
        causes = ", ".join(f"{count} {cause}" for cause, count in self.arrivals.rewards_of_dropped.most_common(6))
        since = "" if self.arrivals.rewards_of_dropped.total() == dropped else "since the run began "
        limit = f"schedule.max_drops_per_step = {self.session.rules.max_drops_per_step}"
        done = self.training.steps_done
        reason = f"{dropped} groups were dropped {f'since step {done - 1}' if done else 'before step 0'} ({limit}): {since}{causes}"
        self._close(status="failed", reason=reason)
        raise PenstockError(reason)

    def _commit(self, outcome: StepOutcome, plan: Sequence[Planned], *, version: int, started: float) -> None:
        dropped, queued = self.arrivals.selector.drops - self._drops, [version - oldest for oldest in self.arrivals.selector.queued()]
        measured = {**outcome.metrics, "wait_s": self._wait_s, "started_at": started, "dropped": float(dropped)}
        measured |= {"queued_groups": float(len(queued)), **{f"queued_{name}": value for name, value in lag_summary(queued).items()}}
        hashing = time.monotonic()
        digest = self.training.digest_of_step()
        measured["digest_s"] = time.monotonic() - hashing
        self.training.chronicle.write(
            "step",
            step=self.training.steps_done,
            version=version,
            plan=tuple(plan),
            boundaries=outcome.boundaries,
            loss_bits=outcome.loss_bits,
            grad_norm_bits=outcome.grad_norm_bits,
            digest=digest,
            metrics=measured,
        )
        self.committed += 1
        self._drops = self.arrivals.selector.drops
        self.arrivals.rewards_of_dropped.clear()
        self.session.add("compute_s", outcome.metrics["compute_s"])
