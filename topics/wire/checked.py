"""Checks of decoded values: names, whole numbers, JSON. Each raises `Unusable(kind="undecodable")`.

A record's text becomes a path, a topic or a worker's name only after a check here or by `check_run_id`."""

import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.topics.wire.errors import Unusable, require

MAX_COUNT = 2**53
"""Largest whole number that float64 and JSON represent exactly."""
NAME = r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,127}"
"""Regular expression for the name of a worker, a role, a pool or a process."""
_NAME = re.compile(NAME)
_SHOWN = 60


def is_name(text: str) -> bool:
    """True for a text that is safe as the name of a worker, role, pool or process: no path, no hidden characters.

    Example:
        is_name("rollout-0"), is_name("../x")  # -> (True, False)
    """
    return _NAME.fullmatch(text) is not None


def require_names(row: Mapping[str, Any], *columns: str) -> None:
    """Raise `Unusable` unless the text in each of these columns is a safe name (see `is_name`)."""
    for column in columns:
        require(is_name(row[column]), f"{column} is {row[column][:_SHOWN]!r}, which is not a name")


def require_whole(row: Mapping[str, Any], *columns: str, least: int = 0, most: int = 2**63 - 1) -> None:
    """Raise `Unusable` unless the number in each of these columns is null or within [least, most]."""
    for column in columns:
        value = row[column]
        require(value is None or least <= value <= most, f"{column} is {value}, expected {least} to {most}")


def whole(value: float | None) -> int | None:
    """Return a float as an integer if it is a count that float64 represents exactly; None for any other value.

    Example:
        whole(4.0), whole(float("nan")), whole(-1.0)  # -> (4, None, None)
    """
    return int(value) if value is not None and 0 <= value <= MAX_COUNT and value == int(value) else None


def json_object(text: str, column: str) -> dict[str, Any]:
    """Parse a column that has to be a JSON object; return it. Raises `Unusable` for other JSON or text."""
    value = _json(text, column)
    require(isinstance(value, dict), f"{column} is JSON of {type(value).__name__}, expected an object")
    return value


def json_objects(text: str, column: str) -> list[dict[str, Any]]:
    """Parse a column that has to be a JSON list of objects; return it. Raises `Unusable` for other JSON or text."""
    value = _json(text, column)
    valid = isinstance(value, list) and all(isinstance(item, dict) for item in value)
    require(valid, f"{column} is JSON of {type(value).__name__}, expected a list of objects")
    return value


def _json(text: str, column: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unusable(f"{column} is not JSON: {str(error)[:_SHOWN]}", kind="undecodable") from error
