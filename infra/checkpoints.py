"""A run's checkpoints: written to a temporary folder, flushed, recorded in the ledger, and only then renamed.

A checkpoint is used only if every file has the digest in its manifest and its state agrees with the ledger; otherwise the one before it is
tried. While one is written, a thread reads the model without copying it: the model must not change until `Saving.wait_copied` returns.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from penstock.infra import faults
from penstock.infra.errors import BackendError, CheckpointError
from penstock.infra.paths import sha256_of, sync, write_complete

MANIFEST = "manifest.json"


def sync_directory(directory: Path) -> None:
    """Flush every file below `directory`, and the directories, to the disk."""
    for path in [*sorted(directory.rglob("*")), directory]:
        sync(path)


def write_manifest(directory: Path) -> int:
    """Write `manifest.json` with size and SHA-256 of every file; return the total size in bytes."""
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    entries = {file.relative_to(directory).as_posix(): {"bytes": file.stat().st_size, "sha256": sha256_of(file)} for file in files}
    (directory / MANIFEST).write_text(json.dumps({"files": entries}, indent=1), encoding="utf-8")
    return sum(file.stat().st_size for file in [*files, directory / MANIFEST])


def check_file(name: str, file: Path, entry: Mapping[str, object]) -> None:
    """Raise `CheckpointError` unless a file has the size and SHA-256 of its manifest entry."""
    size = file.stat().st_size
    if size != entry["bytes"]:
        raise CheckpointError(f"{name} has {size} bytes, but {entry['bytes']} according to the checkpoint's manifest")
    if sha256_of(file) != entry["sha256"]:
        raise CheckpointError(f"{name} is damaged: its SHA-256 differs from that in the checkpoint's manifest")


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A run's position at a checkpoint; a resumed trainer computes all other counters from the ledger up to `seq`."""

    run: str
    steps: int
    version: int
    digest: str
    seq: int
    """Number of the ledger's last entry when the checkpoint was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The ledger's record of a run, with which a checkpoint must agree."""

    run: str
    steps: int
    """Number of committed steps."""
    seq: int
    versions: Collection[int]
    """Numbers of the published policy versions."""
    digests: Mapping[int, Collection[str]]
    """Steps done -> digests of the checkpoints recorded at that point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best evaluated checkpoint so far."""

    steps: int
    accuracy: float
    """Greedy accuracy on the held-out prompts."""


def objection(state: State, recorded: Recorded) -> str | None:
    """Return why a complete checkpoint does not belong to this ledger; None if it does."""
    if state.run != recorded.run:
        return f"it belongs to run {state.run}"
    if state.steps > recorded.steps or state.seq >= recorded.seq:
        return f"it is newer than the ledger, which ends at step {recorded.steps}, entry {recorded.seq} (checkpoint: entry {state.seq})"
    if state.steps not in recorded.digests:
        return "the ledger has no entry for its step"
    if state.digest not in recorded.digests[state.steps]:
        return f"its weights digest is {state.digest[:16]}…, the ledger records {min(recorded.digests[state.steps])[:16]}…"
    if state.version not in recorded.versions:
        return f"its weight version {state.version} was never published"
    return None


def to_keep(steps: Collection[int], *, keep_last: int, keep_every: int | None = None, best: int | None = None) -> set[int]:
    """Return the steps of the checkpoints to retain: the newest `keep_last`, multiples of `keep_every`, and the best."""
    selected = {*sorted(steps)[-keep_last:], *(number for number in steps if keep_every and number % keep_every == 0)}
    return selected | {number for number in steps if number == best}


BACKEND = "backend"
"""Folder that the backend writes."""
STATE = "state.json"


