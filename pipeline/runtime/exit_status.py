"""Exit statuses of a worker process, as the launcher reads them."""

import json

from penstock.infra.errors import Fenced, Unrecoverable

ENDED, FAILED, HOPELESS = 0, 1, 2
"""The run is over or a stop was asked for; failed, starting again may help; starting again cannot help."""


def exit_status(error: BaseException) -> int:
    """FAILED where starting again may help after this error, else HOPELESS.

    Text that cannot be decoded or parsed is a `ValueError` too, but a file half written is no person's mistake.

    Example:
        exit_status(ValueError("sampling.top_p = 3"))  # -> 2
    """
    if isinstance(error, UnicodeError | json.JSONDecodeError):
        return FAILED
    return HOPELESS if isinstance(error, Unrecoverable | Fenced | ValueError) else FAILED
