"""Writes a trainer's ledger entries, policy versions and checkpoints under one transactional id.

One ledger record commits a step; a manifest and its ledger record in one transaction commit a version, in the thread that has sent the
chunks, so that no worker waits for the step that the trainer computes meanwhile. After each step, live or repeated, the version that it
completes is published before the checkpoint is written. A checkpoint is written in the background from the live model; the next optimizer
update waits until that has been read.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.infra import faults
from penstock.infra.checkpoints import MANIFEST, CheckpointStore, Saving, State
from penstock.infra.errors import CheckpointError, LogError, LogUnreachable, Unrecoverable
from penstock.infra.log import Transactions
from penstock.infra.paths import run_directory
from penstock.infra.tensors.stream import expected_nbytes
from penstock.pipeline.learner.policy_trainer import Difference, PolicyTrainer, Weights, arithmetic_of
from penstock.pipeline.runtime.factories import open_store
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.weights.publish import deletable, is_anchor, manifest_record
from penstock.pipeline.scheduling import rules
from penstock.topics import ledger, weights
from penstock.topics.ledger import Entry
from penstock.topics.metrics import Activity
from penstock.topics.weights import Manifest
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Outgoing, Record
from penstock.workers.trainer.weight_publisher import ChunkGaps, Publication, WeightPublisher

MODEL = "model"
"""Folder in a checkpoint and in a run's directory that transformers and vLLM load."""
BYTES_PER_PARAMETER = 12
"""A checkpoint's float32 masters and AdamW's two moments."""


@dataclass(slots=True)
class Checkpointer:
    """Writes the checkpoints of one trainer, one at a time in the background."""

    session: Session
    commit: Callable[..., Any]
    """Commits a ledger entry."""
    store: CheckpointStore | None = field(init=False)
    """None if the run has no checkpoints."""
    saved_steps: int | None = None
    """Steps done at the newest usable checkpoint."""
    _saving: Saving | None = None
    _started: float = 0.0
    _stalled_s: float = 0.0
    """How long this checkpoint has delayed training."""

    def __post_init__(self) -> None:
        self.store = open_store(self.session.config, self.session.run)

    def start(self, policy: PolicyTrainer, *, published: Manifest, is_current: bool, parameters: int, seq: int) -> None:
        """Start to write a checkpoint of the current step, unless it exists or the run keeps none. Raises `CheckpointError`.

        `published` is the newest version, `is_current` is True if its weights are the current ones, `seq` numbers the last ledger entry.
        """
        self.finish()
        done, reporter = policy.steps_done, self.session.reporter
        if self.store is None or self.saved_steps == done:
            return
        self._started = time.monotonic()
        faults.reach("checkpoint.before")
        reporter.doing(Activity.SAVE, f"writing checkpoint of step {done}", now=True)
        digest = published.digest if is_current else policy.weights().digest
        state = State(run=self.session.run, steps=done, version=published.version, digest=digest, seq=seq)
        backend, exports = policy.backend, self.session.config.trainer.export
        tensors = policy.weights().tensors if exports else ()

        def save(directory: Any) -> None:
            backend.save(directory)
            if exports:
                backend.export(directory.parent / MODEL, tensors)

        about_bytes = BYTES_PER_PARAMETER * parameters + exports * published.nbytes
        self._saving = self.store.start(state, save=save, in_background=backend.saves_in_background, about_bytes=about_bytes)
        policy.before_update = self._wait_copied
        self._stalled_s = time.monotonic() - self._started

    def _wait_copied(self) -> None:
        """Wait until the checkpoint being written no longer reads the live model; called before the model changes."""
        if self._saving is not None:
            waiting = time.monotonic()
            self._saving.wait_copied()
            self._stalled_s += time.monotonic() - waiting

    def finish(self, *, wait: bool = True) -> None:
        """Complete the checkpoint being written, if any: commit its ledger entry and rename its folder; without `wait`, only if on disk.

        Raises `CheckpointError` if it could not be written, `Fenced` if another trainer has acquired this one's lease.
        """
        saving = self._saving
        if saving is None or not (wait or saving.ended):
            return
        assert self.store is not None
        self._saving, waiting, state = None, time.monotonic(), saving.state
        stalled_s = self._stalled_s

        def record(size: int) -> None:
            now = time.monotonic()
            measured = {"bytes": float(size), "write_s": now - self._started, "stall_s": stalled_s + now - waiting}
            with saving.explained():
                details = json.dumps({"manifest": ledger.digest((saving.temporary / MANIFEST).read_bytes())})
            self.commit("checkpoint", step=state.steps, version=state.version, digest=state.digest, metrics=measured, details=details)

        try:
            size = self.store.finish(saving, record=record)
        except CheckpointError:
            self.session.require_lease()  # a successor deletes unfinished checkpoints
            raise
        self.saved_steps = state.steps
        self.session.reporter.values.update(
            checkpoint_step=state.steps, checkpoint_bytes=size, checkpoint_s=time.monotonic() - self._started
        )

    def rate(self, manifest: Manifest | None, accuracy: float | None) -> None:
        """Pass the accuracy of a version to the store, which retains the best checkpoint."""
        if self.store is not None and manifest is not None and accuracy is not None:
            self.store.rate(manifest.step, accuracy)


