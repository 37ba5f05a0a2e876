"""Checkpoints of a run on this machine, which its tracker registers in MLflow.

Only those that are in the ledger and on the disk; a tracker on another machine than the trainer registers nothing.
"""

from dataclasses import dataclass, field

from penstock.infra.mlflow.registry import ModelVersion, RegisteredCheckpoints
from penstock.pipeline.runtime.factories import open_store
from penstock.pipeline.runtime.session import Session
from penstock.topics.ledger import Entry

MODEL = "model"


@dataclass(slots=True)
class CheckpointHistory:
    """The ledger's entries about each checkpoint."""

    session: Session
    _tags: dict[int, dict[str, str]] = field(default_factory=dict)

    def note(self, entry: Entry, *, offset: int) -> None:
        """Take note of a checkpoint's entry in the ledger."""
        if entry.step is not None:
            self._tags[entry.step] = {
                "penstock.run": self.session.run,
                "penstock.version": str(entry.version),
                "penstock.ledger_offset": str(offset),
                "penstock.digest": str(entry.digest),
            }

    def existing(self) -> RegisteredCheckpoints:
        """Those that exist now; the Hugging Face model of each, where the run exports one."""
        store = open_store(self.session.config, self.session.run, to_read=True) if self._tags else None
        if store is None:
            return RegisteredCheckpoints()
        steps = sorted(step for step in store.steps() if step in self._tags)
        folders = {step: store.path(step) / MODEL for step in steps}
        versions = tuple(
            ModelVersion(step=step, directory=folder if folder.is_dir() else folder.parent, tags=self._tags[step])
            for step, folder in folders.items()
        )
        best = store.best.steps if store.best is not None and store.best.steps in folders else None
        return RegisteredCheckpoints(versions=versions, best=best)
