"""A checkpoint that is written during training.

A thread reads the model without copying it and writes a temporary folder; the owner of the ledger records the checkpoint and renames the
folder. The model must not change until `wait_copied` returns; backward passes do not change it.
"""

import json
import shutil
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from penstock.infra import faults
from penstock.infra.checkpoints.files import sync_directory, write_manifest
from penstock.infra.checkpoints.rules import State

BACKEND = "backend"
"""Folder that the backend writes."""
STATE = "state.json"


@dataclass(slots=True)
class Saving:
    """A checkpoint being written."""

    state: State
    temporary: Path
    """Folder in which it is written before it gets its name."""
    explained: Callable[[], AbstractContextManager[None]]
    """Turns a disk error into one line."""
    size: int = 0
    """Bytes, set once all files are durable."""
    failure: BaseException | None = None
    _copied: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self, save: Callable[[Path], None], *, in_background: bool) -> None:
        """Write and flush in a thread; unless `in_background`, `save` itself runs in the caller's thread. `wait` raises its errors."""
        if not in_background:
            self._guarded(lambda: self._copy(save))
        self._thread = threading.Thread(
            target=self._guarded, args=(lambda: self._run(save if in_background else None),), daemon=True, name="checkpoint"
        )
        self._thread.start()

    @property
    def ended(self) -> bool:
        """True once the thread has ended."""
        return self._thread is not None and not self._thread.is_alive()

    def wait_copied(self) -> None:
        """Wait until the model has been read."""
        self._copied.wait()

    def wait(self) -> None:
        """Wait until every file is durable, or raise the error of the thread."""
        assert self._thread is not None
        self._thread.join()
        if self.failure is not None:
            self.discard()
            raise self.failure

    def discard(self) -> None:
        """Delete the temporary folder."""
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _run(self, save: Callable[[Path], None] | None) -> None:
        if save is not None:
            self._copy(save)
        if self.failure is None:
            with self.explained():
                (self.temporary / STATE).write_text(json.dumps(asdict(self.state)), encoding="utf-8")
                self.size = write_manifest(self.temporary)
                sync_directory(self.temporary)

    def _copy(self, save: Callable[[Path], None]) -> None:
        with self.explained():
            (self.temporary / BACKEND).mkdir(parents=True)
            save(self.temporary / BACKEND)
            faults.reach("checkpoint.some")
        self._copied.set()

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:  # `wait` raises it in the owner's thread
            self.failure = error
            self._copied.set()
