"""What a worker leaves to its successor beside a committed offset: the format of runs before, and nothing read into damaged ones."""

import pytest

from penstock.pipeline.runtime.offset_metadata import FeederOffsetMetadata, RolloutOffsetMetadata, ScorerOffsetMetadata, decode, encode


@pytest.mark.parametrize(
    ("note", "text"),
    [
        (RolloutOffsetMetadata(rollouts=7), '{"rollouts": 7}'),
        (ScorerOffsetMetadata(below=3, groups=11), '{"below": 3, "groups": 11}'),
        (FeederOffsetMetadata(ended=5, dropped=2, place=6), '{"ended": 5, "dropped": 2, "place": 6}'),
    ],
)
def test_a_note_is_written_and_read_in_its_one_format(
    note: RolloutOffsetMetadata | ScorerOffsetMetadata | FeederOffsetMetadata, text: str
) -> None:
    assert encode(note) == text
    assert decode(type(note), text) == note
    assert decode(type(note), text[:-1] + ', "later": "more"}') == note


@pytest.mark.parametrize("text", ["", "{}", "what?", "[7]", "null", '{"rollouts": null}', '{"rollouts": -1}', '{"rollouts": 1.5}', "7"])
def test_a_damaged_note_is_none(text: str) -> None:
    assert decode(RolloutOffsetMetadata, text) is None
