"""The trainer: `groups` become optimizer steps, `ledger` entries and new `weights`.

The rule: one ledger record commits a step; what it trains is decided by headers and the schedule's integers; after a restart the
committed plans are trained again from the log and must give the same bits.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from infra.backends import Backend
from infra.broker.state import state_directory
from infra.errors import PenstockError
from infra.log import Start, Tail
from infra.tensors import digest
from pipeline import schedule as rules
from pipeline.arrivals import Arrivals
from pipeline.chronicle import Chronicle
from pipeline.control import Story
from pipeline.engines import make_backend
from pipeline.learner import Objective, Step, StepOutcome
from pipeline.runs import mark
from pipeline.session import Session
from topics import groups, metrics, prompts
from topics.errors import Unusable
from topics.groups import Group
from topics.ledger import Entry, Planned
from topics.record import Record

POLL_S = 0.5


def main(session: Session) -> None:
    """Train until the run's steps are done, an evaluator asks for the end, or too many groups are dropped."""
    # Fence first, read afterwards: nothing an earlier trainer still had in hand can follow what is read now.
    transactions = session.log.transactions(f"{session.run}.trainer")
    past, story = read_past(session)
    if story.closed is not None:
        session.say("the run is closed already")
        return
    session.doing("loading the model", now=True)
    trainer = Trainer.open(session, Chronicle(session, transactions, story, weight_partitions=chunk_partitions(session)))
    session.ready()
    mark(session.log, session.record, status="running")
    trainer.begin(past)
    while trainer.steps_done < session.steps and trainer.asked_to_end is None and not session.stop.is_set():
        if not trainer.train_step():
            break
    trainer.end()


def read_past(session: Session) -> tuple[list[Entry], Story]:
    """The ledger's entries and the published versions so far."""
    tail = session.log.tail({(session.topic("ledger"), 0): "earliest", (session.topic("weights"), 0): "earliest"})
    story, entries = Story(session.run), []
    for record in tail.read_to_end(120.0):
        try:
            found = story.fold(record)
        except Unusable:
            continue
        if isinstance(found, Entry):
            entries.append(found)
    tail.close()
    return entries, story


def chunk_partitions(session: Session) -> int:
    """How many partitions of `weights` carry chunks."""
    return (session.log.partitions(session.topic("weights")) or 2) - 1


