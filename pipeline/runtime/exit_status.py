"""Exit statuses of a worker process, as the launcher reads them."""

from penstock.infra.errors import Fenced, Unrecoverable
from penstock.pipeline.config.plugins import PluginError
from penstock.pipeline.config.run_config import ConfigError
from penstock.pipeline.envs.datasets.rows import DataError
from penstock.topics.wire.errors import NewerSchema

ENDED, FAILED, HOPELESS = 0, 1, 2
"""The run is over or a stop was asked for; failed, starting again may help; starting again cannot help."""
MISTAKES = (ConfigError, PluginError, DataError, NewerSchema)
"""A person's mistake. Any other `ValueError` is a fault of this program, whose traceback is wanted."""


def exit_status(error: BaseException) -> int:
    """FAILED where starting again may help after this error, else HOPELESS.

    Example:
        exit_status(ConfigError("sampling.top_p = 3"))  # -> 2
    """
    return HOPELESS if isinstance(error, (Unrecoverable, Fenced, *MISTAKES)) else FAILED
