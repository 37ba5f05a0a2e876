"""Exit statuses of a worker process, as the launcher reads them."""

from penstock.infra.errors import ConfigError, Fenced, Unrecoverable
from penstock.pipeline.data.read_files import DataError
from penstock.pipeline.rewards.values import BrokenReward
from penstock.topics.wire.errors import NewerSchema

ENDED, FAILED, NO_RETRY, BROKEN = 0, 1, 2, 3
"""ENDED: the run is over or a stop was requested. FAILED: a restart may help. NO_RETRY: it cannot. BROKEN: a reward fails, the run ends."""
MISTAKES = (ConfigError, DataError, NewerSchema)
"""Errors of the user. Any other `ValueError` is a fault of this program, and is printed with its traceback."""


def exit_status(error: BaseException) -> int:
    """Exit status for an error: FAILED if a restart may help, otherwise NO_RETRY or BROKEN."""
    if isinstance(error, BrokenReward):
        return BROKEN
    return NO_RETRY if isinstance(error, (Unrecoverable, Fenced, *MISTAKES)) else FAILED
