"""The rollout worker: generates groups of samples, or single turns if environments have workers of their own."""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.infra.engines.base import Completion, Engine
from penstock.infra.engines.shared_device import Sleepable
from penstock.infra.log import Assigned, Commits
from penstock.pipeline.runtime import offset_metadata
from penstock.pipeline.runtime.factories import make_engine, open_device, with_environments
from penstock.pipeline.runtime.offset_metadata import RolloutOffsetMetadata
from penstock.pipeline.runtime.sampling import request_of, rollout_of, source_of
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.weights.receive import WeightPrefetch
from penstock.pipeline.scheduling import rules
from penstock.pipeline.scheduling.rules import lag_summary
from penstock.topics import prompts, rollouts
from penstock.topics.metrics import Activity
from penstock.topics.rollouts import generated
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Outgoing, Record
from penstock.workers.evaluator.worker import SharedEngine
from penstock.workers.rollout.call_worker import CallWorker
from penstock.workers.rollout.generation_loop import GenerationLoop
from penstock.workers.rollout.group_tasks import GroupTask, GroupTasks, PublishedSamples

IDLE_WAIT_S = 0.2
"""How long an idle worker waits for prompts or weights before it checks everything again."""

GATHER_S = 1.0
"""Samples wait this long for the rest of their group, which is useless without them: one record costs a fraction of many."""


