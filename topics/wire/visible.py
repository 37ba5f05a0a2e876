"""Text of models, data sets, tools and records: hidden characters escaped for a terminal, lone surrogates replaced by U+FFFD."""

import re
from collections.abc import Mapping
from typing import Any

MAX_LINE = 20_000
"""Longest line that is shown in full; a longer one is cut and ends with its number of characters."""

_HIDDEN = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and line feed, DEL, C1
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0"  # what has no width
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # zero width, separators of lines, directions
    "\ud800-\udfff\U0001d173-\U0001d17a\U000e0000-\U000e0fff"  # lone surrogates, tags
    "\U00013430-\U0001345f\U0001bca0-\U0001bca3"  # layout of hieroglyphs and shorthand
)
_SEVERAL_LINES = re.compile(f"[{_HIDDEN}]")
_ONE_LINE = re.compile(f"[{_HIDDEN}\t\n]")


def visible(text: str, *, one_line: bool = False) -> str:
    """Escape hidden characters as Python does, and cut long lines; with `one_line`, also escape line feeds and tabs.

    Example:
        visible("a\x1b[2J")  # -> "a\\x1b[2J"
    """
    if not (text.isascii() and text.isprintable()):
        text = (_ONE_LINE if one_line else _SEVERAL_LINES).sub(_escaped, text)
    return text if len(text) <= MAX_LINE else "\n".join(map(_cut, text.split("\n")))


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def _cut(line: str) -> str:
    if len(line) <= MAX_LINE:
        return line
    tail = f"… {len(line)} characters"
    return line[: MAX_LINE - len(tail)] + tail


REPLACEMENT = "\ufffd"
_SURROGATE = re.compile("[\ud800-\udfff]")


def well_formed(text: str) -> str:
    """Replace each lone surrogate by U+FFFD, and two surrogates that encode one character by that character.

    Example:
        well_formed("5d\ud83d=")  # -> "5d�="
    """
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def well_formed_json(value: Any) -> tuple[Any, int]:
    """Return a JSON value with all texts and keys `well_formed`, and the number of surrogates that became U+FFFD."""
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
