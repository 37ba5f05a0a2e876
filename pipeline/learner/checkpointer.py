"""Writes a run's checkpoints while training goes on, and keeps the best evaluated one.

The rule: a checkpoint is begun between two steps and read from the live model; the optimizer's next step waits until it is read.
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
"""The folder of a checkpoint, and of a run's directory, that transformers and vLLM load."""
BYTES_PER_PARAMETER = 12
"""A checkpoint's float32 masters and AdamW's two moments."""


@dataclass(slots=True)
class Checkpointer:
    """The checkpoints of one trainer; at most one is on its way."""

    session: Session
    commit: Callable[..., Any]
    """Commits an entry of the ledger."""
    store: CheckpointStore | None = field(init=False)
    """None where the run wants no checkpoints."""
    saved_steps: int | None = None
    """Steps done at the newest checkpoint that can be used."""
    _saving: Saving | None = None
    _started: float = 0.0
    _stalled_s: float = 0.0
    """How long this checkpoint has held up training."""

    def __post_init__(self) -> None:
        """Open the checkpoint directory. Raises `CheckpointError`."""
        self.store = open_store(self.session.config, self.session.run)

    def begin(self, policy: PolicyTrainer, *, published: Manifest, known: bool, parameters: int, seq: int) -> None:
        """Begin a checkpoint of the steps done, unless there is one or the run wants none. Raises `CheckpointError`.

        `published` is the newest version, `known` whether its weights are the current ones, `seq` the number of the ledger's last entry.
        """
        self.finish()
        done, reporter = policy.steps_done, self.session.reporter
        if self.store is None or self.saved_steps == done:
            return
        self._started = time.monotonic()
        faults.reach("checkpoint.before")
        reporter.doing(Activity.SAVE, f"writing checkpoint of step {done}", now=True)
        digest = published.digest if known else policy.weights().digest
        state = State(run=self.session.run, steps=done, version=published.version, digest=digest, seq=seq)
        backend, exports = policy.backend, self.session.config.trainer.export
        tensors = policy.weights().tensors if exports else ()

        def save(directory: Any) -> None:
            backend.save(directory)
            if exports:
                backend.export(directory.parent / MODEL, tensors)

        about_bytes = BYTES_PER_PARAMETER * parameters + exports * published.nbytes
        self._saving = self.store.begin(state, save=save, beside=backend.saves_in_background, about_bytes=about_bytes)
        policy.before_update = self._wait_copied
        self._stalled_s = time.monotonic() - self._started

    def _wait_copied(self) -> None:
        if self._saving is not None:
            waiting = time.monotonic()
            self._saving.wait_copied()
            self._stalled_s += time.monotonic() - waiting

    def finish(self, *, wait: bool = True) -> None:
        """Record the checkpoint that was begun and give it its name; without `wait`, only if its files are durable.

        Raises `CheckpointError` when it could not be written.
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
        """Take note of the evaluation of a version."""
        if self.store is not None and manifest is not None and accuracy is not None:
            self.store.rate(manifest.step, accuracy)