@dataclass(slots=True)
class Saving:
    """A checkpoint that is being written."""

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
        """Write and flush a checkpoint in a thread; `wait` raises its errors.

        Unless `in_background`, `save`, which reads the model, runs before this method returns.
        """
        if not in_background:
            self._guarded(lambda: self._copy(save))
        self._thread = threading.Thread(
            target=self._guarded, args=(lambda: self._run(save if in_background else None),), daemon=True, name="checkpoint"
        )
        self._thread.start()

    @property
    def ended(self) -> bool:
        """True once the writing thread has ended."""
        return self._thread is not None and not self._thread.is_alive()

    def wait_copied(self) -> None:
        """Wait until the model has been read, after which it may change."""
        self._copied.wait()

    def wait(self) -> None:
        """Wait until every file is durable; raise the error of the thread, after deleting what it wrote."""
        assert self._thread is not None
        self._thread.join()
        if self.failure is not None:
            self.discard()
            raise self.failure

    def discard(self) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _run(self, save: Callable[[Path], None] | None) -> None:
        """Write all files, with `save` if it has not run yet, and flush them."""
        if save is not None:
            self._copy(save)
        if self.failure is None:
            with self.explained():
                (self.temporary / STATE).write_text(json.dumps(asdict(self.state)), encoding="utf-8")
                self.size = write_manifest(self.temporary)
                sync_directory(self.temporary)

    def _copy(self, save: Callable[[Path], None]) -> None:
        """Let `save` write the model, and release `wait_copied`."""
        with self.explained():
            (self.temporary / BACKEND).mkdir(parents=True)
            save(self.temporary / BACKEND)
            faults.reach("checkpoint.some")
        self._copied.set()

    def _guarded(self, action: Callable[[], None]) -> None:
        """Run `action`; store any error for `wait`."""
        try:
            action()
        except BaseException as error:  # `wait` raises it in the owner's thread
            self.failure = error
            self._copied.set()


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
        self.best: Best | None = None
        with contextlib.suppress(OSError, ValueError, TypeError):  # none is recorded
            self.best = Best(**json.loads((directory / BEST).read_bytes()))
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
        """Return the steps of the existing checkpoints, newest first."""
        if not self.directory.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self.directory.iterdir() if path.is_dir())
        return sorted((int(name[1]) for name in names if name), reverse=True)

    def verify(self, steps: int, recorded: Recorded) -> State:
        """Verify a checkpoint against its manifest and the ledger, and return its state. Raises `CheckpointError` with the reason."""
        path = self.path(steps)
        self._refused.add(steps)
        try:
            manifest = json.loads((path / MANIFEST).read_bytes())["files"]
            files = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file() and file != path / MANIFEST}
            if odd := sorted(files.keys() ^ manifest.keys()):
                raise CheckpointError(f"{odd[0]} is {'missing' if odd[0] in manifest else 'not in the manifest'}")
            check_file(STATE, files[STATE], manifest[STATE])
            state = State(**json.loads(files[STATE].read_bytes()))
            if why := (objection(state, recorded) if state.steps == steps else f"it belongs to step {state.steps}"):
                raise CheckpointError(why)
            for name, file in files.items():
                check_file(name, file, manifest[name])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # the manifest is missing, truncated or not JSON
            raise CheckpointError(f"its manifest or state file cannot be read ({type(error).__name__}: {error})") from error
        self._refused.discard(steps)
        return state

    def refuse(self, steps: int) -> None:
        """Mark a checkpoint as unusable: it is deleted when the next one is written."""
        self._refused.add(steps)

    def write(self, state: State, *, save: Callable[[Path], None], record: Callable[[int], None], about_bytes: int = 0) -> int:
        """Write a checkpoint by `start` and `finish`; return its size in bytes once it is complete."""
        return self.finish(self.start(state, save=save, in_background=False, about_bytes=about_bytes), record=record)

    def start(self, state: State, *, save: Callable[[Path], None], in_background: bool, about_bytes: int = 0) -> Saving:
        """Start to write a checkpoint in a thread; `finish` completes it. Raises `CheckpointError` if the disk has too little space.

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
                if self.path(saving.state.steps).exists():  # an unusable one
                    self._remove(saving.state.steps)
                saving.temporary.rename(self.path(saving.state.steps))
                sync(self.directory)
        except BaseException:
            saving.discard()
            raise
        faults.reach("checkpoint.renamed")
        self._refused.discard(saving.state.steps)
        self._choose_best()
        self._remove_others()
        return saving.size

    def rate(self, steps: int, accuracy: float) -> None:
        """Record the accuracy after a step: the existing checkpoint with the highest accuracy is retained."""
        self._accuracies[steps] = accuracy
        self._choose_best()

    def _choose_best(self) -> None:
        """Choose the existing checkpoint with the highest accuracy, and record it for later processes."""
        usable = set(self.steps()) - self._refused
        rated = [Best(steps=steps, accuracy=accuracy) for steps, accuracy in self._accuracies.items() if steps in usable]
        if self.best is not None and self.best.steps in usable:
            rated.insert(0, self.best)
        best = max(rated, key=lambda candidate: candidate.accuracy, default=None)
        if best is None or best == self.best:
            return
        self.best = best
        with self._explained("note the best checkpoint"):
            write_complete(self.directory / BEST, json.dumps(asdict(best)))

    def _remove_others(self) -> None:
        """Delete the checkpoints that are unusable or not to be retained."""
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
        """In the block, turn an error of the disk or backend into a `CheckpointError` with directory, needed space and a fix."""
        try:
            yield
        except (OSError, BackendError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            free = 0
            with contextlib.suppress(OSError):
                free = shutil.disk_usage(self.directory).free
            needs = f" (it needs about {about_bytes / 2**20:.1f} MiB, {free / 2**20:.1f} MiB are free)" if about_bytes else ""
            last = [steps for steps in self.steps() if steps not in self._refused][:1] if self.directory.is_dir() else []
            intact = f"; the checkpoint of step {last[0]} is intact" if last else ""
            then = f"free some space, then: penstock run --resume {run}" if run else "make it writable, or set trainer.checkpoint_dir"
            raise CheckpointError(f"cannot {doing} in {self.directory}: {reason}{needs}{intact}; {then}") from error
