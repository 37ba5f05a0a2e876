"""Weights that are not finite, or whose squares are not, are found by their bits, whatever their type."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.tensors.stream import LARGEST, TensorBytes, broken_tensor


def tensor_of(values: list[float], dtype: str) -> TensorBytes:
    numbers = np.array(values, "float32" if dtype == "bfloat16" else dtype)
    data = (numbers.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else numbers
    return TensorBytes(name="w", dtype=dtype, shape=(len(values),), data=data.tobytes())


BROKEN = [float("nan"), -float("nan"), float("inf"), -float("inf"), 1e30, -1e30]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", BROKEN)
def test_a_broken_element_is_found_wherever_it_stands(dtype: str, value: float) -> None:
    with np.errstate(over="ignore"):
        for values in ([value], [0.0, value, -1.0], [-1.0, 2.0, value]):
            assert broken_tensor([tensor_of([1.0], dtype), tensor_of(values, dtype)]) == "w"


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@given(values=st.lists(st.floats(-6e4, 6e4, width=16), max_size=20))
def test_finite_weights_are_never_refused(dtype: str, values: list[float]) -> None:
    assert broken_tensor([tensor_of([*values, -0.0], dtype)]) is None


@given(value=st.floats(width=32))
def test_what_is_refused_is_above_the_limit_or_no_number(value: float) -> None:
    assert (broken_tensor([tensor_of([value], "float32")]) is not None) == (not abs(value) <= np.float32(LARGEST))


def test_integers_and_empty_tensors_are_never_broken() -> None:
    assert broken_tensor([TensorBytes(name="i", dtype="int64", shape=(1,), data=b"\xff" * 8)]) is None
    assert broken_tensor([TensorBytes(name="e", dtype="float32", shape=(0, 4), data=b"")]) is None
