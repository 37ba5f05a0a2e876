"""Checkpoints in a directory: written aside, made durable, recorded in the ledger, and only then given their name.

The rule: a checkpoint is used only if every file verifies and it agrees with the ledger; a broken one is named and the one before is used.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.infra import faults
from penstock.infra.errors import BackendError, CheckpointError

BACKEND = "backend"
"""The folder that a backend fills."""
STATE = "state.json"
MANIFEST = "manifest.json"
_ASIDE = ".aside-"
"""Name prefix of a directory that is being written or removed; the next start deletes it."""
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A run's position at a checkpoint; every other counter follows from the ledger up to here."""

    run: str
    steps: int
    """Optimizer steps done."""
    version: int
    """The newest published version."""
    digest: str
    """Digest of the weights."""
    seq: int
    """Number of the ledger's last entry before the checkpoint's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The ledger's record of a run, with which a checkpoint has to agree."""

    run: str
    steps: int
    """Committed steps."""
    seq: int
    versions: Collection[int]
    """Published versions."""
    digests: Mapping[int, Collection[str]]
    """Steps done -> digests of the checkpoints recorded at that point."""


def objection(state: State, recorded: Recorded) -> str | None:
    """Return why a whole checkpoint does not belong to this ledger; None when it does."""
    if state.run != recorded.run:
        return f"it is of run {state.run}"
    if state.steps > recorded.steps or state.seq >= recorded.seq:
        return f"it is beyond the ledger, which ends at step {recorded.steps} (entry {recorded.seq}; the checkpoint's is {state.seq + 1})"
    if state.steps not in recorded.digests:
        return "the ledger does not know it"
    if state.digest not in recorded.digests[state.steps]:
        return f"its weights have the digest {state.digest[:16]}…, in the ledger stands {min(recorded.digests[state.steps])[:16]}…"
    if state.version not in recorded.versions:
        return f"version {state.version} was never published"
    return None


def to_keep(steps: Collection[int], *, keep_last: int, keep_every: int | None = None) -> set[int]:
    """Return the checkpoints to keep: the newest `keep_last`, and those whose number of steps is a multiple of `keep_every`.

    Example:
        to_keep({10, 20, 30, 40}, keep_last=1, keep_every=20)  # -> {20, 40}
    """
    return {*sorted(steps)[-keep_last:], *(number for number in steps if keep_every and number % keep_every == 0)}


class CheckpointStore:
    """One run's checkpoints, in a directory of its own; one process writes to it."""

    def __init__(self, directory: Path, *, keep_last: int = 2, keep_every: int | None = None, to_read: bool = False) -> None:
        """Make the directory and delete what an earlier process left incomplete; `to_read` does neither. Raises `CheckpointError`."""
        self.directory, self._keep_last, self._keep_every = directory, keep_last, keep_every
        self._refused: set[int] = set()
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
            _check_file(STATE, files[STATE], manifest[STATE])
            state = State(**json.loads(files[STATE].read_bytes()))
            if why := (objection(state, recorded) if state.steps == steps else f"it is of step {state.steps}"):
                raise CheckpointError(why)
            for name, file in files.items():
                _check_file(name, file, manifest[name])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # the manifest is missing, torn or not JSON
            raise CheckpointError(f"its manifest or state cannot be read ({type(error).__name__}: {error})") from error
        self._refused.discard(steps)
        return state

    def refuse(self, steps: int) -> None:
        """Mark a checkpoint as unusable: it no longer counts, and is deleted when the next one is written."""
        self._refused.add(steps)

    def write(self, state: State, *, save: Callable[[Path], None], record: Callable[[int], None], about_bytes: int = 0) -> int:
        """Write a checkpoint and return its size; `record` gets the size and commits it to the ledger before the checkpoint gets its name.

        Then deletes those that are not to be kept. Raises `CheckpointError`, and whatever `record` raises; then nothing of it
        is left and what was there before is untouched.
        """
        aside = self._aside(state.steps)
        doing = f"write the checkpoint of step {state.steps}"
        try:
            with self._explained(doing, run=state.run, about_bytes=about_bytes):
                if shutil.disk_usage(self.directory).free < about_bytes:  # do not begin: a full disk would stop the broker as well
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                (aside / BACKEND).mkdir(parents=True)
                save(aside / BACKEND)
                faults.reach("checkpoint.some")
                (aside / STATE).write_text(json.dumps(asdict(state)), encoding="utf-8")
                size = _write_manifest(aside)
                sync_directory(aside)
            record(size)
            with self._explained(doing, run=state.run, about_bytes=about_bytes):
                self._name(aside, state.steps)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        faults.reach("checkpoint.renamed")
        self._refused.discard(state.steps)
        self._remove_others()
        return size

    def _name(self, aside: Path, steps: int) -> None:
        """Give a durable checkpoint its name, after moving away a refused one of that name."""
        if self.path(steps).exists():
            self._remove(steps)
        aside.rename(self.path(steps))
        sync(self.directory)

    def _remove_others(self) -> None:
        present = set(self.steps())
        kept = to_keep(present - self._refused, keep_last=self._keep_last, keep_every=self._keep_every)
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


def sync_directory(directory: Path) -> None:
    """Flush every file below `directory`, and the directories, to the disk."""
    for path in [*sorted(directory.rglob("*")), directory]:
        sync(path)


def sync(path: Path) -> None:
    """Flush one file, or the names in one directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_manifest(directory: Path) -> int:
    """Describe every file in `manifest.json`; returns their total size in bytes."""
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    described = {file.relative_to(directory).as_posix(): {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in files}
    (directory / MANIFEST).write_text(json.dumps({"files": described}, indent=1), encoding="utf-8")
    return sum(file.stat().st_size for file in [*files, directory / MANIFEST])


def _check_file(name: str, file: Path, described: Mapping[str, object]) -> None:
    size = file.stat().st_size
    if size != described["bytes"]:
        raise CheckpointError(f"{name} has {size} bytes where its manifest says {described['bytes']}")
    if _sha256(file) != described["sha256"]:
        raise CheckpointError(f"{name} is damaged: its SHA-256 is not the one in its manifest")


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _free_bytes(directory: Path) -> int:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(directory).free
    return 0