DIGEST_BELOW = 100_000_000
"""Models with fewer parameters record a weights digest with each step, others with each version."""


@dataclass(slots=True)
class RunWriter:
    """Records steps, versions and checkpoints of a `PolicyTrainer`."""

    session: Session
    transactions: Transactions
    state: LedgerState
    """The ledger and the versions after this writer's last commit."""
    checkpoints: Checkpointer = field(init=False)
    newest_offset: int = -1
    """Ledger offset of this writer's newest entry."""
    lost: Manifest | None = None
    """The newest version, while its chunks cannot be read and have not been sent again."""
    _rebased_at: int | None = None
    """Steps done at which the current weights differ from the version published there."""
    _publisher: WeightPublisher = field(init=False)
    _publication: Publication | None = None
    """The version whose chunks are being sent."""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    """Held while a ledger entry is committed and its effects are recorded."""
    _gaps: ChunkGaps = field(init=False)

    def __post_init__(self) -> None:
        session = self.session
        self.checkpoints = Checkpointer(session, self.write)
        count = session.log.partitions(session.topic("weights")) or 2
        self._publisher = WeightPublisher(session.log, session.run, session.config.weights, count, notify=session.reporter.notify)
        self._gaps = ChunkGaps(session, dict(self.state.chunk_ends))

    def open_run(self, policy: PolicyTrainer) -> None:
        """Publish version 0 in a new run; otherwise check that the model is the one the run started with."""
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
        """Publish the version that the newest step completes, if any, and start a checkpoint if one is due."""
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
        """Record in the ledger how repeated steps differ from it, and continue from the repeated weights.

        A checkpoint is written at once, because it alone holds the new optimizer state. A version that was published keeps its weights.
        """
        self.finish_pending()
        done, first = policy.steps_done, differences[0][0].step if differences else None
        details = {
            "fingerprint": fingerprint,
            "changed": changed,
            "differences": [
                {"step": entry.step, "name": difference.name, "recorded": difference.recorded, "found": difference.recomputed}
                for entry, difference in differences
            ],
        }
        measured = {"differing_steps": float(len({entry.step for entry, _ in differences}))}
        self.write(
            "rebased", step=done, version=policy.version, digest=policy.weights().digest, metrics=measured, details=json.dumps(details)
        )
        count = f"{measured['differing_steps']:.0f} of the steps repeated from the log" if differences else "no step repeated from the log"
        what = f"{count} differs from the ledger" if not differences else f"{count} differ from the ledger, the first is step {first}"
        self.session.reporter.notify(f"rebased after step {done - 1}: {what}; the run continues from the repeated weights")
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
        self.finish_pending()
        policy.release_weights()

    def write(self, kind: ledger.EntryKind, *also: Outgoing, **fields: Any) -> Entry:
        """Commit a ledger entry with these fields of `Entry`, and the records `also` in the same transaction; return the entry."""
        session = self.session
        with self._lock:
            entry = Entry(seq=self.state.last_seq + 1, kind=kind, time_ns=time.time_ns(), previous=self.state.head, **fields)
            with session.reporter.encoding:
                record = ledger.outgoing(entry, run=session.run, topic=session.topic("ledger"), key=kind.encode())
            faults.reach(f"ledger.{kind}.before")
            self.newest_offset = self.transactions.commit([*also, record])[-1]
            faults.reach(f"ledger.{kind}.after")
            self.state.last_seq, self.state.head = entry.seq, ledger.digest(record.value)
        return entry

    def publish(self, content: Weights, *, version: int, step: int) -> None:
        """Wait until the previous version is committed, then start to send and commit this one, unless it is published.

        Raises `Unrecoverable` if the version is published with another digest.
        """
        self.finish_publishing()
        published = self.state.manifests.get(version)
        if published is not None:
            if content.digest != published.digest:
                origin = "repeating its steps from the log gave" if version else "the model directory has"
                fix = "restore package versions, threads and device" if version else "restore the model that the run was created with"
                raise Unrecoverable(f"version {version} has digest {published.digest[:16]}…, but {origin} {content.digest[:16]}…: {fix}")
            if self.lost is not None and self.lost.version == version:
                self._publish_again(content, published)
            self.session.reporter.values.update(version=version)
            return
        started = time.monotonic()
        if content.adapted is None:
            assert content.tensors, "a model has parameters"  # a copy: the model may change from here on
        self._publication = self._publisher.start(
            content, version=version, step=step, manifests=self.state.manifests, copied_s=time.monotonic() - started, then=self._commit_sent
        )

    @property
    def publishing(self) -> bool:
        return self._publication is not None

    def finish_publishing(self, *, wait: bool = True) -> None:
        """Wait until the version being sent is committed, or raise the error that prevented it; without `wait`, only if it has ended."""
        publication, config, anchored = self._publication, self.session.config.weights, False
        if publication is not None:
            if not (wait or publication.sent):
                return
            publication.awaited = time.monotonic()
            manifest = self._publisher.finish(publication)
            self._publication = None
            if manifest.version not in self.state.manifests:
                self._gaps.read()
                self._commit_version(publication, manifest)
            self.session.reporter.values.update(version=manifest.version)
            anchored = is_anchor(manifest, every=config.anchor_every)
        anchored |= self._publisher.finish_snapshot()
        if anchored and config.keep == "chain":
            self._delete_old_chunks()

    def _commit_sent(self, publication: Publication, manifest: Manifest) -> None:
        """Commit a version in the thread that has sent it; left to `finish_publishing` if there are foreign records to read first."""
        self._gaps.add(weights.chunk_places(manifest))
        if not self._gaps.unread:
            self._commit_version(publication, manifest)

    def _commit_version(self, publication: Publication, manifest: Manifest) -> None:
        """Commit a manifest and its ledger entry, and retain the version as base of the next delta."""
        with self._lock:
            origin = self.state.manifests.get(0, manifest)
            now = time.monotonic()
            measured = {
                "bytes": float(manifest.nbytes),
                "full_bytes": float(sum(expected_nbytes(dtype, shape) for _, dtype, shape in weights.layout(origin))),
                "delta": float(manifest.encoding == "delta"),
                "adapter": float(manifest.encoding == "adapter"),
                "publish_s": now - publication.started + publication.copied_s,
                "stall_s": publication.copied_s + (now - publication.awaited if publication.awaited is not None else 0.0),
            }
            record = manifest_record(manifest, run=self.session.run)
            self.write("version", record, version=manifest.version, step=manifest.step, digest=manifest.digest, metrics=measured)
            self.state.add(manifest)
            self._publisher.committed(publication)
            self._publisher.start_snapshot(self.state.manifests, self._commit_snapshot)

    def _commit_snapshot(self, manifest: Manifest) -> None:
        """Commit the manifest of a version that was sent again in full, in the thread that has sent it."""
        with self._lock:
            self._gaps.add(weights.chunk_places(manifest))
            faults.reach("snapshot.before")
            self.transactions.commit([manifest_record(manifest, run=self.session.run)])
            faults.reach("snapshot.after")
            self.state.add(manifest)

    def _delete_old_chunks(self) -> None:
        """Delete the chunks that neither a worker nor a resume from a checkpoint can need; a refusal by the broker is only logged."""
        per_version = self.session.schedule.steps_per_version
        store = self.checkpoints.store
        steps = store.steps() if store is not None and per_version > 1 else []  # a resume between two versions reads the earlier one
        needed = {rules.version_after(done, steps_per_version=per_version) for done in steps} & self.state.manifests.keys()
        every = self.session.config.weights.anchor_every
        before = deletable(self.state.manifests, ends=self._gaps.ends, every=every, needed=needed)
        topic = self.session.topic("weights")
        try:
            self.session.log.delete_records({(topic, partition): offset for partition, offset in before.items()})
        except LogUnreachable:
            raise
        except LogError as error:
            self.session.reporter.throttled.notify("weights that stay", f"old weights were not deleted; trying again later: {error}")

    def repair_newest(self) -> None:
        """Send the newest version again if its chunks cannot be read and its weights are in memory. Raises `LogError`."""
        newest = self.state.newest_version
        published = self.state.manifests.get(newest)
        content = None if published is None or self._publication is not None else self._publisher.newest(published)
        if published is None or content is None:
            return
        if (problem := self._publisher.check_chunks(self.state.manifests, newest)) is not None:
            self.session.reporter.notify(f"weight version {newest} can no longer be read ({problem}): sending it again")
            self._publish_again(content, published)

    def _publish_again(self, content: Weights, published: Manifest) -> None:
        """Send a version whose chunks are lost again, as a full snapshot; its new manifest has the same digest and the new offsets."""
        version, manifests = published.version, self.state.manifests
        publication = self._publisher.start(content, version=version, step=published.step, manifests=manifests, full=True)
        manifest = self._publisher.finish(publication)
        assert manifest.digest == published.digest, f"version {manifest.version} is sent again with another digest"
        self._commit_snapshot(manifest)
        self._gaps.read()
        self._publisher.committed(publication)
        self.lost = None
        self.session.reporter.notify(f"weight version {manifest.version} was published again")

    def _read_newest(self) -> None:
        """Read the newest version as base of the next delta; if that fails, mark the version to be sent again."""
        newest = self.state.newest_version
        if newest < 0:
            return
        if (problem := self._publisher.read_back(self.state.manifests, newest)) is not None:
            self.lost = self.state.manifests[newest]
            self.session.reporter.notify(f"weight version {newest} cannot be read ({problem}): it is sent again after the recovery")

    def step_digest(self, policy: PolicyTrainer) -> str | None:
        """Weights digest for the ledger entry of a step; None for a model too large to hash at each step."""
        return policy.weights().digest if self._parameters < DIGEST_BELOW else None

    def checkpoint(self, policy: PolicyTrainer) -> None:
        """Start to write a checkpoint of the current step, unless it exists or the run keeps none. Raises `CheckpointError`."""
        if self.checkpoints.store is None:
            return
        self.finish_publishing()
        published = self.state.manifests[policy.version]
        is_current = published.step == policy.steps_done and self._rebased_at != policy.steps_done
        self.checkpoints.start(policy, published=published, is_current=is_current, parameters=self._parameters, seq=self.state.last_seq)

    def finish_pending(self, *, wait: bool = True) -> None:
        """Commit the version being sent and the checkpoint being written; without `wait`, only what is ready."""
        self.finish_publishing(wait=wait)
        self.checkpoints.finish(wait=wait)

    def stop(self) -> None:
        """Commit what is in progress, but for a snapshot of a version that is already published: it is abandoned."""
        self.finish_pending()
        self._publisher.abandon_snapshot()

    def export(self, policy: PolicyTrainer) -> None:
        """Write the model in Hugging Face format, if `trainer.export` is set."""
        if self.session.config.trainer.export:
            target = run_directory(self.session.run) / MODEL
            self.session.reporter.doing(Activity.SAVE, "writing the final model")
            policy.backend.export(target, policy.weights().tensors)
            self.session.reporter.notify(f"the final model is in {target}")

    def check_manifest(self, record: Record) -> None:
        """Check a record of partition 0 of `weights`: a copy of a manifest is reported as a duplicate, a foreign record is a dead letter.

        Raises `Fenced` if another trainer has acquired this one's lease.
        """
        dead_letters = self.session.dead_letters
        try:
            with dead_letters.decoding(record):
                manifest = weights.read(record, run=self.session.run)[1]
        except Unusable as error:
            dead_letters.write(record, error)
            return
        with self._lock:  # the version may just have been committed
            published = self.state.manifests.get(manifest.version)
        if published is None:
            self.session.require_lease()
            dead_letters.write(record, Unusable(f"version {manifest.version} was not published", kind="mismatch"))
        elif manifest.digest != published.digest:
            self.session.reporter.duplicate(f"manifest of version {manifest.version} at {record.id}")

    def close_run(self, *, steps: int, status: str, reason: str, **others: object) -> None:
        """Commit the run's last ledger entry, with these fields as its details, after the version and checkpoint in progress."""
        self.finish_pending()
        if self._publisher.snapshot is not None:
            self.session.reporter.doing(Activity.SAVE, "sending the weights in full")
            self._publisher.snapshot.ended.wait()
            self.finish_publishing()
        ends = self.session.log.end_offsets([(self.session.topic("weights"), p) for p in range(1, self._publisher.count)])
        self._gaps.add((partition, end) for (_, partition), end in ends.items())
        self._gaps.read()
        newest = self.state.manifests.get(self.state.newest_version)
        details = json.dumps({"status": status, "reason": reason, **others})
        self.write("run-closed", step=steps, digest=newest.digest if newest else None, details=details)

    @property
    def _parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.state.manifests[0].shapes)
