"""The report that a tracker leaves in a run's folder: its files, and how an outdated one goes."""

from pathlib import Path

REPORTS = ("report.txt", "report.json")
"""For people, and for machines."""


def remove_reports(directory: Path) -> None:
    """Remove what an earlier end of the run has left, which must not remain where no newer one is written."""
    for name in REPORTS:
        (directory / name).unlink(missing_ok=True)
