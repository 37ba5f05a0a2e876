"""Replaces lone surrogates, which UTF-8 cannot encode, by U+FFFD."""

import re
from collections.abc import Mapping
from typing import Any

REPLACEMENT = "\ufffd"
_SURROGATE = re.compile("[\ud800-\udfff]")


def well_formed(text: str) -> str:
    """The text with U+FFFD for each lone surrogate; two surrogates that encode one character become that character.

    Example:
        well_formed("5d\\ud83d=")  # -> "5d\ufffd="
    """
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def well_formed_json(value: Any) -> tuple[Any, int]:
    """A JSON value with all texts and keys well formed, and the number of replaced lone surrogates. Other objects stay unchanged."""
    if isinstance(value, str):
        text = well_formed(value)
        return text, text.count(REPLACEMENT) - value.count(REPLACEMENT)
    if isinstance(value, Mapping):
        pairs = [(well_formed_json(key), well_formed_json(inner)) for key, inner in value.items()]
        return {key: inner for (key, _), (inner, _) in pairs}, sum(key + inner for (_, key), (_, inner) in pairs)
    if isinstance(value, list | tuple):
        items = [well_formed_json(inner) for inner in value]
        return [inner for inner, _ in items], sum(count for _, count in items)
    return value, 0
