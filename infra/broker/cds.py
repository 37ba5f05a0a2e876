"""A class-data archive makes a warm start about a second shorter; without one Java just starts.

The broker writes the archive when it is first stopped, under a name made from all that it depends on. Nothing here can keep the
broker from starting: Java ignores an archive that does not fit, one of another size than its name says is not used, and one that
Java dies of is dropped by the caller, who then starts without.
"""

import hashlib
import os
import subprocess
from contextlib import suppress
from pathlib import Path

from penstock.infra.broker.java import Java

_QUIET = ("-Xshare:auto", "-Xlog:cds=off", "-Xlog:cds+dynamic=off", "-Xlog:class+path=off")
_USE, WRITE = "-XX:SharedArchiveFile=", "-XX:ArchiveClassesAtExit="
_UNFINISHED = ".unfinished"
_BASE_TIMEOUT_S = 60.0


def flags(java: Java, *, class_path: str, jvm: tuple[str, ...], directory: Path) -> list[str]:
    """Return the flags that use the archive in `directory`, or have one written there when the broker stops."""
    directory.mkdir(exist_ok=True)
    key = hashlib.sha256("\0".join((str(java.program), java.banner, class_path, *jvm)).encode()).hexdigest()[:16]
    base = directory / f"{key}.base.jsa"
    archives = [path for path in directory.glob(f"{key}.*.jsa") if path.name == f"{key}.{path.stat().st_size}.jsa"]
    for old in directory.iterdir():
        if old not in (base, *archives):
            old.unlink(missing_ok=True)
    if not _has_base(java) and not base.exists() and not _write_base(java, base):
        return [*_QUIET]
    below = [] if _has_base(java) else [str(base)]
    if archives:
        return [*_QUIET, _USE + ":".join([*below, str(archives[0])])]
    return [*_QUIET, *(_USE + path for path in below), f"{WRITE}{directory / key}{_UNFINISHED}"]


def finish(directory: Path, *, whole: bool) -> None:
    """Take an archive written by a broker that ended by itself into use; drop what a killed one left."""
    for written in directory.glob(f"*{_UNFINISHED}"):
        if whole:
            with written.open("rb") as file:
                os.fsync(file.fileno())  # before its name promises that it is whole
            written.replace(written.with_suffix(f".{written.stat().st_size}.jsa"))
        else:
            written.unlink(missing_ok=True)


def drop(directory: Path) -> None:
    """Remove all archives; the next broker to stop writes a new one."""
    for archive in directory.iterdir():
        archive.unlink(missing_ok=True)


def _has_base(java: Java) -> bool:
    return (java.program.resolve().parent.parent / "lib" / "server" / "classes.jsa").exists()


def _write_base(java: Java, base: Path) -> bool:
    """Write the archive of Java's own classes for a Java that came without; it takes about a second, once."""
    unfinished = base.with_name(base.name + _UNFINISHED)
    with suppress(OSError, subprocess.TimeoutExpired):
        command = [str(java.program), "-Xshare:dump", "-XX:+UseSerialGC", f"{_USE}{unfinished}"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_BASE_TIMEOUT_S, check=False)
        if done.returncode == 0 and unfinished.exists():
            unfinished.replace(base)
            return True
    return False
