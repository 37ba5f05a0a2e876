"""Records that a trainer follows: groups, its own manifests, the end of the prompts, an evaluator's request to end the run.

Reading only updates state; the worker decides what is trained, written or abandoned.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from penstock.infra.log import Partition, Start, Tail
from penstock.infra.tensors.parameter_count import vocabulary
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.scheduling.resume_point import ResumePoint
from penstock.pipeline.scheduling.reward_scale import RewardScale
from penstock.topics import metrics
from penstock.topics.catalogue import control_topic
from penstock.topics.wire.checked import whole
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record
from penstock.workers.trainer.group_inbox import GroupInbox
from penstock.workers.trainer.resuming import Resumed, ResumeOffsets, note_anchor, partition_key, resume_point_at
from penstock.workers.trainer.run_writer import RunWriter

POLL_S = 0.5


@dataclass(slots=True)
class Arrivals:
    """The topics that a trainer follows, and the state from their records."""

    session: Session
    writer: RunWriter
    inbox: GroupInbox
    tail: Tail
    followed: Sequence[Partition]
    offsets: ResumeOffsets
    end_reason: str | None = None
    """The reason if the run is to end before all its steps are done; else None."""
    _admitted: int | None = None
    """Groups of the whole run, once the feeder has reported that no prompt will follow; None before."""

    @classmethod
    def open(cls, session: Session, writer: RunWriter, resumed: Resumed) -> Self:
        """Start to follow, from the newest step's resume point."""
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
            starts.update({at: resumed.resume_point.positions.get(partition_key(session, at), 0) for at in starts})
        starts[control_topic(session.run, "feeder"), 0] = "earliest"  # a feeder reports only once that no prompt follows
        return cls(session, writer, inbox, session.log.tail(starts), list(starts), resumed.offsets)

    @property
    def no_more(self) -> bool:
        """True if no group will follow: under `run.epochs` the prompts may end before the steps."""
        return self._admitted is not None and self.inbox.selector.finished_groups >= self._admitted

    def settle(self, resumed: Resumed) -> None:
        """Count the groups that have ended according to the ledger."""
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
        """Apply the records that exist, or arrive within `timeout_s`; returns True if there were any."""
        records = self.tail.poll(timeout_s)
        for record in records:
            self._receive(record)
        return bool(records)

    def catch_up(self) -> None:
        """Apply all records up to the end offsets at the call, unless a stop is requested."""
        behind = self.session.log.end_offsets(self.followed)
        while behind and not self.session.stop.is_set():
            self.take_in(POLL_S)
            behind = {partition: end for partition, end in behind.items() if self.tail.position(partition) < end}
            self.session.reporter.status()

    def resume_point(self) -> ResumePoint:
        """The resume point of a step that is about to be committed."""
        positions = {at: self.tail.position(at) for at in self.followed}
        store = self.writer.checkpoints.store
        return resume_point_at(self.session, self.inbox, self.offsets, positions, saved=[] if store is None else store.steps())

    def _receive(self, record: Record) -> None:
        if record.topic == self.session.topic("groups"):
            self.inbox.receive(record)
        elif record.topic == self.session.topic("weights"):
            self.writer.check_manifest(record)
            note_anchor(self.offsets, record, self.writer.state)
        else:
            self._on_measurement(record)

    def _on_measurement(self, record: Record) -> None:
        """Apply a measurement of the feeder or an evaluator, from the topic that only its role may write."""
        try:
            with self.session.dead_letters.decoding(record):
                measurement = metrics.read(record, run=self.session.run)[1]
        except Unusable:
            return  # a lease record of the role
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
            self.end_reason = measurement.labels.get("reason", "the evaluator requested it")