@dataclass(slots=True)
class Trainer:
    """The trainer's state between two steps."""

    session: Session
    chronicle: Chronicle
    backend: Backend
    objective: Objective
    arrivals: Arrivals
    tail: Tail
    steps_done: int = 0
    asked_to_end: str | None = None
    _drops: int = 0
    """Dropped groups when the last step was committed."""
    _wait_s: float = 0.0
    _digest: str | None = None

    @classmethod
    def open(cls, session: Session, chronicle: Chronicle) -> "Trainer":
        """Load the model and begin to follow the groups."""
        follow: dict[tuple[str, int], Start] = {(session.topic("groups"), p): "earliest" for p in range(session.config.partitions)}
        follow[session.topic("weights"), 0] = "earliest"
        if session.config.eval.target is not None or session.config.eval.patience is not None:
            follow[session.topic("metrics"), 0] = "earliest"
        backend = make_backend(session.config, steps=session.steps)
        return cls(session, chronicle, backend, Objective.of(session.config), Arrivals(session, session.rules), session.log.tail(follow))

    def begin(self, past: Sequence[Entry]) -> None:
        """Open the run with version 0, or train the committed plans again."""
        session = self.session
        if not any(entry.kind == "run-opened" for entry in past):
            told = {"config": json.loads(session.record.config), "info": dict(session.info), "fingerprint": self.backend.fingerprint()}
            self.chronicle.write("run-opened", details=json.dumps(told))
        self._publish(version=0)
        stale = [group for entry in past if entry.kind == "stale" for group in entry.groups]
        self.arrivals.selector.settle(stale)
        self.arrivals.selector.drops = len(stale)
        for entry in past:
            if entry.kind == "step":
                self._repeat(entry)

    def train_step(self) -> bool:
        """One step: plan it, run it backward as its groups come, commit it, publish; False when the worker was stopped meanwhile."""
        session, schedule, started = self.session, self.session.rules, time.time()
        version = rules.version_after(self.steps_done, steps_per_version=schedule.steps_per_version)
        self._wait_s = 0.0
        if not self._round_is_ready():
            return False
        step, plan = Step(self.backend, self.objective), list[Planned]()
        while len(plan) < schedule.prompts_per_step:
            found = self.arrivals.take(learner_version=version)
            self._record_stale()
            if found is None:
                if not self._wait(f"step {self.steps_done}: {len(plan)} of {schedule.prompts_per_step} groups are here"):
                    return False
                continue
            candidate, group = found
            plan.append(Planned(group=candidate.group, sha256=candidate.sha256, partition=candidate.partition, offset=candidate.offset))
            session.doing(f"training step {self.steps_done}")
            step.add(group)
        outcome = step.finish(learner_version=version)
        self._commit(outcome, plan, version=version, started=started)
        session.status()
        return True

    def end(self) -> None:
        """Close the run, unless the worker was only asked to stop; then it can be resumed."""
        session = self.session
        if session.stop.is_set() and self.steps_done < session.steps and self.asked_to_end is None:
            session.say(f"stopped after step {self.steps_done - 1}; the run can be resumed")
            return
        reason = self.asked_to_end or "all steps done"
        if session.config.trainer.export:
            target = state_directory() / "runs" / session.run / "model"
            session.doing("writing the final model")
            self.backend.export(target)
            session.say(f"final model in {target}")
        self.chronicle.close(steps=self.steps_done, digest=self._digest, status="finished", reason=reason, unused=self._unused())
        mark(session.log, session.record, status="finished")

    def _round_is_ready(self) -> bool:
        """Under `starts_on = "round"`, wait at a round's start until all its groups are scored."""
        schedule = self.session.rules
        if schedule.starts_on == "groups" or self.steps_done % schedule.steps_per_version:
            return True
        left = (self.session.steps - self.steps_done) * schedule.prompts_per_step
        while not self.arrivals.selector.ready(min(schedule.round_groups, left)):
            if not self._wait(f"step {self.steps_done}: the round is not scored yet"):
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

    def _receive(self, record: Record) -> None:
        if record.topic == self.session.topic("groups"):
            self.arrivals.receive(record)
        elif record.topic == self.session.topic("weights"):
            self.chronicle.check_manifest(record)
        else:
            try:
                measurement = metrics.read(record, run=self.session.run)[1]
            except Unusable:
                return  # the tracker owns reading `metrics`
            if measurement.kind == "eval" and measurement.labels.get("ask") == "stop":
                self.asked_to_end = measurement.labels.get("reason", "the evaluator asked for it")

    def _record_stale(self) -> None:
        stale = self.arrivals.selector.newly_stale
        if stale:
            self.chronicle.write("stale", step=self.steps_done, groups=tuple(candidate.group for candidate in stale))
            self.arrivals.rewards_of_dropped["stale"] += len(stale)
            stale.clear()

    def _check_drops(self) -> None:
        dropped = self.arrivals.selector.drops - self._drops
        if dropped <= self.session.rules.max_drops_per_step:
            return
        causes = ", ".join(f"{count} {cause}" for cause, count in self.arrivals.rewards_of_dropped.most_common(6))
        limit = f"schedule.max_drops_per_step = {self.session.rules.max_drops_per_step}"
        reason = f"{dropped} groups were dropped since step {self.steps_done - 1} ({limit}): {causes}"
        self.chronicle.close(steps=self.steps_done, digest=self._digest, status="failed", reason=reason, unused=self._unused())
        mark(self.session.log, self.session.record, status="failed")
        raise PenstockError(reason)

    def _commit(self, outcome: StepOutcome, plan: Sequence[Planned], *, version: int, started: float) -> None:
        dropped = self.arrivals.selector.drops - self._drops
        measured = {**outcome.metrics, "wait_s": self._wait_s, "started_at": started, "dropped": float(dropped)}
        self.chronicle.write(
            "step",
            step=self.steps_done,
            version=version,
            plan=tuple(plan),
            boundaries=outcome.boundaries,
            loss_bits=outcome.loss_bits,
            grad_norm_bits=outcome.grad_norm_bits,
            metrics=measured,
        )
        self._drops = self.arrivals.selector.drops
        self.arrivals.rewards_of_dropped.clear()
        self.session.add("compute_s", outcome.metrics["compute_s"])
        self._advance()

    def _advance(self) -> None:
        """Count the step and publish the version it completes, if it completes one."""
        schedule, done = self.session.rules, self.steps_done
        self.steps_done += 1
        self.session.values.update(step=self.steps_done)
        if rules.publishes(done, steps=self.session.steps, steps_per_version=schedule.steps_per_version):
            self._publish(version=rules.versions_of(self.steps_done, steps_per_version=schedule.steps_per_version))

    def _publish(self, *, version: int) -> None:
        tensors = self.backend.weights()
        recorded = self.chronicle.story.manifests.get(version)
        self._digest = self.chronicle.publish(tensors, version=version, step=self.steps_done)
        if recorded is not None and (found := digest(tensors)) != recorded.digest:
            raise PenstockError(
                f"version {version}: the recorded weights digest is {recorded.digest[:16]}…, repeating it from the log gave {found[:16]}…"
            )
        self.session.values.update(version=version)

    def _repeat(self, entry: Entry) -> None:
        """Train a committed plan again from the log and compare its bits with the ledger's."""
        assert entry.step == self.steps_done, f"step {entry.step} in the ledger where step {self.steps_done} was expected"
        self.session.doing(f"repeating step {entry.step} from the log")
        self.session.status()
        step = Step(self.backend, self.objective)
        for planned in entry.plan:
            step.add(self._fetch(planned))
        outcome = step.finish(learner_version=entry.version or 0)
        if (outcome.loss_bits, outcome.grad_norm_bits) != (entry.loss_bits, entry.grad_norm_bits):
            raise PenstockError(
                f"step {entry.step} repeated from the log gave loss {outcome.loss!r} and gradient norm {outcome.grad_norm!r}, "
                f"the ledger says {entry.metrics.get('loss')!r} and {entry.metrics.get('grad_norm')!r}; "
                "is the arithmetic (versions, threads, device) the same?"
            )
        self.arrivals.selector.settle([planned.group for planned in entry.plan])
        self._drops += int(entry.metrics["dropped"])
        self._advance()

    def _fetch(self, planned: Planned) -> Group:
        """A planned group's payload, by its partition and offset."""
        topic = self.session.topic("groups")
        (first,) = self.session.log.read(topic, planned.partition, [planned.offset])
        parts = groups.check(first, run=self.session.run).parts or 1
        rest = self.session.log.read(topic, planned.partition, list(range(planned.offset + 1, planned.offset + parts))) if parts > 1 else []
        return groups.read([first, *rest], run=self.session.run)[1]

    def _unused(self) -> int:
        """Admitted groups that nobody trained or dropped."""
        tail = self.session.log.tail({(self.session.topic("prompts"), p): "earliest" for p in range(self.session.config.partitions)})
        admitted = set[int]()
        for record in tail.read_to_end(120.0):
            try:
                admitted.add(prompts.check(record, run=self.session.run).group or 0)
            except Unusable:
                continue
        tail.close()
        selector = self.arrivals.selector
        ended = selector.settled | {group for group, outcome in selector.outcomes.items() if outcome in rules.DROPPED}
        return len(set(rules.admitted_groups(admitted)) - ended)
