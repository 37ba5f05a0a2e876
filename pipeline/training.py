"""The model a trainer works on and how far it has come: steps, published versions, checkpoints.

The rule: after each step, live or repeated, the same things follow in the same order: the version it completes, then the checkpoint.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra import faults
from infra.backends import Backend
from infra.broker.state import run_directory
from infra.checkpoints import CheckpointStore, State
from infra.errors import Unrecoverable
from infra.tensors import digest
from pipeline import schedule as rules
from pipeline.chronicle import Chronicle
from pipeline.engines import make_backend
from pipeline.learner import Objective, Step
from pipeline.session import Session
from pipeline.weights import fetch

BYTES_PER_PARAMETER = 12
"""A checkpoint's float32 masters and AdamW's two moments."""


@dataclass(slots=True, kw_only=True)
class Training:
    """A backend between two steps."""

    session: Session
    chronicle: Chronicle
    backend: Backend
    objective: Objective
    store: CheckpointStore | None
    steps_done: int = 0
    digest: str | None = None
    """Of the newest published version."""
    saved: int | None = None
    """Steps done at the newest checkpoint that can be used."""
    _proximal: int | None = None
    """The version whose weights the backend keeps as its snapshot."""

    @classmethod
    def open(cls, session: Session, chronicle: Chronicle) -> "Training":
        """Load the initial model and look after the checkpoint directory. Raises `BackendError`, `CheckpointError`."""
        backend = make_backend(session.config, steps=session.steps)
        return cls(session=session, chronicle=chronicle, backend=backend, objective=Objective.of(session.config), store=open_store(session))

    def begin(self) -> None:
        """Open the run with version 0, or make sure that the model is the one it was opened with."""
        if self.chronicle.story.opened is None:
            session = self.session
            told = {"config": json.loads(session.record.config), "info": dict(session.info), "fingerprint": self.backend.fingerprint()}
            self.chronicle.write("run-opened", details=json.dumps(told))
        self.publish(version=0)

    def step(self) -> Step:
        """An optimizer step to be fed with groups. Raises `LogError` when a snapshot has to come from the log and is not there."""
        if self.objective.proximal == "snapshot":
            self._hold_snapshot()
        return Step(self.backend, self.objective)

    def advance(self) -> None:
        """Count a committed step, publish the version it completes if it completes one, and write a checkpoint if one is due."""
        session, done = self.session, self.steps_done
        self.steps_done += 1
        session.values.update(step=self.steps_done)
        if rules.publishes(done, steps=session.steps, steps_per_version=session.rules.steps_per_version):
            self.publish(version=self.version)
        if (every := session.config.trainer.checkpoint_every) and self.steps_done % every == 0:
            self.checkpoint()

    @property
    def version(self) -> int:
        """The newest version that is published after the steps done."""
        count = rules.versions_of if self.steps_done == self.session.steps else rules.version_after
        return count(self.steps_done, steps_per_version=self.session.rules.steps_per_version)

    def _hold_snapshot(self) -> None:
        """Keep the weights with which the version under way began; after a restart within it they are those that it was published with."""
        per_version = self.session.rules.steps_per_version
        version = rules.version_after(self.steps_done, steps_per_version=per_version)
        if version == self._proximal:
            return
        begins = self.steps_done % per_version == 0
        manifest = self.chronicle.story.manifests[version]
        self.backend.take_snapshot(None if begins else fetch(self.session.log, manifest, run=self.session.run))
        self._proximal = version

    def publish(self, *, version: int) -> None:
        """Publish the weights as `version`; one that is published already must have the same digest. Raises `Unrecoverable`."""
        tensors = self.backend.weights()
        recorded = self.chronicle.story.manifests.get(version)
        self.digest = self.chronicle.publish(tensors, version=version, step=self.steps_done)
        if recorded is not None and (found := digest(tensors)) != recorded.digest:
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
        published = self.chronicle.story.manifests[self.version]
        found = published.digest if published.step == self.steps_done else digest(self.backend.weights())
        about = BYTES_PER_PARAMETER * sum(math.prod(shape) for shape in published.shapes)
        state = State(run=session.run, steps=self.steps_done, version=self.version, digest=found, seq=self.chronicle.story.last_seq)

        def record(size: int) -> None:
            measured = {"bytes": float(size), "write_s": time.monotonic() - started}
            self.chronicle.write("checkpoint", step=state.steps, version=state.version, digest=state.digest, metrics=measured)

        size = self.store.write(state, save=self.backend.save, record=record, about_bytes=about)
        self.saved = self.steps_done
        session.values.update(checkpoint_step=self.steps_done, checkpoint_bytes=size, checkpoint_s=time.monotonic() - started)

    def reopen(self) -> None:
        """Put the initial model in the place of one that was half replaced."""
        self.backend.close()
        self.backend = make_backend(self.session.config, steps=self.session.steps)
        self._proximal = None

    def export(self, say: Callable[[str], None]) -> None:
        """Write the model as a Hugging Face directory, if the run wants it."""
        if self.session.config.trainer.export:
            target = run_directory(self.session.run) / "model"
            self.session.doing("writing the final model")
            self.backend.export(target)
            say(f"final model in {target}")


def open_store(session: Session) -> CheckpointStore | None:
    """The run's checkpoints, None when it wants none. Raises `CheckpointError`."""
    chosen = session.config.trainer
    if not chosen.checkpoint_every:
        return None
    directory = Path(chosen.checkpoint_dir) / session.run if chosen.checkpoint_dir else run_directory(session.run) / "checkpoints"
    return CheckpointStore(directory, keep_last=chosen.checkpoint_keep_last, keep_every=chosen.checkpoint_keep_every)
