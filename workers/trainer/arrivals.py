"""What the log brings to a trainer: groups, the manifests of its own versions, the end of the prompts, an evaluator's request to end.

The rule: reading changes only what is known; what is trained, written or given up is decided by the worker.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from penstock.infra.log import Partition, Start, Tail
from penstock.infra.tensors.parameter_count import vocabulary
from penstock.pipeline.learner.run_writer import RunWriter
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.scheduling.resume_point import ResumePoint
from penstock.pipeline.scheduling.reward_scale import RewardScale
from penstock.topics import metrics
from penstock.topics.catalogue import control_topic
from penstock.topics.wire.checked import whole
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record
from penstock.workers.trainer.group_inbox import GroupInbox
from penstock.workers.trainer.marks import note_anchor, place_name, resume_point_at
from penstock.workers.trainer.resuming import Places, Resumed

POLL_S = 0.5


@dataclass(slots=True)
class Arrivals:
    """The records that a trainer follows, and what they have said so far."""

    session: Session
    writer: RunWriter
    inbox: GroupInbox
    tail: Tail
    followed: Sequence[Partition]
    places: Places
    asked_to_end: str | None = None
    """The reason if the run is to end before all its steps are done; else None."""
    _admitted: int | None = None
    """Groups of the whole run, once the feeder has said that no prompt will follow; None before."""

    @classmethod
    def open(cls, session: Session, writer: RunWriter, resumed: Resumed) -> Self:
        """Begin to follow, from where the newest step's mark says."""
        inbox = GroupInbox(
            run=session.run,
            schedule=session.schedule,
            dead_letter=session.dead_letters.write,
            duplicate=session.reporter.duplicate,
            decoding=session.dead_letters.decoding,
            vocabulary=vocabulary(session.config.model_directory),
            scale=RewardScale.of(session.config.reward.functions, session.config.reward.weights, by_source=session.config.data.rewards),
        )
        starts: dict[Partition, Start] = {(session.topic("groups"), p): "earliest" for p in range(session.config.partitions)}
        starts[session.topic("weights"), 0] = "earliest"
        if session.config.eval_sources:
            starts[control_topic(session.run, session.config.evaluating_role), 0] = "earliest"
        if resumed.resume_point is not None:
            starts.update({at: resumed.resume_point.positions.get(place_name(session, at), 0) for at in starts})
        starts[control_topic(session.run, "feeder"), 0] = "earliest"  # a feeder says only once that no prompt follows
        return cls(session, writer, inbox, session.log.tail(starts), list(starts), resumed.places)

    @property
    def no_more(self) -> bool:
        """Whether no group will come any more: under `run.epochs` the prompts may end before the steps."""
        return self._admitted is not None and self.inbox.selector.finished_groups >= self._admitted

    def settle(self, resumed: Resumed) -> None:
        """Count the groups that the ledger says have ended."""
        selector, past, resume = self.inbox.selector, resumed.past, resumed.resume_point
        if resume is None:
            selector.settle([*past.stale, *past.trained])
            selector.drops = self.inbox.drop_causes["stale"] = len(past.stale)
        else:
            later = resumed.later_stale
            selector.resume(below=resume.below, settled=[*resume.settled, *later], drops=resume.drops + len(later))
            self.inbox.ended_before = resume.below
            self.inbox.scale.see(resume.rewards)

    def start_over(self) -> None:
        """Forget the groups, and follow everything from its beginning."""
        self.inbox.start_over()
        self.tail.add(dict.fromkeys(self.followed, "earliest"))

    def take_in(self, timeout_s: float) -> bool:
        """Take in what is there, or arrives within `timeout_s`; returns whether anything did."""
        records = self.tail.poll(timeout_s)
        for record in records:
            self._receive(record)
        return bool(records)

    def catch_up(self) -> None:
        """Take in all that was there when this was called, or until the worker is to stop."""
        behind = self.session.log.end_offsets(self.followed)
        while behind and not self.session.stop.is_set():
            self.take_in(POLL_S)
            behind = {partition: end for partition, end in behind.items() if self.tail.position(partition) < end}
            self.session.reporter.status()

    def resume_point(self) -> ResumePoint:
        """Where a step that is about to be committed leaves the run."""
        positions = {at: self.tail.position(at) for at in self.followed}
        store = self.writer.checkpoints.store
        return resume_point_at(self.session, self.inbox, self.places, positions, saved=[] if store is None else store.steps())

    def _receive(self, record: Record) -> None:
        if record.topic == self.session.topic("groups"):
            self.inbox.receive(record)
        elif record.topic == self.session.topic("weights"):
            self.writer.check_manifest(record)
            note_anchor(self.places, record, self.writer.state)
        else:
            self._hear(record)

    def _hear(self, record: Record) -> None:
        """Take in a measurement of the feeder or an evaluator, from the topic that only its role may write."""
        try:
            with self.session.dead_letters.decoding(record):
                measurement = metrics.read(record, run=self.session.run)[1]
        except Unusable:
            return  # a claim of the role's place
        config = self.session.config
        if record.topic != self.session.topic(f"control-{measurement.role}"):
            return
        if measurement.role == "feeder" and config.run.epochs is not None and measurement.values.get("all_out"):
            self._admitted = whole(measurement.values.get("admitted"))
        if measurement.kind != "eval" or measurement.role != config.evaluating_role or measurement.version is None:
            return
        manifest = self.writer.state.manifests.get(measurement.version)
        self.writer.checkpoints.rate(manifest, measurement.values.get("greedy_accuracy"))
        if config.stops_early and measurement.labels.get("ask") == "stop":
            self.asked_to_end = measurement.labels.get("reason", "the evaluator asked for it")
