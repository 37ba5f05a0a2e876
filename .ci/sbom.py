"""Prints a CycloneDX 1.5 bill of materials: the packages of the lock file LOCK and the jars of jars.sha256, each with its SHA-256."""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).absolute().parents[1]
_PIN = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


def component(name: str, version: str, purl: str, digests: list[str], **more: str) -> dict[str, Any]:
    """A library; a package has a digest for each of its files."""
    hashes = [{"alg": "SHA-256", "content": digest} for digest in digests]
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, "hashes": hashes, **more}


def packages(lock: str) -> list[dict[str, Any]]:
    """The Python packages of a lock file."""
    found = []
    for block in re.split(r"\n(?=[A-Za-z0-9])", lock):
        if pin := _PIN.match(block):
            name, version = pin[1].lower(), pin[2]
            found.append(component(name, version, f"pkg:pypi/{name}@{version}", _DIGEST.findall(block)))
    return found


def jars(pins: str) -> list[dict[str, Any]]:
    """The jars of a list of `<sha256>  <path in a Maven repository>`."""
    found = []
    for digest, path in (line.split() for line in pins.splitlines()):
        *group, name, version, _ = path.split("/")
        found.append(component(name, version, f"pkg:maven/{'.'.join(group)}/{name}@{version}", [digest], group=".".join(group)))
    return found


if __name__ == "__main__":
    components = packages((ROOT / sys.argv[1]).read_text()) + jars((ROOT / "infra/broker/jars.sha256").read_text())
    head = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1}
    subject = {"component": {"type": "application", "name": "penstock-rl"}}
    print(json.dumps({**head, "metadata": subject, "components": components}, indent=1))
