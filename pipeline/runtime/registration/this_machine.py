"""The runs that this user has made or started on this machine, by their folders in the state directory."""

import os
import stat
import time
from pathlib import Path

from penstock.infra.paths import state_path
from penstock.pipeline.runtime.registration.run_key import KEY_FILE

LOCK = "launcher.lock"
"""In the folder of a run, held by its launcher."""
CLOCK_S = 60.0
"""The clock of a file system or of another machine may be ahead by so much."""


def own_runs() -> list[str]:
    """This user's runs on this machine, the newest last: those whose folder has the run's key or its launcher's lock.

    Dates in the future do not count.
    """
    limit_s = time.time() + CLOCK_S
    dates = {folder.name: date_s for folder in (state_path() / "runs").glob("*") if (date_s := _date_s(folder)) is not None}
    return sorted((name for name, date_s in dates.items() if date_s <= limit_s), key=lambda name: dates[name])


def _date_s(folder: Path) -> float | None:
    """The time at which this user made the run, or started it if it has no key; None for the folder of anything else."""
    if folder.is_symlink():
        return None
    for name in (KEY_FILE, LOCK):
        try:
            status = (folder / name).lstat()
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            return status.st_mtime
    return None
