"""The trainer's writer: ledger entries, policy versions and checkpoints, under one transactional id.

The rule: a step is committed by one ledger record, a version by its manifest together with its ledger record; after each step, live or
repeated, the version it completes comes first, then the checkpoint.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.infra import faults
from penstock.infra.errors import LogError, LogUnreachable, Unrecoverable
from penstock.infra.log import Transactions
from penstock.infra.paths import run_directory
from penstock.infra.tensors.stream import expected_nbytes
from penstock.pipeline.learner.checkpointer import MODEL, Checkpointer
from penstock.pipeline.learner.chunk_gaps import ChunkGaps
from penstock.pipeline.learner.fingerprint import arithmetic_of
from penstock.pipeline.learner.policy_trainer import PolicyTrainer, Weights
from penstock.pipeline.learner.repeat_step import Difference
from penstock.pipeline.learner.weight_publisher import Publication, WeightPublisher
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.weights.publish import manifest_record
from penstock.pipeline.runtime.weights.retention import deletable, is_anchor
from penstock.pipeline.scheduling import rules
from penstock.topics import ledger, weights
from penstock.topics.ledger import Entry
from penstock.topics.metrics import Activity
from penstock.topics.weights import Manifest
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Outgoing, Record

DIGEST_BELOW = 100_000_000
"""Models with fewer parameters have the digest of their weights in every step of the ledger, others in every version."""


@dataclass(slots=True)
class RunWriter:
    """Writes what a `PolicyTrainer` has done."""

    session: Session
    transactions: Transactions
    state: LedgerState
    """The ledger and the versions as this writer has left them."""
    checkpoints: Checkpointer = field(init=False)
    newest_offset: int = -1
    """Where the newest entry of this writer stands."""
    lost: Manifest | None = None
    """The newest version, while its chunks cannot be read and have not been sent again."""
    _rebased_at: int | None = None
    """Steps done where the weights ceased to be those of the version that was published there."""
    _publisher: WeightPublisher = field(init=False)
    _publication: Publication | None = None
    """The version whose chunks are being sent."""
    _stalled_s: float = 0.0
    """How long this version has held up its caller."""
    _gaps: ChunkGaps = field(init=False)

    def __post_init__(self) -> None:
        """Open the checkpoint directory. Raises `CheckpointError`."""
        session = self.session
        self.checkpoints = Checkpointer(session, self.write)
        count = session.log.partitions(session.topic("weights")) or 2
        self._publisher = WeightPublisher(session.log, session.run, session.config.weights, count, notify=session.reporter.notify)
        self._gaps = ChunkGaps(session)
        self._gaps.skip(self.state.manifests.values())

    def begin(self, policy: PolicyTrainer) -> None:
        """Open the run with version 0, or make sure that the model is the one it was opened with."""
        if self.state.opened is None:
            session = self.session
            fingerprint = arithmetic_of(policy.backend, session.config)
            details = {"config": json.loads(session.record.config), "info": dict(session.info), "fingerprint": fingerprint}
            self.write("run-opened", details=json.dumps(details))
        self._read_newest()
        self.publish(policy.weights(), version=0, step=policy.steps_done)
        self.finish_publishing()
        policy.release_weights()

    def after_step(self, policy: PolicyTrainer) -> None:
        """Publish the version that the newest step completes if it completes one, and write a checkpoint if one is due."""
        session, done = self.session, policy.steps_done
        session.reporter.values.update(step=done)
        if rules.publishes(done - 1, steps=session.steps, steps_per_version=session.schedule.steps_per_version):
            self.publish(policy.weights(), version=policy.version, step=done)
            if not session.schedule.max_lag:
                self.finish_publishing()  # the next step waits for it anyway
        if (every := session.config.trainer.checkpoint_every) and done % every == 0:
            self.checkpoint(policy)
        policy.release_weights()

    def rebase(
        self,
        policy: PolicyTrainer,
        *,
        differences: Sequence[tuple[Entry, Difference]],
        changed: Mapping[str, tuple[Any, Any]],
        fingerprint: Mapping[str, str | int],
    ) -> None:
        """Record what repeated steps gave other than the ledger, and go on from there: the next version has the weights they gave.

        A checkpoint is written at once, as it alone holds the new optimizer state. Where the last version is out, its weights stay.
        """
        self.finish_begun()
        done, first = policy.steps_done, differences[0][0].step if differences else None
        details = {
            "fingerprint": fingerprint,
            "changed": changed,
            "differences": [
                {"step": entry.step, "name": one.name, "recorded": one.recorded, "found": one.found} for entry, one in differences
            ],
        }
        measured = {"differing_steps": float(len({entry.step for entry, _ in differences}))}
        self.write(
            "rebased", step=done, version=policy.version, digest=policy.weights().digest, metrics=measured, details=json.dumps(details)
        )
        what = f"step {first} and {measured['differing_steps'] - 1:.0f} more gave other bits" if differences else "no repeated step differs"
        self.session.reporter.notify(f"rebased after step {done - 1}: {what}; the run goes on from the weights that are here")
        if not differences:
            return
        self._rebased_at = done
        if policy.version not in self.state.manifests:
            self.publish(policy.weights(), version=policy.version, step=done)
            self.finish_publishing()
        elif done == self.session.steps and policy.weights_of is not None:
            policy.release_weights()
            policy.backend.load_weights(policy.weights_of(policy.version))
            self._rebased_at = None
        self.checkpoint(policy)
        self.finish_begun()
        policy.release_weights()

    def write(self, kind: ledger.EntryKind, *also: Outgoing, **fields: Any) -> Entry:
        """Commit one entry, and records that stand or fall with it."""
        session = self.session
        entry = Entry(seq=self.state.last_seq + 1, kind=kind, time_ns=time.time_ns(), **fields)
        with session.reporter.encoding:
            value = ledger.encode(entry)
            headers = ledger.headers(entry, run=session.run).encode(value)
            record = Outgoing(topic=session.topic("ledger"), partition=0, key=kind.encode(), headers=headers, value=value)
        faults.reach(f"ledger.{kind}.before")
        self.newest_offset = self.transactions.commit([*also, record])[-1]
        faults.reach(f"ledger.{kind}.after")
        self.state.last_seq = entry.seq
        return entry

    def publish(self, content: Weights, *, version: int, step: int) -> None:
        """Begin to send a version's chunks, after the version before it is out; a published one must have the same digest.

        Raises `Unrecoverable` where it has another.
        """
        self.finish_publishing()
        published = self.state.manifests.get(version)
        if published is not None:
            if content.digest != published.digest:
                origin = "repeating it from the log gave" if version else "the model directory holds"
                raise Unrecoverable(
                    f"version {version}: the recorded weights digest is {published.digest[:16]}…, {origin} {content.digest[:16]}…"
                )
            if self.lost is not None and self.lost.version == version:
                self._publish_again(content, published)
            self.session.reporter.values.update(version=version)
            return
        started = time.monotonic()
        if content.adapted is None:
            assert content.tensors, "a model has parameters"  # a copy: the model may change from here on
        self._publication = self._publisher.begin(content, version=version, step=step, manifests=self.state.manifests)
        self._stalled_s = time.monotonic() - started

    @property
    def publishing(self) -> bool:
        """True while a version is on its way."""
        return self._publication is not None

    def finish_publishing(self, *, wait: bool = True) -> None:
        """Commit the version whose chunks were sent: its manifest with the ledger's entry; without `wait`, only if all of them are."""
        publication = self._publication
        if publication is None or not (wait or publication.sent):
            return
        began, manifest = time.monotonic(), self._publisher.finish(publication)
        self._publication = None
        self._gaps.read_to(weights.chunk_places(manifest))
        origin = self.state.manifests.get(0, manifest)
        whole = sum(expected_nbytes(dtype, shape) for _, dtype, shape in weights.layout(origin))
        now = time.monotonic()
        measured = {
            "bytes": float(manifest.nbytes),
            "full_bytes": float(whole),
            "delta": float(manifest.encoding == "delta"),
            "adapter": float(manifest.encoding == "adapter"),
            "publish_s": now - publication.started,
            "stall_s": self._stalled_s + now - began,
        }
        record = manifest_record(manifest, run=self.session.run)
        self.write("version", record, version=manifest.version, step=manifest.step, digest=manifest.digest, metrics=measured)
        self.state.add(manifest)
        self._publisher.committed(publication)
        self.session.reporter.values.update(version=manifest.version)
        chosen = self.session.config.weights
        if chosen.keep == "chain" and is_anchor(manifest, every=chosen.anchor_every):
            self._release()

    def _release(self) -> None:
        """Delete the chunks of versions that nobody needs any more; where that is refused the run goes on."""
        per_version = self.session.schedule.steps_per_version
        store = self.checkpoints.store
        steps = store.steps() if store is not None and per_version > 1 else []  # a snapshot within a version is read again
        needed = {rules.version_after(done, steps_per_version=per_version) for done in steps} & self.state.manifests.keys()
        every = self.session.config.weights.anchor_every
        before = deletable(self.state.manifests, ends=self._gaps.ends, every=every, needed=needed)
        topic = self.session.topic("weights")
        try:
            self.session.log.delete_records({(topic, partition): offset for partition, offset in before.items()})
        except LogUnreachable:
            raise
        except LogError as error:
            self.session.reporter.throttled.notify("weights that stay", f"old weights stay: {error}")

    def repair_newest(self) -> None:
        """Send the newest version again if its chunks cannot be read, as far as it is still in memory. Raises `LogError`."""
        newest = self.state.newest_version
        published = self.state.manifests.get(newest)
        content = None if published is None or self._publication is not None else self._publisher.newest(published)
        if published is None or content is None:
            return
        if (problem := self._publisher.look_through(self.state.manifests, newest)) is not None:
            self.session.reporter.notify(f"version {newest} cannot be read any more ({problem}): it is sent again")
            self._publish_again(content, published)

    def _publish_again(self, content: Weights, published: Manifest) -> None:
        """Send a published version whole; a manifest with the same digest says where its chunks are now."""
        publication = self._publisher.begin(
            content, version=published.version, step=published.step, manifests=self.state.manifests, whole=True
        )
        manifest = self._publisher.finish(publication)
        assert manifest.digest == published.digest, f"version {manifest.version} is sent again with another digest"
        self._gaps.read_to(weights.chunk_places(manifest))
        self.transactions.commit([manifest_record(manifest, run=self.session.run)])
        self.state.add(manifest)
        self._publisher.committed(publication)
        self.lost = None
        self.session.reporter.notify(f"version {manifest.version} is published again")

    def _read_newest(self) -> None:
        """Read the newest version back, to go on with changes to it, or to find out that it has to be sent again."""
        newest = self.state.newest_version
        if newest < 0:
            return
        if (problem := self._publisher.read_back(self.state.manifests, newest)) is not None:
            self.lost = self.state.manifests[newest]
            self.session.reporter.notify(f"version {newest} cannot be read ({problem}): it is sent again once its weights are here")

    def step_digest(self, policy: PolicyTrainer) -> str | None:
        """The digest of the weights for the ledger's entry of a step; None for a model too large to hash at each step."""
        return policy.weights().digest if self._parameters < DIGEST_BELOW else None

    def checkpoint(self, policy: PolicyTrainer) -> None:
        """Begin a checkpoint of the steps done, unless there is one or the run wants none. Raises `CheckpointError`."""
        if self.checkpoints.store is None:
            return
        self.finish_publishing()
        published = self.state.manifests[policy.version]
        known = published.step == policy.steps_done and self._rebased_at != policy.steps_done
        self.checkpoints.begin(policy, published=published, known=known, parameters=self._parameters, seq=self.state.last_seq)

    def finish_begun(self, *, wait: bool = True) -> None:
        """Commit the version and the checkpoint that are on their way; without `wait`, only what is ready."""
        self.finish_publishing(wait=wait)
        self.checkpoints.finish(wait=wait)

    def export(self, policy: PolicyTrainer) -> None:
        """Write the model as a Hugging Face directory, if the run wants it."""
        if self.session.config.trainer.export:
            target = run_directory(self.session.run) / MODEL
            self.session.reporter.doing(Activity.SAVE, "writing the final model")
            policy.backend.export(target, policy.weights().tensors)
            self.session.reporter.notify(f"final model in {target}")

    def check_manifest(self, record: Record) -> None:
        """Check a record of partition 0 of `weights`: our own, a repetition, or a dead letter."""
        dead_letters = self.session.dead_letters
        try:
            with dead_letters.decoding(record):
                manifest = weights.read(record, run=self.session.run)[1]
        except Unusable as error:
            dead_letters.write(record, error)
            return
        if manifest.version not in self.state.manifests:
            self.session.require_lease()
            dead_letters.write(record, Unusable(f"version {manifest.version} was not published", kind="mismatch"))
        elif manifest.digest != self.state.manifests[manifest.version].digest:
            place = f"{record.topic}/{record.partition}/{record.offset}"
            self.session.reporter.duplicate(f"manifest of version {manifest.version} at {place}")

    def close_run(self, *, steps: int, status: str, reason: str) -> None:
        """Commit the ledger's last entry."""
        self.finish_begun()
        ends = self.session.log.end_offsets([(self.session.topic("weights"), p) for p in range(1, self._publisher.count)])
        self._gaps.read_to((partition, end) for (_, partition), end in ends.items())
        newest = self.state.manifests.get(self.state.newest_version)
        details = json.dumps({"status": status, "reason": reason})
        self.write("run-closed", step=steps, digest=newest.digest if newest else None, details=details)

    @property
    def _parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.state.manifests[0].shapes)
