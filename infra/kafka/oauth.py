"""Tokens for SASL/OAUTHBEARER, from a file that somebody keeps fresh or from a command that prints one.

The rule: a token is asked for when a connection needs it; it is kept in memory only.
"""

import base64
import json
import shlex
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kafka.net.sasl.oauth import AbstractTokenProvider

from penstock.infra.errors import LogError

FILE, COMMAND = "sasl_oauth_token_file", "sasl_oauth_token_command"
COMMAND_S = 20.0
KEPT_S = 30.0
"""A command's token is used again for so long: a worker opens many connections at once."""
UNDATED_S = 300.0
"""How long a token without `exp` is taken to be good."""


class Tokens(AbstractTokenProvider):  # type: ignore[misc]
    """Both clients' source of tokens. Raises `LogError` in one line that does not hold the token."""

    def __init__(self, security: Mapping[str, Any]) -> None:
        self._file, self._command = security.get(FILE), security.get(COMMAND)
        self._kept, self._until = "", 0.0

    def token(self) -> str:
        """A token that is valid now."""
        if self._file is not None:
            return self._checked(self._read(), self._file)
        if time.monotonic() >= self._until:
            self._kept, self._until = self._checked(self._run(), self._command), time.monotonic() + KEPT_S
        return self._kept

    def for_librdkafka(self, _: str) -> tuple[str, float]:
        """(token, its end in seconds since the epoch), as librdkafka asks for it."""
        token = self.token()
        return token, expires_s(token) or time.time() + UNDATED_S

    def _read(self) -> str:
        try:
            return Path(str(self._file)).read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise LogError(f"{FILE} {self._file} cannot be read: {getattr(error, 'strerror', None) or 'it holds no token'}") from None

    def _run(self) -> str:
        try:
            command = shlex.split(str(self._command))
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False, stdin=subprocess.DEVNULL)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise LogError(f"{COMMAND} {self._command!r} cannot be run: {type(error).__name__}") from None
        if done.returncode:
            raise LogError(f"{COMMAND} {self._command!r} ended with status {done.returncode}: {' '.join(done.stderr.split())[-200:]}")
        return done.stdout

    @staticmethod
    def _checked(text: str, source: object) -> str:
        if not (token := text.strip()) or any(character.isspace() for character in token):
            raise LogError(f"{source} gives no token")
        return token


def expires_s(token: str) -> float | None:
    """The claim `exp` of a JSON web token; None without one.

    Example:
        expires_s("e30.eyJleHAiOiA1fQ.")  # -> 5.0
    """
    try:
        payload = token.split(".")[1]
        return float(json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["exp"])
    except (IndexError, ValueError, KeyError, TypeError):
        return None
