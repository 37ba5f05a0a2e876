"""Deltas between versions of the weights: what is applied gives the new bytes, what is damaged changes nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.topics.versions import weight_delta
from penstock.topics.versions.weight_delta import PIECE_BYTES, apply, code_gaps, encode, joined, pieces, positions_of

ITEMS = st.sampled_from((1, 2, 4, 8))


@st.composite
def versions(draw: st.DrawFn) -> tuple[list[tuple[int, int]], bytes, bytes]:
    """Tensors as (bytes, bytes of an element), and two versions of them."""
    sizes = [(item * draw(st.integers(0, 40)), item) for item in draw(st.lists(ITEMS, max_size=4))]
    total = sum(nbytes for nbytes, _ in sizes)
    old = draw(st.binary(min_size=total, max_size=total))
    share = draw(st.sampled_from((0.0, 0.02, 0.3, 1.0)))
    mask = np.random.default_rng(draw(st.integers(0, 99))).random(total) < share
    new = np.where(mask, np.frombuffer(old, np.uint8) ^ 255, np.frombuffer(old, np.uint8)).astype(np.uint8)
    return sizes, old, new.tobytes()


def stream_of(sizes: list[tuple[int, int]], old: bytes, new: bytes) -> bytes:
    parts = []
    for start, nbytes, item in pieces(sizes):
        parts += encode(old[start : start + nbytes], new[start : start + nbytes], start=start, item=item)
    return joined(parts)


@given(versions())
def test_a_delta_applied_to_the_old_version_gives_the_new_one_and_a_second_time_changes_nothing(case) -> None:
    sizes, old, new = case
    stream, target = stream_of(sizes, old, new), bytearray(old)
    for _ in range(2):
        apply(stream, memoryview(target))
        assert bytes(target) == new
    assert (stream == b"") == (old == new)
    blocks = sum(1 for _ in pieces(sizes))
    assert len(stream) <= len(new) + blocks * weight_delta._HEADER.size


@given(st.lists(st.integers(0, 70_000), max_size=30), st.sampled_from(weight_delta.WIDTHS))
def test_positions_survive_their_coding_in_every_width(gaps: list[int], width: int) -> None:
    expected = np.cumsum(np.array(gaps, dtype=np.int64) + 1) - 1
    coded = code_gaps(np.array(gaps, dtype=np.int64), width)
    assert positions_of(coded.tobytes(), width).tolist() == expected.tolist()


@given(versions(), st.data())
def test_a_damaged_stream_is_refused_with_nothing_overwritten_or_overwrites_only_within_the_version(case, data: st.DataObject) -> None:
    sizes, old, new = case
    stream = bytearray(stream_of(sizes, old, new))
    if not stream:
        return
    place = data.draw(st.integers(0, len(stream) - 1))
    stream[place] ^= data.draw(st.integers(1, 255))
    cut = bytes(stream[: data.draw(st.integers(0, len(stream)))]) if data.draw(st.booleans()) else bytes(stream)
    target = bytearray(old)
    try:
        apply(cut, memoryview(target))
    except ValueError:
        assert bytes(target) == old
    assert len(target) == len(old)


def test_one_element_in_a_hundred_takes_a_fiftieth_of_the_bytes_or_less() -> None:
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, 1 << 20, dtype=np.uint16)
    new = old.copy()
    changed = rng.choice(len(old), len(old) // 100, replace=False)
    new[changed] ^= 1
    parts = encode(memoryview(old).cast("B"), memoryview(new).cast("B"), start=0, item=2)
    assert len(joined(parts)) < 0.02 * new.nbytes
    target = bytearray(old.tobytes())
    apply(joined(parts), memoryview(target))
    assert bytes(target) == new.tobytes()


def test_a_piece_in_which_most_elements_differ_is_sent_whole() -> None:
    old, new = bytes(1000), bytes(range(1, 251)) * 4
    parts = encode(old, new, start=0, item=1)
    assert len(joined(parts)) == len(new) + weight_delta._HEADER.size


def test_pieces_end_where_tensors_do() -> None:
    assert list(pieces([(10, 2), (0, 4), (PIECE_BYTES + 8, 8)])) == [(0, 10, 2), (10, PIECE_BYTES, 8), (10 + PIECE_BYTES, 8, 8)]


@pytest.mark.parametrize("size", [0, 7])
def test_a_block_outside_of_the_version_is_refused(size: int) -> None:
    stream = joined(encode(bytes(8), bytes([1] * 8), start=0, item=1))
    with pytest.raises(ValueError, match="bytes 0 to 8 are outside the remaining bytes 0 to"):
        apply(stream, memoryview(bytearray(size)))
