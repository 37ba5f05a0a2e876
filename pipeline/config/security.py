"""Kafka credentials from the environment, and the refusal of configurations with passwords or tokens.

Passwords are read from the environment only: they appear in no configuration, no record and no process list.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.infra.errors import ConfigError

VARIABLE = "PENSTOCK_SECURITY"
PASSWORD = "PENSTOCK_PASSWORD"
"""The SASL password as it is, so that no character of it needs an escape of JSON."""
PASSWORDS = ("sasl_plain_password", "ssl_password")


def credentials(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Kafka settings in the environment, updated with `overrides`. Raises `ConfigError`."""
    try:
        settings = json.loads(os.environ.get(VARIABLE) or "{}")
    except json.JSONDecodeError as error:
        raise ConfigError(f"{VARIABLE} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{VARIABLE}: expected a JSON object of Kafka client settings")
    if password := os.environ.get(PASSWORD, "").rstrip("\r\n"):  # files end with a line break, and so do Secrets made of them
        settings = {"sasl_plain_password": password, **settings}
    return {**{str(key): str(value) for key, value in settings.items()}, **overrides}


def take_credentials(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`credentials`, which this removes from the environment."""
    settings = credentials(overrides)
    os.environ.pop(VARIABLE, None)
    os.environ.pop(PASSWORD, None)
    return settings


def refuse_password(key: str, *, where: str) -> None:
    """Raise `ConfigError` if a setting is a password, which other users could read at `where`."""
    if key in PASSWORDS:
        raise ConfigError(f"{where}: other users could read a password here; set {VARIABLE}='{{\"{key}\": …}}' instead")


def security_settings(words: Sequence[str] | None) -> dict[str, str]:
    """Parse `KEY=VALUE` words. Raises `ConfigError` for a password, which every user of the machine could read."""
    settings = {}
    for word in words or ():
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"--security {word}: expected KEY=VALUE")
        refuse_password(key, where=f"--security {key}")
        settings[key] = value
    return settings


_TOKENS = r"(?:api|auth|access|hf)[_-]?token"
_KEYS = r"api[_-]?key|passw(?:or)?d|secret[_-]?key|client[_-]?secret|(?:secret[_-]?)?access[_-]?key"
_NAMES = rf"token|[\w-]*(?:{_KEYS}|{_TOKENS})"
_SECRET_NAME = re.compile(_NAMES, re.IGNORECASE)
_VARIABLE = r"\$|`|\{[\w.]*\}|<[^\s>]*>"  # a variable, what a program prints, a column, a tag
_DUMMY = r"(?:EMPTY|none|null|dummy|not[_-]?needed|true|false)(?![^\s&\"'\\;,)])"
_VALUE = rf"(?!{_VARIABLE}|{_DUMMY})[^\s&\"'\\-]"
_USER = r"(?!(?:[^\s/@:]*:)?\$(?:\w+|\{\w+\})@)[^\s/@]*"
_SECRET = re.compile(
    rf"(?:https?|wss?)://{_USER}@|//(?=[^\s/@]*:){_USER}@"  # before the host of an address
    rf"|(?<![\w-])-*(?:{_NAMES})=[\\\"']*-*{_VALUE}"  # an option, a variable
    rf"|(?<![\w-])--(?!no-)(?:{_NAMES})\s[\s\\\"']*{_VALUE}",  # a word of a command
    re.IGNORECASE,
)
_NO_SECRET = re.compile(rf"{_VARIABLE}|{_DUMMY}|$", re.IGNORECASE)
INSTEAD = {
    "data.source": "set HF_TOKEN instead",
    "eval.source": "set HF_TOKEN instead",
    "reward.functions": "set PENSTOCK_REWARD_TOKEN, or a variable listed in reward.pass_env",
    "eval.functions": "set PENSTOCK_REWARD_TOKEN, or a variable listed in reward.pass_env",
    "environment.source": "set a variable listed in environment.pass_env",
    "kafka.bootstrap": f"set {VARIABLE} instead",
    "mlflow.tracking_uri": "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, instead",
    "rollout.vllm": "set HF_TOKEN instead",
}
"""Key whose value has addresses, options or commands -> the alternative for a secret in it."""


def refuse_secrets(table: Mapping[str, Any], *, recorded: Mapping[str, Any] | None = None) -> None:
    """Raise `ConfigError` for a password or token, which would be written to the log, except for values that `recorded` contains."""
    for setting in _mapping(_mapping(table.get("kafka")).get("security")):
        refuse_password(setting, where=f"kafka.security.{setting}")
    for key, instead in INSTEAD.items():
        section, _, name = key.partition(".")
        value = _mapping(table.get(section)).get(name)
        if value != _mapping((recorded or {}).get(section)).get(name) and _holds_secret(value, address=key == "kafka.bootstrap"):
            raise ConfigError(f"{key}: the value contains a password or token, which the log would record; {instead}")


def _holds_secret(value: Any, *, address: bool) -> bool:
    """True if a value of the configuration, or one inside it, is or contains a password or token; in an `address` any `@` counts."""
    if isinstance(value, Mapping):
        texts = {str(name): inner for name, inner in value.items() if isinstance(inner, str) and not _NO_SECRET.match(inner)}
        return any(map(_SECRET_NAME.fullmatch, texts)) or any(_holds_secret(inner, address=False) for inner in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_secret(inner, address=address) for inner in value)
    return isinstance(value, str) and (bool(_SECRET.search(value)) or (address and "@" in value))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
