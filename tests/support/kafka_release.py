"""The jars of another Apache Kafka release in a folder for PENSTOCK_JARS: `python -m tests.support.kafka_release VERSION DIR`."""

import shutil
import sys
from pathlib import Path

import jgo

from penstock.infra.broker import process


def make(version: str, folder: Path) -> None:
    """Resolve the release and the logging that fits it, and copy the jars with their list into the folder."""
    process.KAFKA = f"{process.KAFKA.rpartition(':')[0]}:{version}"
    core = next(artifact for artifact in jgo.resolve(process.KAFKA) if artifact.artifactId == "log4j-core")
    process.LOGGING = f"{process.LOGGING.rpartition(':')[0]}:{core.version}"
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{process.PINS.name}"
    process.pin(unfinished)
    for path in process.read_pins(unfinished):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(process.maven_cache() / path, folder / path)
    unfinished.rename(folder / process.PINS.name)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
