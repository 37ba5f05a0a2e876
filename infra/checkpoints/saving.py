"""A checkpoint that is written while training goes on.

The rule: one thread reads the model and writes files with a temporary name; whoever owns the ledger records the checkpoint and then
names it. No copy of the state is made: the model must not change before `copied`, and until then only the optimizer's step does that.
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
"""The folder that a backend fills."""
STATE = "state.json"


@dataclass(slots=True)
class Saving:
    """A checkpoint on its way to the disk."""

    state: State
    aside: Path
    """Where it is written, until it has its name."""
    explained: Callable[[], AbstractContextManager[None]]
    """Turns an error of the disk into one line."""
    size: int = 0
    """Bytes, once all files are durable."""
    failure: BaseException | None = None
    _copied: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self, save: Callable[[Path], None], *, in_background: bool) -> None:
        """Write and flush in a thread; unless `beside`, `save` itself runs here. What it raises is raised by `wait`."""
        if not in_background:
            self._guarded(lambda: self._copy(save))
        self._thread = threading.Thread(
            target=self._guarded, args=(lambda: self._run(save if in_background else None),), daemon=True, name="checkpoint"
        )
        self._thread.start()

    @property
    def ended(self) -> bool:
        """True once the thread has nothing more to do."""
        return self._thread is not None and not self._thread.is_alive()

    def wait_copied(self) -> None:
        """Wait until nothing reads the model any more."""
        self._copied.wait()

    def wait(self) -> None:
        """Wait until every file is durable, or raise what has prevented that."""
        assert self._thread is not None
        self._thread.join()
        if self.failure is not None:
            self.discard()
            raise self.failure

    def discard(self) -> None:
        """Delete what was written."""
        shutil.rmtree(self.aside, ignore_errors=True)

    def _run(self, save: Callable[[Path], None] | None) -> None:
        if save is not None:
            self._copy(save)
        if self.failure is None:
            with self.explained():
                (self.aside / STATE).write_text(json.dumps(asdict(self.state)), encoding="utf-8")
                self.size = write_manifest(self.aside)
                sync_directory(self.aside)

    def _copy(self, save: Callable[[Path], None]) -> None:
        with self.explained():
            (self.aside / BACKEND).mkdir(parents=True)
            save(self.aside / BACKEND)
            faults.reach("checkpoint.some")
        self._copied.set()

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:  # this thread's edge: its owner raises it again
            self.failure = error
            self._copied.set()
