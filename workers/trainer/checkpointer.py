"""Writes checkpoints in the background and keeps the best evaluated one.

A checkpoint is started between two steps and read from the live model; the next optimizer update waits until it has been read.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.infra import faults
from penstock.infra.checkpoints.rules import State
from penstock.infra.checkpoints.saving import Saving
from penstock.infra.checkpoints.store import CheckpointStore
from penstock.pipeline.learner.policy_trainer import PolicyTrainer
from penstock.pipeline.runtime.factories import open_store
from penstock.pipeline.runtime.session import Session
from penstock.topics.metrics import Activity
from penstock.topics.weights import Manifest

MODEL = "model"
"""Folder in a checkpoint and in a run's directory that transformers and vLLM load."""
BYTES_PER_PARAMETER = 12
"""A checkpoint's float32 masters and AdamW's two moments."""


@dataclass(slots=True)
class Checkpointer:
    """The checkpoints of one trainer, of which at most one is being written."""

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
        """Open the checkpoint directory. Raises `CheckpointError`."""
        self.store = open_store(self.session.config, self.session.run)

    def start(self, policy: PolicyTrainer, *, published: Manifest, is_current: bool, parameters: int, seq: int) -> None:
        """Start a checkpoint of the steps done, unless it exists or the run has none. Raises `CheckpointError`.

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
        if self._saving is not None:
            waiting = time.monotonic()
            self._saving.wait_copied()
            self._stalled_s += time.monotonic() - waiting

    def finish(self, *, wait: bool = True) -> None:
        """Record the checkpoint being written and give it its name; without `wait`, only if its files are durable.

        Raises `CheckpointError` if it could not be written.
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
            self.commit("checkpoint", step=state.steps, version=state.version, digest=state.digest, metrics=measured)

        size = self.store.finish(saving, record=record)
        self.saved_steps = state.steps
        self.session.reporter.values.update(
            checkpoint_step=state.steps, checkpoint_bytes=size, checkpoint_s=time.monotonic() - self._started
        )

    def rate(self, manifest: Manifest | None, accuracy: float | None) -> None:
        """Pass the evaluation of a version to the store, which keeps the best checkpoint."""
        if self.store is not None and manifest is not None and accuracy is not None:
            self.store.rate(manifest.step, accuracy)
