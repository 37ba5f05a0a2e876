"""Errors of reading a record: only `Unusable` for any bytes, or `NewerSchema`, which ends the reader."""

from typing import Literal, get_args

Kind = Literal[
    "missing-header", "bad-header", "foreign-run", "schema-version", "checksum", "undecodable", "mismatch", "orphan", "poison",
    "reward-failed", "environment-failed",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)


class Unusable(ValueError):
    """A record that cannot be used; `kind` is for programs and dead letters, the message for the user."""

    def __init__(self, message: str, *, kind: Kind) -> None:
        super().__init__(message)
        self.kind: Kind = kind


class NewerSchema(ValueError):
    """A valid record of this run and topic that a newer release wrote; as a dead letter its work would be lost."""


def require(condition: object, message: str) -> None:
    """Raise `Unusable(kind="undecodable")` with `message` unless `condition` holds."""
    if not condition:
        raise Unusable(message, kind="undecodable")
