"""A class-data archive makes a warm start about a second shorter; without one, or with one that does not fit, Java just starts.

The broker writes the archive when it is first stopped, under a name made from all that it depends on. Java checks it once more and
falls back by itself (`-Xshare:auto`); nothing here can keep the broker from starting.
"""

import hashlib
import subprocess
from contextlib import suppress
from pathlib import Path

from infra.broker.java import Java

_QUIET = ("-Xshare:auto", "-Xlog:cds=off", "-Xlog:cds+dynamic=off", "-Xlog:class+path=off")
_BASE_TIMEOUT_S = 60.0
_UNFINISHED = ".unfinished"


def flags(java: Java, *, class_path: str, jvm: tuple[str, ...], directory: Path) -> list[str]:
    """Return the flags that use the archive in `directory`, or have one written there when the broker stops."""
    directory.mkdir(exist_ok=True)
    key = hashlib.sha256("\0".join((str(java.program), java.banner, class_path, *jvm)).encode()).hexdigest()[:16]
    archive, base = directory / f"{key}.jsa", directory / f"{key}.base.jsa"
    for old in directory.iterdir():
        if old not in (archive, base):
            old.unlink(missing_ok=True)
    if not _has_base(java) and not base.exists() and not _write_base(java, base):
        return [*_QUIET]
    below = [] if _has_base(java) else [str(base)]
    if archive.exists():
        return [*_QUIET, f"-XX:SharedArchiveFile={':'.join([*below, str(archive)])}"]
    shared = [f"-XX:SharedArchiveFile={base}"] if below else []
    return [*_QUIET, *shared, f"-XX:ArchiveClassesAtExit={archive}{_UNFINISHED}"]


def reading_only(archive: list[str]) -> list[str]:
    """Return those of the flags that write nothing, for a helper of the broker that ends before it."""
    return [flag for flag in archive if not flag.startswith("-XX:ArchiveClassesAtExit")]


def finish(directory: Path, *, whole: bool) -> None:
    """Take an archive written by a broker that ended by itself into use; drop what a killed one left."""
    for written in directory.glob(f"*{_UNFINISHED}"):
        if whole:
            written.replace(written.with_suffix(""))
        else:
            written.unlink(missing_ok=True)


def _has_base(java: Java) -> bool:
    return (java.program.resolve().parent.parent / "lib" / "server" / "classes.jsa").exists()


def _write_base(java: Java, base: Path) -> bool:
    """Write the archive of Java's own classes for a Java that came without; it takes about a second, once."""
    unfinished = base.with_name(base.name + _UNFINISHED)
    with suppress(OSError, subprocess.TimeoutExpired):
        command = [str(java.program), "-Xshare:dump", "-XX:+UseSerialGC", f"-XX:SharedArchiveFile={unfinished}"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_BASE_TIMEOUT_S, check=False)
        if done.returncode == 0 and unfinished.exists():
            unfinished.replace(base)
            return True
    return False
