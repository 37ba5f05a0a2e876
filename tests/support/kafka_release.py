"""The jars of another Apache Kafka release in a folder for PENSTOCK_JARS: `python -m tests.support.kafka_release VERSION DIR`."""

import shutil
import sys
from pathlib import Path

import jgo

from penstock.infra.broker import jars


def make(version: str, folder: Path) -> None:
    """Resolve the release and the logging that fits it, and copy the jars with their list into the folder."""
    jars.KAFKA = f"{jars.KAFKA.rpartition(':')[0]}:{version}"
    core = next(artifact for artifact in jgo.resolve(jars.KAFKA) if artifact.artifactId == "log4j-core")
    jars.LOGGING = f"{jars.LOGGING.rpartition(':')[0]}:{core.version}"
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{jars.PINS.name}"
    jars.pin(unfinished)
    for path in jars.read_pins(unfinished):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(jars.maven_cache() / path, folder / path)
    unfinished.rename(folder / jars.PINS.name)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
