"""Backups: add a run's model and newest checkpoint to its exported archive, and copy archives to and from an object store."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import pyarrow as pa
from pyarrow import fs

from penstock.infra.checkpoints import sync_directory
from penstock.infra.errors import ConfigError, PenstockError
from penstock.infra.paths import new_directory, run_directory
from penstock.pipeline.archive.files import NOTE, UNFINISHED, Archive, write_atomically
from penstock.pipeline.config.fields import is_hub_name
from penstock.pipeline.config.load import from_json
from penstock.pipeline.runtime.factories import open_store
from penstock.pipeline.runtime.registration.run_registry import Registration

CHECKPOINTS, MODEL = "checkpoints", "model"


def add_files(archive: Archive, registered: Registration) -> None:
    """Copy the run's newest checkpoint to the archive, and its model unless it is on the Hugging Face hub or already copied.

    Call this before exporting records: the ledger has the entry of every checkpoint that exists by then. Raises `ConfigError` for a run
    that no key on this machine has signed.
    """
    if registered.record is None or not registered.signed:
        raise ConfigError(
            f"--backup copies directories that the record of {archive.run} names, and no key on this machine has signed that record: "
            f"back up on the machine that created the run, or sign the record: penstock topics adopt {archive.run}"
        )
    config, directory = from_json(registered.record.config), archive.path / CHECKPOINTS
    if not is_hub_name(config.model.path):
        _copy(config.model_directory, archive.path / MODEL)
    store = open_store(config, archive.run, to_read=True)
    for source in () if store is None else map(store.path, store.steps()):
        try:
            _copy(source, directory / source.name)
        except OSError:
            if source.exists():
                raise
            continue  # deleted by the trainer during the copy
        for other in directory.iterdir():
            if other.name != source.name:
                shutil.rmtree(other)
        return


def restore_checkpoints(archive: Archive, run: str) -> None:
    """Copy the archived checkpoints to the run's directory on this machine. Does nothing if `run` is not the archived run id."""
    for source in (archive.path / CHECKPOINTS).glob("step-*") if run == archive.run else ():
        _copy(source, run_directory(run) / CHECKPOINTS / source.name)


def _copy(source: Path, target: Path) -> None:
    """Copy a directory atomically; do nothing if `target` exists."""
    if not target.exists():
        with new_directory(target, holds=target.name) as new:
            shutil.copytree(source, new, dirs_exist_ok=True)
            sync_directory(new)


def upload(archive: Archive, uri: str) -> None:
    """Copy new and changed files of the archive to URI/RUN, the note last; delete files that it lacks. Raises `PenstockError`."""
    with _reported(uri):
        store, base = _opened(uri, archive.run)
        stored, files = _sizes(store, base), _sizes(fs.LocalFileSystem(), str(archive.path))
        for name in sorted(files, key=lambda name: (name == NOTE, name)):
            if name == NOTE or stored.get(name) != files[name]:
                _transfer(fs.LocalFileSystem(), f"{archive.path}/{name}", store, f"{base}/{name}")
        for name in stored.keys() - files.keys():
            store.delete_file(f"{base}/{name}")


def download(uri: str, directory: Path) -> Archive:
    """Copy an archive from URI, whose last part is the run id, to DIR/RUN; files of the same size are skipped. Raises `PenstockError`."""
    with _reported(uri):
        store, base = _opened(uri)
        archive = Archive(directory.absolute(), PurePosixPath(base).name)
        with store.open_input_stream(f"{base}/{NOTE}") as opened:  # read first: all files of this note were uploaded before it
            note = opened.read()
        files, present = _sizes(store, base), _sizes(fs.LocalFileSystem(), str(archive.path))
        for name, size in files.items():
            if ".." in PurePosixPath(name).parts:
                raise PenstockError(
                    f"{uri} contains {name!r}, whose path leaves the archive: this is not an upload of `penstock topics export`"
                )
            if name != NOTE and present.get(name) != size:
                _transfer(store, f"{base}/{name}", fs.LocalFileSystem(), f"{archive.path}/{name}")
        archive.path.mkdir(parents=True, exist_ok=True)
        (archive.path / (NOTE + UNFINISHED)).unlink(missing_ok=True)
        write_atomically(archive.path / NOTE, note)
    return archive


def _opened(uri: str, *below: str) -> tuple[fs.FileSystem, str]:
    """Open the file system of a URI, whose options follow a `?`; return it and the path within it."""
    folder, mark, options = uri.partition("?")
    store, path = fs.FileSystem.from_uri("/".join([folder.rstrip("/"), *below]) + mark + options)
    return store, path


def _sizes(store: fs.FileSystem, base: str) -> dict[str, int]:
    """Return path below `base` -> size in bytes, for all files except hidden and unfinished ones."""
    files = store.get_file_info(fs.FileSelector(base, recursive=True, allow_not_found=True))
    names = {info.path.removeprefix(base).lstrip("/"): info.size for info in files if info.is_file}
    return {name: size for name, size in names.items() if not name.endswith(UNFINISHED) and f"/{name}".find("/.") < 0}


def _transfer(source: fs.FileSystem, path: str, target: fs.FileSystem, to: str) -> None:
    target.create_dir(to.rpartition("/")[0], recursive=True)
    fs.copy_files(path, to, source_filesystem=source, destination_filesystem=target)


@contextmanager
def _reported(uri: str) -> Iterator[None]:
    """Translate errors of the object store to `PenstockError`."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise PenstockError(f"--store {uri.rpartition('@')[2]}: {' '.join(str(error).split())[:300]}") from error
