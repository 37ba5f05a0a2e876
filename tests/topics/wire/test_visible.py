"""Whatever text is printed, it neither drives a terminal nor hides a character."""

import io
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from penstock.pipeline.inspect.live.view import Terminal
from penstock.pipeline.launch.shutdown import lasting_output
from penstock.pipeline.runtime.reporting.log_lines import VisibleStream, log_line, print_json, visible_errors
from penstock.topics.wire.visible import MAX_LINE, visible

HOSTILE = "\x1b]0;PWNED\x07\x1b[2J\x9b31m\u202e\u200b\r over\x7f"
ESCAPED = r"\x1b]0;PWNED\x07\x1b[2J\x9b31m\u202e\u200b\r over\x7f"
ARABIC_SIGNS = {0x600, 0x601, 0x602, 0x603, 0x604, 0x605, 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD}
"""Format characters that are seen, with numbers below or beside them."""


@given(st.text(st.characters(exclude_categories=[]), max_size=60))
def test_any_text_becomes_one_that_is_shown_whole_and_stays_so(text: str) -> None:
    shown = visible(text)
    hidden = [char for char in shown if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") and char not in "\n\t"]
    assert not [char for char in hidden if ord(char) not in ARABIC_SIGNS]
    assert visible(shown) == shown
    shown.encode()
    assert "\n" not in visible(text, one_line=True)


def test_no_format_character_of_unicode_is_forgotten() -> None:
    hidden = {code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    assert {code for code in hidden if visible(chr(code)) == chr(code)} == ARABIC_SIGNS | {9, 10}


@pytest.mark.parametrize("text", ["", "plain", "naïve ✓ 中文 😀 עברית", "two\nlines\tand a tab", "C:\\x1b", "e\u0301"])
def test_what_is_visible_stays_as_it_is(text: str) -> None:
    assert visible(text) == text


@pytest.mark.parametrize(("length", "lines"), [(MAX_LINE, 1), (MAX_LINE + 1, 1), (MAX_LINE * 9, 3)])
def test_a_line_that_is_too_long_says_how_long_it_is(length: int, lines: int) -> None:
    shown = visible("\n".join(["x" * length] * lines))
    assert all(len(line) <= MAX_LINE for line in shown.split("\n"))
    assert shown.count(f"… {length} characters") == (lines if length > MAX_LINE else 0)
    assert visible(shown) == shown


def test_what_is_printed_is_visible_and_what_rich_draws_keeps_its_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.StringIO()
    monkeypatch.setattr(sys, "stdout", VisibleStream(raw))
    monkeypatch.setattr(sys, "stderr", raw)
    with lasting_output():
        print(HOSTILE)
        table = Table(title=HOSTILE)
        table.add_column(Text(HOSTILE))
        table.add_row(Text(HOSTILE, style="bold"))
        Terminal(force_terminal=True, color_system="standard", width=200).print(table)
    with visible_errors():
        print(HOSTILE, file=sys.stderr)
    shown = raw.getvalue()
    assert shown.startswith(ESCAPED)
    assert shown.endswith(f"{ESCAPED}\n")
    assert "\x1b[1m" in shown  # rich's own
    assert not [hidden for hidden in ("\x1b]", "\x1b[2J", "\x9b", "\x07", "\u202e", "\u200b", "\r", "\x7f") if hidden in shown]


def test_json_is_exact_and_has_no_hidden_character(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.StringIO()
    monkeypatch.setattr(sys, "stdout", VisibleStream(raw))
    print_json('"' + "x" * 3 * MAX_LINE + '\x7f"')
    assert raw.getvalue() == '"' + "x" * 3 * MAX_LINE + '\\u007f"\n'


def test_an_event_in_a_log_is_one_line_whatever_it_quotes() -> None:
    line = log_line(f"refused {HOSTILE}\n2026-01-01 INFO r trainer: forged", run="r", worker="feeder", time_s=0.0)
    assert line.endswith(rf"refused {ESCAPED}\n2026-01-01 INFO r trainer: forged")
