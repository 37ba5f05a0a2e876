"""Makes text of models, data sets, tools and records safe to print: no character drives a terminal or hides another."""

import re

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
    """The text with hidden characters escaped as in Python, and long lines cut; with `one_line` also line feeds and tabs escaped.

    Example:
        visible("a\\x1b[2J")  # -> "a\\\\x1b[2J"
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
