"""Checkpoints in a directory: written aside, made durable, recorded in the ledger, and only then given their name.

The rule: a checkpoint is used only if every file verifies and it agrees with the ledger; a broken one is named and the one before is used.
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
"""Names the checkpoint with the best evaluation so far."""
_ASIDE = ".aside-"
"""Name prefix of a directory that is being written or removed; the next start deletes it."""
_NAME = re.compile(r"step-(\d{8,})")


class CheckpointStore:
    """One run's checkpoints, in a directory of its own; one process writes to it."""

    def __init__(self, directory: Path, *, keep_last: int = 2, keep_every: int | None = None, to_read: bool = False) -> None:
        """Make the directory and delete what an earlier process left incomplete; `to_read` does neither. Raises `CheckpointError`."""
        self.directory, self._keep_last, self._keep_every = directory, keep_last, keep_every
        self._refused: set[int] = set()
        self._accuracies: dict[int, float] = {}
        self.best = self._read_best()
        if to_read:
            return
        with self._explained("use the checkpoint directory"):
            directory.mkdir(parents=True, exist_ok=True)
            for leftover in directory.glob(f"{_ASIDE}*"):
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
        """The state of a whole checkpoint that agrees with the ledger; raises `CheckpointError` with what is wrong, in a few words."""
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
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # the manifest is missing, torn or not JSON
            raise CheckpointError(f"its manifest or state cannot be read ({type(error).__name__}: {error})") from error
        self._refused.discard(steps)
        return state

    def refuse(self, steps: int) -> None:
        """Mark a checkpoint as unusable: it no longer counts, and is deleted when the next one is written."""
        self._refused.add(steps)

    def write(self, state: State, *, save: Callable[[Path], None], record: Callable[[int], None], about_bytes: int = 0) -> int:
        """Write a checkpoint to its end, as `begin` and `finish` do in two parts; returns its size."""
        return self.finish(self.start(state, save=save, in_background=False, about_bytes=about_bytes), record=record)

    def start(self, state: State, *, save: Callable[[Path], None], in_background: bool, about_bytes: int = 0) -> Saving:
        """Begin to write a checkpoint in a thread. Raises `CheckpointError` where the disk is too full to begin.

        `save` fills a folder; `beside` says that it may run while the model is trained, up to the optimizer's next step.
        """
        explained = partial(self._explained, f"write the checkpoint of step {state.steps}", run=state.run, about_bytes=about_bytes)
        with explained():
            if shutil.disk_usage(self.directory).free < about_bytes:  # do not begin: a full disk would stop the broker as well
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        saving = Saving(state, self._aside(state.steps), explained)
        saving.start(save, in_background=in_background)
        return saving

    def finish(self, saving: Saving, *, record: Callable[[int], None]) -> int:
        """Wait for a checkpoint's files; `record` gets their size and commits it to the ledger before the checkpoint gets its name.

        Then deletes those that are not to be kept. Raises `CheckpointError`, and whatever `record` raises; then nothing of it
        is left and what was there before is untouched.
        """
        saving.wait()
        try:
            record(saving.size)
            with saving.explained():
                self._name(saving.aside, saving.state.steps)
        except BaseException:
            saving.discard()
            raise
        faults.reach("checkpoint.renamed")
        self._refused.discard(saving.state.steps)
        self._choose_best()
        self._remove_others()
        return saving.size

    def rate(self, steps: int, accuracy: float) -> None:
        """Take note of an evaluation: of the checkpoints that are there, the one with the highest accuracy stays."""
        self._accuracies[steps] = accuracy
        self._choose_best()

    def _choose_best(self) -> None:
        there = set(self.steps()) - self._refused
        rated = [Best(steps=steps, accuracy=accuracy) for steps, accuracy in self._accuracies.items() if steps in there]
        if self.best is not None and self.best.steps in there:
            rated.insert(0, self.best)
        chosen = max(rated, key=lambda one: one.accuracy, default=None)
        if chosen is None or chosen == self.best:
            return
        self.best = chosen
        with self._explained("note the best checkpoint"):
            unfinished = self.directory / f".{BEST}"
            unfinished.write_text(json.dumps(asdict(chosen)), encoding="utf-8")
            unfinished.replace(self.directory / BEST)

    def _read_best(self) -> Best | None:
        """The best checkpoint as an earlier process has noted it."""
        try:
            return Best(**json.loads((self.directory / BEST).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def _name(self, aside: Path, steps: int) -> None:
        """Give a durable checkpoint its name, after moving away a refused one of that name."""
        if self.path(steps).exists():
            self._remove(steps)
        aside.rename(self.path(steps))
        sync(self.directory)

    def _remove_others(self) -> None:
        present = set(self.steps())
        best = None if self.best is None else self.best.steps
        kept = to_keep(present - self._refused, keep_last=self._keep_last, keep_every=self._keep_every, best=best)
        for steps in sorted(present - kept):
            with self._explained(f"remove the checkpoint of step {steps}"):
                self._remove(steps)

    def _remove(self, steps: int) -> None:
        """Remove a checkpoint, its name first, so that no incomplete directory ever has one."""
        aside = self._aside(steps)
        self.path(steps).rename(aside)
        faults.reach("checkpoint.removing")
        shutil.rmtree(aside, ignore_errors=True)
        self._refused.discard(steps)

    def _aside(self, steps: int) -> Path:
        # Each gets a unique name: a process that was only suspended must not touch the files of its successor.
        return self.directory / f"{_ASIDE}{steps}-{os.getpid()}-{secrets.token_hex(4)}"

    @contextlib.contextmanager
    def _explained(self, doing: str, *, run: str | None = None, about_bytes: int = 0) -> Iterator[None]:
        """Turn an error of the disk into one line with the directory, what is needed and what to do."""
        try:
            yield
        except (OSError, BackendError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            free = _free_bytes(self.directory)
            needs = f" (it takes about {about_bytes / 2**20:.1f} MiB, {free / 2**20:.1f} MiB are free)" if about_bytes else ""
            last = [steps for steps in self.steps() if steps not in self._refused][:1] if self.directory.is_dir() else []
            intact = f"; that of step {last[0]} is intact" if last else ""
            then = (
                f"make room there, then: penstock run --resume {run}" if run else "see to the directory, or choose trainer.checkpoint_dir"
            )
            raise CheckpointError(f"cannot {doing} in {self.directory}: {reason}{needs}{intact}; {then}") from error


def _free_bytes(directory: Path) -> int:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(directory).free
    return 0
