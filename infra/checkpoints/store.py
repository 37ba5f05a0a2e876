"""Checkpoints in a directory: written to a temporary folder, flushed, recorded in the ledger, and only then renamed.

A checkpoint is used only if every file verifies and it agrees with the ledger; otherwise the one before it is tried.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from penstock.infra import faults
from penstock.infra.checkpoints.files import MANIFEST, check_file, sync
from penstock.infra.checkpoints.rules import Best, Recorded, State, objection, to_keep
from penstock.infra.checkpoints.saving import STATE, Saving
from penstock.infra.errors import BackendError, CheckpointError

BEST = "best.json"
"""File with the number of the best evaluated checkpoint."""
_TEMPORARY = ".aside-"
"""Name prefix of a directory that is being written or removed; the next start deletes it."""
_NAME = re.compile(r"step-(\d{8,})")


class CheckpointStore:
    """The checkpoints of one run in their own directory; one process writes to it."""

    def __init__(self, directory: Path, *, keep_last: int = 2, keep_every: int | None = None, to_read: bool = False) -> None:
        """Create the directory and delete incomplete checkpoints in it; `to_read` does neither. Raises `CheckpointError`."""
        self.directory, self._keep_last, self._keep_every = directory, keep_last, keep_every
        self._refused: set[int] = set()
        self._accuracies: dict[int, float] = {}
        self.best = self._read_best()
        if to_read:
            return
        with self._explained("use the checkpoint directory"):
            directory.mkdir(parents=True, exist_ok=True)
            for leftover in directory.glob(f"{_TEMPORARY}*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def path(self, steps: int) -> Path:
        """Path of the checkpoint after `steps` steps, existing or not."""
        return self.directory / f"step-{steps:08d}"

    def steps(self) -> list[int]:
        """Steps of the existing checkpoints, newest first."""
        if not self.directory.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self.directory.iterdir() if path.is_dir())
        return sorted((int(name[1]) for name in names if name), reverse=True)

    def verify(self, steps: int, recorded: Recorded) -> State:
        """State of a complete checkpoint that agrees with the ledger. Raises `CheckpointError` with the reason in a few words."""
        path = self.path(steps)
        self._refused.add(steps)
        try:
            manifest = json.loads((path / MANIFEST).read_bytes())["files"]
            files = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file() and file != path / MANIFEST}
            if odd := sorted(files.keys() ^ manifest.keys()):
                raise CheckpointError(f"{odd[0]} is {'missing' if odd[0] in manifest else 'not in its manifest'}")
            check_file(STATE, files[STATE], manifest[STATE])
            state = State(**json.loads(files[STATE].read_bytes()))
            if why := (objection(state, recorded) if state.steps == steps else f"it is of step {state.steps}"):
                raise CheckpointError(why)
            for name, file in files.items():
                check_file(name, file, manifest[name])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # the manifest is missing, truncated or not JSON
            raise CheckpointError(f"its manifest or state cannot be read ({type(error).__name__}: {error})") from error
        self._refused.discard(steps)
        return state

    def refuse(self, steps: int) -> None:
        """Mark a checkpoint as unusable: it is deleted when the next one is written."""
        self._refused.add(steps)

    def write(self, state: State, *, save: Callable[[Path], None], record: Callable[[int], None], about_bytes: int = 0) -> int:
        """Write a checkpoint by `start` and `finish`; returns its size in bytes."""
        return self.finish(self.start(state, save=save, in_background=False, about_bytes=about_bytes), record=record)

    def start(self, state: State, *, save: Callable[[Path], None], in_background: bool, about_bytes: int = 0) -> Saving:
        """Start to write a checkpoint in a thread. Raises `CheckpointError` if the disk has too little space.

        `save` writes into a folder; with `in_background` it runs while the model is trained, until the next optimizer update.
        """
        explained = partial(self._explained, f"write the checkpoint of step {state.steps}", run=state.run, about_bytes=about_bytes)
        with explained():
            if shutil.disk_usage(self.directory).free < about_bytes:  # a full disk would stop the broker too
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        saving = Saving(state, self._temporary(state.steps), explained)
        saving.start(save, in_background=in_background)
        return saving

    def finish(self, saving: Saving, *, record: Callable[[int], None]) -> int:
        """Wait for a checkpoint's files, call `record` with their size to commit it to the ledger, rename it, and delete old checkpoints.

        Raises `CheckpointError` and errors of `record`; then the new checkpoint is deleted and the others are unchanged.
        """
        saving.wait()
        try:
            record(saving.size)
            with saving.explained():
                self._rename(saving.temporary, saving.state.steps)
        except BaseException:
            saving.discard()
            raise
        faults.reach("checkpoint.renamed")
        self._refused.discard(saving.state.steps)
        self._choose_best()
        self._remove_others()
        return saving.size

    def rate(self, steps: int, accuracy: float) -> None:
        """Record an evaluation: of the existing checkpoints, the one with the highest accuracy is kept."""
        self._accuracies[steps] = accuracy
        self._choose_best()

    def _choose_best(self) -> None:
        usable = set(self.steps()) - self._refused
        rated = [Best(steps=steps, accuracy=accuracy) for steps, accuracy in self._accuracies.items() if steps in usable]
        if self.best is not None and self.best.steps in usable:
            rated.insert(0, self.best)
        best = max(rated, key=lambda candidate: candidate.accuracy, default=None)
        if best is None or best == self.best:
            return
        self.best = best
        with self._explained("note the best checkpoint"):
            unfinished = self.directory / f".{BEST}"
            unfinished.write_text(json.dumps(asdict(best)), encoding="utf-8")
            unfinished.replace(self.directory / BEST)

    def _read_best(self) -> Best | None:
        """The best checkpoint as recorded by an earlier process."""
        try:
            return Best(**json.loads((self.directory / BEST).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def _rename(self, temporary: Path, steps: int) -> None:
        """Give a durable checkpoint its name, after removing a refused one of that name."""
        if self.path(steps).exists():
            self._remove(steps)
        temporary.rename(self.path(steps))
        sync(self.directory)

    def _remove_others(self) -> None:
        present = set(self.steps())
        best = None if self.best is None else self.best.steps
        retained = to_keep(present - self._refused, keep_last=self._keep_last, keep_every=self._keep_every, best=best)
        for steps in sorted(present - retained):
            with self._explained(f"remove the checkpoint of step {steps}"):
                self._remove(steps)

    def _remove(self, steps: int) -> None:
        """Rename a checkpoint and delete it, so that a directory with its name is never incomplete."""
        temporary = self._temporary(steps)
        self.path(steps).rename(temporary)
        faults.reach("checkpoint.removing")
        shutil.rmtree(temporary, ignore_errors=True)
        self._refused.discard(steps)

    def _temporary(self, steps: int) -> Path:
        # Each name is unique: a suspended process that continues must not change the files of its successor.
        return self.directory / f"{_TEMPORARY}{steps}-{os.getpid()}-{secrets.token_hex(4)}"

    @contextlib.contextmanager
    def _explained(self, doing: str, *, run: str | None = None, about_bytes: int = 0) -> Iterator[None]:
        """Turn a disk error into a `CheckpointError` with the directory, the needed space and the command to continue."""
        try:
            yield
        except (OSError, BackendError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            free = _free_bytes(self.directory)
            needs = f" (it takes about {about_bytes / 2**20:.1f} MiB, {free / 2**20:.1f} MiB are free)" if about_bytes else ""
            last = [steps for steps in self.steps() if steps not in self._refused][:1] if self.directory.is_dir() else []
            intact = f"; that of step {last[0]} is intact" if last else ""
            then = f"make room there, then: penstock run --resume {run}" if run else "make it writable, or set trainer.checkpoint_dir"
            raise CheckpointError(f"cannot {doing} in {self.directory}: {reason}{needs}{intact}; {then}") from error


def _free_bytes(directory: Path) -> int:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(directory).free
    return 0
