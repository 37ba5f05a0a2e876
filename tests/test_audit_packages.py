"""`make audit-packages` without a feed of advisories says so in one line; what pip-audit finds is printed as it is."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT

NO_FEED = "make audit-packages: no feed of advisories can be reached from here; nothing was audited"
OF_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS")
"""Variables by which a `make` that runs the tests would reach the one that is tested."""


def audited(tmp_path: Path, said: str, *, status: int) -> tuple[int, str, list[str]]:
    """Exit status, standard output and standard error of the target, with a `uv` that prints a text."""
    (tmp_path / "said").write_text(said)
    fake = tmp_path / "uv"
    fake.write_text(f'#!/bin/sh\ncat "{tmp_path}/said" >&2\nexit {status}\n')
    fake.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    words = ["make", "--no-print-directory", "-s", "-o", ".venv/.stamp/environment", "audit-packages", f"UV={fake}"]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout.strip(), [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]


@pytest.mark.parametrize(
    "said",
    [
        "Traceback (most recent call last):\n  File x\nrequests.exceptions.ConnectionError: HTTPSConnectionPool(host='h', port=443)",
        "error: Failed to fetch: `https://index/simple/pip-audit/`\n  Caused by: error sending request for url",
        "  x No solution found when resolving tool dependencies:\n  Because pip-audit was not found in the package registry",
        "ERROR:pip_audit._cli:Connection refused",
        "urllib3.exceptions.NewConnectionError: [Errno 111] Connection refused",
        "ERROR:pip_audit._cli:Could not connect to PyPI's vulnerability feed\nERROR:pip_audit._cli:Tip: your network may be blocking it",
        "error: Request failed after 3 retries\n  Caused by: dns error: failed to lookup address information",
        "requests.exceptions.ReadTimeout: Read timed out.",
        "No known vulnerabilities found\nName Skip Reason\ntorch Dependency not found on PyPI and could not be audited",
        "usage: pip-audit [-h]\npip-audit: error: unrecognized arguments: --x",
        "error: HTTP status client error (403 Forbidden) for url (https://index/simple/)",
    ],
    ids=lambda said: said[-40:],
)
def test_without_a_feed_it_is_one_line_and_a_failure(said: str, tmp_path: Path) -> None:
    status, out, errors = audited(tmp_path, said, status=1)
    assert (status, out, errors) == (2, "", [f"{NO_FEED} ({said.splitlines()[-1]})"])


@pytest.mark.parametrize(
    ("said", "status"),
    [("No known vulnerabilities found", 0), ("Found 1 known vulnerability in 1 package\nName Version ID\ntorch 2.0 PYSEC-1", 1)],
)
def test_what_was_found_is_printed_with_its_status(said: str, status: int, tmp_path: Path) -> None:
    assert audited(tmp_path, said, status=status) == (2 if status else 0, said, [])
