"""The order of prompts: mixed by weight, rising by a column, the same whoever asks."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.data.open import open_dataset
from penstock.pipeline.data.read_files import DataError
from penstock.pipeline.data.run_data import PromptOrder, RowId, ascending, order


@given(
    sources=st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 10.0)), min_size=1, max_size=4),
    seed=st.integers(0, 9),
    places=st.lists(st.integers(0, 60), min_size=1, max_size=8),
)
def test_each_beginning_holds_the_sources_by_their_weights_and_each_row_has_its_turn(
    sources: list[tuple[int, float]], seed: int, places: list[int]
) -> None:
    sizes, weights = zip(*sources, strict=True)
    turns = [PromptOrder(sizes=sizes, weights=weights, seed=seed).at(place) for place in range(61)]
    again = PromptOrder(sizes=sizes, weights=weights, seed=seed)
    assert [again.at(place) for place in places] == [turns[place] for place in places]
    for source, size in enumerate(sizes):
        rows = [turn.row for turn in turns if turn.source == source]
        share = weights[source] / sum(weights)
        for taken in range(1, 62):
            assert abs(sum(turn.source == source for turn in turns[:taken]) - taken * share) <= len(sizes)
        for start in range(0, len(rows) - size + 1, size):
            assert sorted(rows[start : start + size]) == list(range(size))


@given(seed=st.integers(0, 99), size=st.integers(1, 9), first=st.integers(0, 20), place=st.integers(0, 40))
def test_one_source_is_asked_in_the_order_of_its_epochs(seed: int, size: int, first: int, place: int) -> None:
    assert PromptOrder(sizes=(size,), weights=(1.0,), seed=seed, first=first).at(place) == RowId(0, *order(seed, first + place, size))


def test_rows_go_from_easy_to_hard_in_every_epoch(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": "?", "answer": "!", "level": level}) + "\n" for level in (3, 1.5, 2)))
    ranks = [ascending(open_dataset(str(file)), "level")]
    assert [PromptOrder(sizes=(3,), weights=(1.0,), ranks=ranks).at(place)[1:] for place in range(4)] == [(0, 1), (0, 2), (0, 0), (1, 1)]
    with pytest.raises(DataError, match=r"rows.jsonl:1: the column 'depth', by which data.sort_by sorts, must be a number, not None"):
        ascending(open_dataset(str(file)), "depth")
