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
from penstock.infra.checkpoints import CheckpointStore, State
from penstock.infra.errors import Unrecoverable
from penstock.infra.log import Transactions
from penstock.infra.paths import run_directory
from penstock.pipeline.learner.chunk_gaps import ChunkGaps
from penstock.pipeline.learner.fingerprint import arithmetic_of
from penstock.pipeline.learner.policy_trainer import PolicyTrainer, Weights, open_store
from penstock.pipeline.learner.repeat_step import Difference
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.weight_sync import manifest_record, send_chunks
from penstock.pipeline.scheduling import rules
from penstock.topics import ledger, weights
from penstock.topics.ledger import Entry
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Outgoing, Record

BYTES_PER_PARAMETER = 12
"""A checkpoint's float32 masters and AdamW's two moments."""
DIGEST_BELOW = 100_000_000
"""Models with fewer parameters have the digest of their weights in every step of the ledger, others in every version."""


@dataclass(slots=True)
class RunWriter:
    """Writes what a `PolicyTrainer` has done."""

    session: Session
    transactions: Transactions
    state: LedgerState
    """The ledger and the versions as this writer has left them."""
    store: CheckpointStore | None = field(init=False)
    """None where the run wants no checkpoints."""
    newest_offset: int = -1
    """Where the newest entry of this writer stands."""
    saved_steps: int | None = None
    """Steps done at the newest checkpoint that can be used."""
    _rebased_at: int | None = None
    """Steps done where the weights ceased to be those of the version that was published there."""
    _partitions: int = field(init=False)
    """Partitions of `weights` that carry chunks, numbered from 1."""
    _gaps: ChunkGaps = field(init=False)

    def __post_init__(self) -> None:
        """Open the checkpoint directory. Raises `CheckpointError`."""
        self.store = open_store(self.session.config, self.session.run)
        self._partitions = (self.session.log.partitions(self.session.topic("weights")) or 2) - 1
        self._gaps = ChunkGaps(self.session)
        self._gaps.skip(self.state.manifests.values())

    def begin(self, policy: PolicyTrainer) -> None:
        """Open the run with version 0, or make sure that the model is the one it was opened with."""
        if self.state.opened is None:
            session = self.session
            fingerprint = arithmetic_of(policy.backend, session.config)
            details = {"config": json.loads(session.record.config), "info": dict(session.info), "fingerprint": fingerprint}
            self.write("run-opened", details=json.dumps(details))
        self.publish(policy.weights(), version=0, step=policy.steps_done)
        policy.release_weights()

    def after_step(self, policy: PolicyTrainer) -> None:
        """Publish the version that the newest step completes if it completes one, and write a checkpoint if one is due."""
        session, done = self.session, policy.steps_done
        session.reporter.values.update(step=done)
        if rules.publishes(done - 1, steps=session.steps, steps_per_version=session.schedule.steps_per_version):
            self.publish(policy.weights(), version=policy.version, step=done)
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
        self.session.reporter.say(f"rebased after step {done - 1}: {what}; the run goes on from the weights that are here")
        if not differences:
            return
        self._rebased_at = done
        if policy.version not in self.state.manifests:
            self.publish(policy.weights(), version=policy.version, step=done)
        elif done == self.session.steps and policy.weights_of is not None:
            policy.release_weights()
            policy.backend.load_weights(policy.weights_of(policy.version))
            self._rebased_at = None
        self.checkpoint(policy)
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
        """Send a version's chunks, then its manifest with the ledger's entry; a published one must have the same digest.

        Raises `Unrecoverable` where it has another.
        """
        session, started = self.session, time.monotonic()
        published = self.state.manifests.get(version)
        if published is not None:
            if content.digest != published.digest:
                origin = "repeating it from the log gave" if version else "the model directory holds"
                raise Unrecoverable(
                    f"version {version}: the recorded weights digest is {published.digest[:16]}…, {origin} {content.digest[:16]}…"
                )
        else:
            manifest = send_chunks(
                session.producer,
                content.tensors,
                digest=content.digest,
                run=session.run,
                version=version,
                step=step,
                partitions=self._partitions,
                max_bytes=session.config.weights.chunk_mib * 2**20,
            )
            self._gaps.read_to(zip(manifest.chunk_partitions, manifest.chunk_offsets, strict=True))
            measured = {"bytes": float(manifest.nbytes), "publish_s": time.monotonic() - started}
            record = manifest_record(manifest, run=session.run)
            self.write("version", record, version=version, step=step, digest=manifest.digest, metrics=measured)
            self.state.add(manifest)
        session.reporter.values.update(version=version)

    def step_digest(self, policy: PolicyTrainer) -> str | None:
        """The digest of the weights for the ledger's entry of a step; None for a model too large to hash at each step."""
        return policy.weights().digest if self._parameters < DIGEST_BELOW else None

    def checkpoint(self, policy: PolicyTrainer) -> None:
        """Write a checkpoint of the steps done, unless there is one or the run wants none. Raises `CheckpointError`."""
        reporter, started, done = self.session.reporter, time.monotonic(), policy.steps_done
        if self.store is None or self.saved_steps == done:
            return
        faults.reach("checkpoint.before")
        reporter.doing(f"writing checkpoint of step {done}", now=True)
        version = policy.version
        published = self.state.manifests[version]
        known = published.step == done and self._rebased_at != done
        digest = published.digest if known else policy.weights().digest
        state = State(run=self.session.run, steps=done, version=version, digest=digest, seq=self.state.last_seq)

        def record(size: int) -> None:
            measured = {"bytes": float(size), "write_s": time.monotonic() - started}
            self.write("checkpoint", step=state.steps, version=state.version, digest=state.digest, metrics=measured)

        size = self.store.write(state, save=policy.backend.save, record=record, about_bytes=BYTES_PER_PARAMETER * self._parameters)
        self.saved_steps = done
        reporter.values.update(checkpoint_step=done, checkpoint_bytes=size, checkpoint_s=time.monotonic() - started)

    def export(self, policy: PolicyTrainer) -> None:
        """Write the model as a Hugging Face directory, if the run wants it."""
        if self.session.config.trainer.export:
            target = run_directory(self.session.run) / "model"
            self.session.reporter.doing("writing the final model")
            policy.backend.export(target)
            self.session.reporter.say(f"final model in {target}")

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
            self.session.require_place()
            dead_letters.write(record, Unusable(f"version {manifest.version} was not published", kind="mismatch"))
        elif manifest != self.state.manifests[manifest.version]:
            place = f"{record.topic}/{record.partition}/{record.offset}"
            self.session.reporter.duplicate(f"manifest of version {manifest.version} at {place}")

    def close_run(self, *, steps: int, status: str, reason: str) -> None:
        """Commit the ledger's last entry."""
        ends = self.session.log.end_offsets([(self.session.topic("weights"), p) for p in range(1, self._partitions + 1)])
        self._gaps.read_to((partition, end) for (_, partition), end in ends.items())
        newest = self.state.manifests.get(self.state.newest_version)
        details = json.dumps({"status": status, "reason": reason})
        self.write("run-closed", step=steps, digest=newest.digest if newest else None, details=details)

    @property
    def _parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.state.manifests[0].shapes)