@dataclass(slots=True)
class GroupWorker(GenerationLoop):
    """Generates the samples of prompt groups."""

    reads, label, aborted = "prompts", "partitions", "aborted_groups"
    tasks: GroupTasks
    published: PublishedSamples
    _gathered: float = 0.0
    """Time at which the first of the unpublished samples ended."""

    @classmethod
    def open(cls, session: Session, engine: Engine, weights: WeightPrefetch, **shared: Any) -> "GroupWorker":
        """Join the workers of this role; `shared` contains `device` and `shared_engine`."""
        published, tasks = PublishedSamples(session.log, session.run), GroupTasks(session.schedule.oversample)
        return cls(session, engine, weights, session.member("prompts", max_records=64), session.producer, tasks, published, **shared)

    def drain_samples(self) -> None:
        """Publish the samples of unfinished groups too."""
        self._take(0.0)
        self._publish_completions(everything=True)
        GenerationLoop.drain_samples(self)

    def finishing(self) -> str:
        groups = len(self.tasks.groups_in_flight())
        return f"publishes finished samples and releases its partitions, leaving {groups} groups unfinished (about 2 s)"

    def close(self) -> None:
        self.member.close(5.0)
        self.published.close()

    def _assigned(self, event: Assigned) -> None:
        """Drop groups that other workers now own, and read from `rollouts` which samples of the remaining groups exist."""
        topic = self.session.topic("prompts")
        owned = {partition: committed for (held, partition), committed in event.partitions.items() if held == topic}
        for task in self.tasks.groups_in_flight():
            committed = owned.get(task.partition)
            if committed is None or task.offset < (committed.offset or 0):  # another's, or done by another
                self.engine.abort(task.group)
                del self.tasks.tasks[task.group]
                self.session.reporter.add("dropped_groups")
        ends = self.session.log.end_offsets((topic, partition) for partition in owned)
        metadata = {partition: offset_metadata.decode(RolloutOffsetMetadata, committed.metadata) for partition, committed in owned.items()}
        samples = self.published.follow({partition: each.rollouts if each else 0 for partition, each in metadata.items()})
        for partition, committed in owned.items():
            inherited_end, rollouts_end = ends[topic, partition], self.published.position(partition)
            self.tasks.assign(partition, offset=committed.offset or 0, inherited_end=inherited_end, rollouts_end=rollouts_end)
        for sample in samples:
            self.tasks.note(*sample)
        self._abort_surplus()
        self.session.reporter.values["slots"] = self.session.config.slots

    def _received(self, record: Record) -> None:
        """Queue the prompt in a record; an unusable record becomes a dead letter, a repeated group is reported as a duplicate."""
        try:
            with self.session.dead_letters.decoding(record):
                prompt = prompts.read(record, run=self.session.run)[1]
        except Unusable as error:
            self.tasks.skip(record)
            self.session.dead_letters.write(record, error)
            return
        if not self.tasks.add(record, prompt):
            self.session.reporter.duplicate(f"prompt of group {prompt.group} at {record.id}")

    def _read_published(self) -> None:
        """Read which samples other workers have published since the partitions were assigned."""
        for partition, owned in self.tasks.partitions.items():
            self.published.skip(partition, owned.rollouts_end)
        for sample in self.published.read_new():
            self.tasks.note(*sample)
        for partition in self.tasks.partitions:
            self.tasks.caught_up(partition, self.published.position(partition))
        self._abort_surplus()

    def _has_work(self) -> bool:
        return self._next(self.weights.version) is not None

    def _next(self, newest: int) -> GroupTask | None:
        """Return the group to start next, if version `newest` can be loaded; None if all wait, which an idle worker reports."""
        waiting, loaded = self.tasks.waiting(), self.engine.version
        pairs = [(task.group, task.prompt.min_version) for task in waiting]
        index = rules.next_in_line(pairs, loaded_version=loaded, newest_version=newest)
        if index is not None and not self._already_stale(max(loaded, newest)):
            return waiting[index]
        oldest = min((version for _, version in pairs), default=None)
        if self.engine.idle:
            if oldest is None:
                self.session.reporter.doing(Activity.NO_PROMPTS, "waiting for prompts")
            else:
                self.session.reporter.doing(Activity.NO_WEIGHTS, f"waiting for version {oldest}")
        return None

    def _start(self) -> None:
        """Start waiting groups while the engine has room, the lowest first; a group that needs newer weights has them loaded."""
        schedule, newest = self.session.schedule, self.weights.version
        while self.engine.has_room and (task := self._next(newest)) is not None:
            loaded = self.engine.version
            version = rules.version_to_load(schedule, min_version=task.prompt.min_version, newest_version=newest, loaded_version=loaded)
            if version is not None:
                if not self.engine.idle and schedule.loads_at != "step":
                    return  # the weights change between groups
                if not self._load():
                    return
            self._start_task(task)

    def _start_task(self, task: GroupTask) -> None:
        """Submit the samples of a group that are not in the log."""
        if task.inherited:  # its earlier owner may have published samples after the partition was assigned
            self._read_published()
        samples = task.to_generate(oversample=self.tasks.oversample)
        if samples:
            task.start(samples)
            self.session.reporter.doing(Activity.BUSY, "generating")
            stop_ids = self.session.info["digests"]["stop_ids"]
            self.engine.submit(request_of(task.prompt, samples, config=self.session.config, stop_ids=stop_ids))

    def _wait(self) -> None:
        """Wait for weights if groups need them; otherwise load a newer version, or wait for prompts."""
        if self.tasks.waiting():
            self.weights.wait(IDLE_WAIT_S)
        elif self.weights.version > self.engine.version:
            self._load()  # the prompts for it are about to come
        else:
            self._take(0.01 if any(task.sent or task.completed for task in self.tasks.groups_in_flight()) else IDLE_WAIT_S)

    def _ended(self, completions: list[Completion]) -> None:
        """Store completions in their groups, and stop generating for groups that now have all their samples."""
        if completions and not any(task.completed for task in self.tasks.groups_in_flight()):
            self._gathered = time.monotonic()
        for completion in completions:
            if task := self.tasks.tasks.get(completion.group):
                task.take(completion)
        self._abort_surplus()

    def _abort_surplus(self) -> None:
        """Abort generation for groups that have all the samples they need."""
        for task in self.tasks.groups_in_flight():
            if task.generating and not task.needed:
                self.engine.abort(task.group)
                task.generating.clear()

    def _publish_completions(self, *, everything: bool = False) -> None:
        """Send finished samples with the rest of their group, or after a short wait, if this worker's partitions are assigned."""
        if not self._settled:
            return
        # Under `continue` the loss masks of a group are cut at one version: its samples are published together.
        together = self.session.schedule.stale_in_hand == "continue"
        soon = not together and (self.engine.idle or time.monotonic() - self._gathered > GATHER_S)
        for task in self.tasks.groups_in_flight():
            if (everything or soon or not task.needed) and self._may_publish(task.completed.values()):
                self._publish(task)

    def _publish(self, task: GroupTask) -> None:
        """Send the finished samples of a group in as few records as possible."""
        session, schedule = self.session, self.session.schedule
        fresh = self.weights.state.newest_version - schedule.max_lag if schedule.stale_in_hand == "continue" else 0
        sampling = session.config.sampling_for(source_of(task.prompt.columns))
        samples = [
            rollout_of(task.completed[number], sampling=sampling, worker=session.worker, oldest_trained=fresh)
            for number in sorted(task.completed)
        ]
        topic, key = session.topic("rollouts"), str(task.group).encode()
        for batch in rollouts.batches(samples):
            with session.reporter.encoding:
                value = rollouts.encode(*batch)
                headers = rollouts.headers(*batch, run=session.run).encode(value)
            pending = self.producer.send(Outgoing(topic=topic, partition=task.partition, key=key, headers=headers, value=value))
            task.send([sample.sample for sample in batch], pending)
            session.reporter.add("samples", len(batch))
            session.reporter.add("tokens", sum(len(generated(sample)) for sample in batch))
            session.reporter.add("spans", sum(len(sample.span_versions) for sample in batch))

    def _acknowledge(self) -> None:
        if finished := self.tasks.acknowledge():
            self.session.reporter.add("groups", finished)

    def _offsets_to_commit(self) -> Commits:
        """The offsets of `prompts` to commit; if another process has written to `rollouts`, its samples are read first."""
        if any(owned.gap for owned in self.tasks.partitions.values()):
            self._read_published()
        return GenerationLoop._offsets_to_commit(self)

    def _measure(self) -> None:
        """Report the staleness of the groups in flight and the engine's counters."""
        newest = self.weights.state.newest_version
        lags = [max(0, newest - group.oldest_version) for group in self.engine.groups_in_flight() if group.oldest_version is not None]
        values = {name: value for name, value in self.session.reporter.values.items() if not name.startswith("in_flight_")}
        values["in_flight_groups"] = float(len(lags))
        values |= {f"in_flight_{name}": value for name, value in lag_summary(lags).items()}
        self.session.reporter.values = values | {f"engine_{name}": value for name, value in self.engine.stats().items()}


def main(session: Session) -> None:
    """Generate samples until the run is closed."""
    session.check_model()
    device = open_device(session.config, session.run)
    if device is not None:
        session.reporter.doing(Activity.NO_DEVICE, "waiting for the device", now=True)
        if not device.wait(session.stop, meanwhile=session.reporter.status):
            return
    session.reporter.doing(Activity.START, "loading the model", now=True)
    by_log = session.config.turns_by_log
    engine = make_engine(session.config, episodes=False, sleeps=device is not None)
    if device is not None:
        assert isinstance(engine, Sleepable)
        device.model = engine
    if session.config.environment.source is not None and not by_log:
        engine = with_environments(engine, session.config, notify=session.reporter.notify)
    settings = session.config.weights
    weights = WeightPrefetch(
        session.log, session.run, notify=session.reporter.notify, shared=settings.shared, direct=settings.transport == "ipc"
    )
    shared_engine = None
    if session.config.evaluates_on_rollout_engine:
        wrap = partial(with_environments, config=session.config, notify=session.reporter.notify) if by_log else None
        shared_engine = SharedEngine(session, engine, weights.state, wrap)
    (CallWorker if by_log else GroupWorker).open(session, engine, weights, device=device, shared_engine=shared_engine).run()
