"""Packages, Java and Kafka that `make gpu-carry` gathered for a machine with torch, transformers and no network."""

import hashlib
import os
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

from penstock.infra.paths import IMPORT_ROOT, new_directory

CARRIED = IMPORT_ROOT / ".penstock" / "gpu-carry"
"""Folder of one archive for each Python, with the folders `site`, `java` and `jars`."""


def use(folder: Path = CARRIED) -> None:
    """Unpack this Python's archive and use it in this process and its children, if kafka-python is not installed here."""
    archive = folder / f"{sys.implementation.cache_tag}.tar.xz"
    if find_spec("kafka") is not None or not archive.exists():
        return
    with archive.open("rb") as file:
        unpacked = folder.with_name("gpu-carried") / hashlib.file_digest(file, "sha256").hexdigest()[:16]
    if not unpacked.exists():
        with new_directory(unpacked, holds="what make gpu-carry gathered") as parts, tarfile.open(archive) as tar:
            tar.extractall(parts, filter="data")
    print(f"packages and Kafka of {archive}", flush=True)
    site = str(unpacked / "site")
    sys.path.insert(0, site)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (site, str(IMPORT_ROOT), os.environ.get("PYTHONPATH"))))
    os.environ.setdefault("PENSTOCK_JAVA", str(unpacked / "java" / "bin" / "java"))
    os.environ.setdefault("PENSTOCK_JARS", str(unpacked / "jars"))
