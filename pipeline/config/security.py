"""Kafka credentials of a process: those given to it, over those in PENSTOCK_SECURITY.

The rule: a password comes from the environment alone; it stands in no configuration, no record and no list of processes.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

from penstock.infra.errors import ConfigError

VARIABLE = "PENSTOCK_SECURITY"
PASSWORDS = ("sasl_plain_password", "ssl_password")


def credentials(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in the environment, with those given over them. Raises `ConfigError`."""
    try:
        settings = json.loads(os.environ.get(VARIABLE) or "{}")
    except json.JSONDecodeError as error:
        raise ConfigError(f"{VARIABLE} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{VARIABLE}: expected a JSON object of Kafka client settings")
    return {**{str(key): str(value) for key, value in settings.items()}, **given}


def refuse_password(key: str, *, where: str) -> None:
    """Raise `ConfigError` for a setting that others could read where it stands."""
    if key in PASSWORDS:
        raise ConfigError(f"{where}: a password may stand here for others to read; set {VARIABLE}='{{\"{key}\": …}}' instead")
