"""What a worker leaves to its successor beside a committed offset: the format of runs before, and nothing read into damaged ones."""

import pytest

from penstock.pipeline.runtime.commit_notes import FeederNote, RolloutNote, ScorerNote, decode, encode


@pytest.mark.parametrize(
    ("note", "text"),
    [
        (RolloutNote(rollouts=7), '{"rollouts": 7}'),
        (ScorerNote(below=3, groups=11), '{"below": 3, "groups": 11}'),
        (FeederNote(ended=5, dropped=2, place=6), '{"ended": 5, "dropped": 2, "place": 6}'),
    ],
)
def test_a_note_is_written_and_read_in_its_one_format(note: RolloutNote | ScorerNote | FeederNote, text: str) -> None:
    assert encode(note) == text
    assert decode(type(note), text) == note
    assert decode(type(note), text[:-1] + ', "later": "more"}') == note


@pytest.mark.parametrize("text", ["", "{}", "what?", "[7]", "null", '{"rollouts": null}', '{"rollouts": -1}', '{"rollouts": 1.5}', "7"])
def test_a_damaged_note_is_none(text: str) -> None:
    assert decode(RolloutNote, text) is None
