"""Adapters merged into version 0: the same bits whatever the order of the additions, and what is damaged changes nothing."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.topics.versions import weight_adapter
from penstock.topics.versions.weight_adapter import DTYPES, apply, encode, merge

ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
SHAPE, RANK, START = (6, 5), 3, 16


def stored(values: Any, dtype: str) -> bytes:
    """Numbers of which every type has the first bits only."""
    if dtype == "bfloat16":
        return (np.asarray(values, "<f4").view(np.uint32) >> 16).astype("<u2").tobytes()
    return np.asarray(values, dtype).tobytes()


def numbers(data: bytes, dtype: str) -> Any:
    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view("<f4").astype(np.float64)
    return np.frombuffer(data, dtype).astype(np.float64)


def drawn(seed: int, rank: int, shape: tuple[int, int] = SHAPE) -> tuple[Any, Any]:
    """A and B whose elements differ in size by many powers of two."""
    rng = np.random.default_rng(seed)
    sizes = [(rank, shape[1]), (shape[0], rank)]
    a, b = (np.ldexp(rng.standard_normal(size), rng.integers(-20, 4, size)).astype(np.float32) for size in sizes)
    return a, b


def merged(weights: bytes, a: Any, b: Any, dtype: str, scale: float = 2.0) -> bytes:
    target = bytearray(len(weights))
    merge(weights, memoryview(target), a, b, dtype=dtype, scale=scale)
    return bytes(target)


@pytest.mark.parametrize("dtype", DTYPES)
def test_merged_weights_are_the_sum_rounded_to_their_type(dtype: str) -> None:
    a, b = drawn(0, RANK)
    weights = stored(np.random.default_rng(1).standard_normal(SHAPE), dtype)
    exact = numbers(weights, dtype) + 2.0 * (b.astype(np.float64) @ a.astype(np.float64)).ravel()
    found = numbers(merged(weights, a, b, dtype), dtype)
    last_bit = {"float32": 2**-24, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
    largest = np.abs(b).max() * np.abs(a).max()
    assert np.abs(found - exact).max() <= 1.01 * last_bit * np.abs(exact).max() + RANK * 2**-22 * largest


@given(seed=st.integers(0, 2**32 - 1), rank=st.sampled_from([1, 2, 3, 16, 65]), dtype=st.sampled_from(DTYPES))
def test_the_order_of_the_additions_and_the_layout_in_memory_do_not_show(seed: int, rank: int, dtype: str) -> None:
    a, b = drawn(seed, rank, (37, 23))
    weights = stored(np.random.default_rng(seed).standard_normal((37, 23)), dtype)
    order = np.random.default_rng(seed).permutation(rank)
    one = merged(weights, a, b, dtype)
    assert merged(weights, np.asfortranarray(a[order]), b[:, order], dtype) == one
    rows = [merged(weights[low * 23 * ITEM[dtype] : (low + 1) * 23 * ITEM[dtype]], a, b[low : low + 1], dtype) for low in range(37)]
    assert b"".join(rows) == one


@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters_whose_b_is_zero_leave_every_bit(dtype: str) -> None:
    weights = stored([[-0.0, 0.0, 1.5], [2.0, -1.0, -0.0]], dtype)
    assert merged(weights, np.ones((2, 3), np.float32), np.zeros((2, 2), np.float32), dtype) == weights


@pytest.mark.parametrize("below_is_target", [True, False])
def test_what_no_block_names_is_as_in_version_0(below_is_target: bool) -> None:
    a, b = drawn(0, RANK)
    below = bytearray(np.random.default_rng(0).standard_normal(48).astype(np.float32).tobytes())
    expected = below[:START] + merged(bytes(below[START : START + 120]), a, b, "float32") + below[START + 120 :]
    target = below if below_is_target else bytearray(len(below))
    apply(stream_of(a, b), memoryview(below), memoryview(target))
    assert target == expected


def stream_of(a: Any, b: Any, *, start: int = START, dtype: str = "float32") -> bytes:
    return b"".join(bytes(part) for part in encode(a, b, start=start, dtype=dtype, scale=2.0))


@given(st.data())
def test_a_damaged_stream_is_refused_with_nothing_overwritten_or_is_well_formed(data: st.DataObject) -> None:
    a, b = drawn(0, RANK)
    stream = bytearray(stream_of(a, b))
    place = data.draw(st.integers(0, len(stream) - 1))
    stream[place] ^= data.draw(st.integers(1, 255))
    cut = bytes(stream[: data.draw(st.integers(0, len(stream)))]) if data.draw(st.booleans()) else bytes(stream)
    below = np.arange(48, dtype=np.float32).tobytes()
    target = bytearray(len(below))
    try:
        apply(cut, memoryview(below), memoryview(target))
    except ValueError:
        assert target == bytes(len(below))
    else:
        assert sum(weight_adapter._HEADER.size + block.body for block, _, _ in weight_adapter.read(cut, size=192)) == len(cut)


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (stream_of(*drawn(0, RANK), start=100), "bytes 100 to 220 are outside the remaining bytes 0 to 192"),
        (2 * stream_of(*drawn(0, RANK)), "outside the remaining bytes 136 to 192"),
        (stream_of(*drawn(0, RANK))[:-4], "needs 132 bytes, but only 128 remain"),
        (stream_of(*drawn(0, RANK))[:9], "truncated within the block header"),
        (stream_of(np.full((1, 5), np.nan, np.float32), np.ones((6, 1), np.float32)), "contains NaN or infinity"),
        (stream_of(np.ones((0, 5), np.float32), np.ones((6, 0), np.float32)), "cannot have rank 0"),
    ],
)
def test_a_stream_that_does_not_fit_is_refused_in_words(stream: bytes, said: str) -> None:
    target = bytearray(192)
    with pytest.raises(ValueError, match=said):
        apply(stream, memoryview(bytes(192)), memoryview(target))
    assert target == bytes(192)


def test_adapters_of_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match="of a version of 16 bytes cannot be applied to a base version of 8"):
        apply(b"", memoryview(bytes(8)), memoryview(bytearray(16)))
