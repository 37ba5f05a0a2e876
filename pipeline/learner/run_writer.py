"""A run's trainer between two steps: its model, and what is written of it: steps, published versions, checkpoints.

The rule: after each step, live or repeated, the same things follow in the same order: the version it completes, then the checkpoint.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.infra import faults
from penstock.infra.backends.base import Backend
from penstock.infra.checkpoints import CheckpointStore, State
from penstock.infra.errors import Unrecoverable
from penstock.infra.paths import run_directory
from penstock.pipeline.config.load import Config
from penstock.pipeline.config.plugins import source_digest
from penstock.pipeline.learner.chronicle import Chronicle
from penstock.pipeline.learner.policy_trainer import Course
from penstock.pipeline.learner.train_step import Step
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.weight_sync import fetch
from penstock.pipeline.scheduling import schedule as rules

BYTES_PER_PARAMETER = 12
"""A checkpoint's float32 masters and AdamW's two moments."""
DIGEST_BELOW = 100_000_000
"""Models with fewer parameters have the digest of their weights in every step of the ledger, others in every version."""


@dataclass(slots=True, kw_only=True)
class Training:
    """A course through the steps and the pen that writes it down."""

    session: Session
    chronicle: Chronicle
    course: Course
    store: CheckpointStore | None
    digest: str | None = None
    """Of the newest published version."""
    saved: int | None = None
    """Steps done at the newest checkpoint that can be used."""

    @classmethod
    def open(cls, session: Session, chronicle: Chronicle) -> "Training":
        """Load the initial model and look after the checkpoint directory. Raises `BackendError`, `CheckpointError`."""
        course = Course.open(
            session.config,
            steps=session.steps,
            weights_of=lambda version: fetch(session.log, chronicle.story.manifests[version], run=session.run),
        )
        return cls(session=session, chronicle=chronicle, course=course, store=open_store(session.config, session.run))

    @property
    def backend(self) -> Backend:
        """The model."""
        return self.course.backend

    @property
    def steps_done(self) -> int:
        """Steps of this run that the model has taken."""
        return self.course.steps_done

    def begin(self) -> None:
        """Open the run with version 0, or make sure that the model is the one it was opened with."""
        if self.chronicle.story.opened is None:
            session = self.session
            fingerprint = arithmetic_of(self.backend, session.config)
            told = {"config": json.loads(session.record.config), "info": dict(session.info), "fingerprint": fingerprint}
            self.chronicle.write("run-opened", details=json.dumps(told))
        self.publish(version=0)
        self.course.let_go()

    def step(self) -> Step:
        """An optimizer step to be fed with groups. Raises `LogError` when a snapshot has to come from the log and is not there."""
        return self.course.step()

    def digest_of_step(self) -> str | None:
        """The digest of the weights for the ledger's entry of a step; None for a model too large to hash it at each."""
        shapes = self.chronicle.story.manifests[0].shapes
        small = sum(math.prod(shape) for shape in shapes) < DIGEST_BELOW
        return self.course.weights().digest if small else None

    def advance(self) -> None:
        """Count a committed step, and do what follows it."""
        self.course.steps_done += 1
        self.follow_up()

    def follow_up(self) -> None:
        """After a step: publish the version it completes if it completes one, and write a checkpoint if one is due."""
        session, done = self.session, self.steps_done
        session.values.update(step=done)
        if rules.publishes(done - 1, steps=session.steps, steps_per_version=session.rules.steps_per_version):
            self.publish(version=self.course.version)
        if (every := session.config.trainer.checkpoint_every) and done % every == 0:
            self.checkpoint()
        self.course.let_go()

    def publish(self, *, version: int) -> None:
        """Publish the weights as `version`; one that is published already must have the same digest. Raises `Unrecoverable`."""
        weights, recorded = self.course.weights(), self.chronicle.story.manifests.get(version)
        self.digest = self.chronicle.publish(weights, version=version, step=self.steps_done)
        if recorded is not None and (found := weights.digest) != recorded.digest:
            made = "repeating it from the log gave" if version else "the model directory holds"
            raise Unrecoverable(f"version {version}: the recorded weights digest is {recorded.digest[:16]}…, {made} {found[:16]}…")
        self.session.values.update(version=version)

    def checkpoint(self) -> None:
        """Write a checkpoint of the steps done, unless there is one or the run wants none. Raises `CheckpointError`."""
        session, started = self.session, time.monotonic()
        if self.store is None or self.saved == self.steps_done:
            return
        faults.reach("checkpoint.before")
        session.doing(f"writing checkpoint of step {self.steps_done}", now=True)
        version = self.course.version
        published = self.chronicle.story.manifests[version]
        found = published.digest if published.step == self.steps_done else self.course.weights().digest
        about = BYTES_PER_PARAMETER * sum(math.prod(shape) for shape in published.shapes)
        state = State(run=session.run, steps=self.steps_done, version=version, digest=found, seq=self.chronicle.story.last_seq)

        def record(size: int) -> None:
            measured = {"bytes": float(size), "write_s": time.monotonic() - started}
            self.chronicle.write("checkpoint", step=state.steps, version=state.version, digest=state.digest, metrics=measured)

        size = self.store.write(state, save=self.backend.save, record=record, about_bytes=about)
        self.saved = self.steps_done
        session.values.update(checkpoint_step=self.steps_done, checkpoint_bytes=size, checkpoint_s=time.monotonic() - started)

    def export(self, say: Callable[[str], None]) -> None:
        """Write the model as a Hugging Face directory, if the run wants it."""
        if self.session.config.trainer.export:
            target = run_directory(self.session.run) / "model"
            self.session.doing("writing the final model")
            self.backend.export(target)
            say(f"final model in {target}")


def open_store(config: Config, run: str, *, to_read: bool = False) -> CheckpointStore | None:
    """The run's checkpoints, None when it wants none; `to_read` leaves alone what a trainer may be writing. Raises `CheckpointError`."""
    chosen = config.trainer
    if not chosen.checkpoint_every:
        return None
    directory = Path(chosen.checkpoint_dir) / run if chosen.checkpoint_dir else run_directory(run) / "checkpoints"
    return CheckpointStore(directory, keep_last=chosen.checkpoint_keep_last, keep_every=chosen.checkpoint_keep_every, to_read=to_read)


def arithmetic_of(backend: Backend, config: Config) -> dict[str, str | int]:
    """What a step's last bits depend on: the backend's fingerprint, and the source of each function that a user brought along."""
    own = {"algorithm.loss": config.algorithm.loss, "algorithm.advantage": config.advantage}
    return backend.fingerprint() | {key: source_digest(name)[:16] for key, name in own.items() if ":" in name}
