"""Kafka's classes as the JVM keeps them in memory: a broker that maps them starts with half the CPU time, and a suite starts seventy.

`python -m tests.support.class_archive` writes the file, which `make test` does once; without it, or with other jars, brokers load the jars.
"""

import tempfile
from pathlib import Path

from penstock.infra.broker import embedded, settings
from tests.support.paths import ROOT

FILE = ROOT / ".penstock" / "kafka.jsa"


def use() -> None:
    """Let the brokers that this process starts map the archive, if there is one. The JVM's remarks on it are no output of a broker."""
    if FILE.exists():
        settings.JVM = (*settings.JVM, f"-XX:SharedArchiveFile={FILE}", "-Xlog:disable")


def write() -> None:
    """Archive what a broker has loaded when it ends. Its storage is made before: the tool for that would write the file, too."""
    stock = settings.JVM
    with tempfile.TemporaryDirectory() as folder:
        home, unfinished = Path(folder), FILE.with_suffix(".unfinished")
        for more in ((), (f"-XX:ArchiveClassesAtExit={unfinished}", "-Xlog:disable")):
            settings.JVM = (*stock, *more)
            embedded.start(home=home)
            embedded.stop(home)
    unfinished.rename(FILE)


if __name__ == "__main__":
    write()
