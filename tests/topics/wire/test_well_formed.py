"""Lone surrogates are replaced and counted; all other text stays as it is."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.topics.wire.visible import well_formed, well_formed_json
from tests.support.any_text import ANY_TEXT

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
)


@pytest.mark.parametrize(
    ("text", "expected", "count"),
    [
        ("3a\ud83d=", "3a\ufffd=", 1),
        ("\ude00", "\ufffd", 1),
        ("\ud83d\ude00", "😀", 0),
        ("\ude00\ud83d", "\ufffd\ufffd", 2),
        ("\ud83d\ud83d\ude00", "\ufffd😀", 1),
        ("was \ufffd", "was \ufffd", 0),
        ("a\0b", "a\0b", 0),
    ],
)
def test_half_a_character_becomes_the_replacement_and_two_halves_become_the_character(text: str, expected: str, count: int) -> None:
    assert well_formed(text) == expected
    assert well_formed_json({text: [text]}) == ({expected: [expected]}, 2 * count)


@given(text=ANY_TEXT)
def test_every_text_becomes_one_that_utf8_holds_and_a_text_that_it_holds_stays_as_it_is(text: str) -> None:
    made = well_formed(text)
    made.encode()
    assert well_formed(made) is made
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    assert made is text


@given(value=VALUES)
def test_a_json_value_keeps_its_shape_and_has_no_surrogate_in_texts_or_keys(value: Any) -> None:
    made, count = well_formed_json(value)
    json.dumps(made, ensure_ascii=False).encode()
    assert well_formed_json(made) == (made, 0)
    assert (count == 0 and made == value) or json.dumps(made) != json.dumps(value)
