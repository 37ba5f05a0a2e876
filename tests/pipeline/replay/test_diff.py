"""Differences are counted by their bits and measured in numbers."""

import numpy as np
import pytest

from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.replay.verify import differing_tensors, drift, values


def tensor(name: str, numbers: list[float], dtype: str = "float32") -> TensorBytes:
    array = np.array(numbers, np.float32)
    data = array.tobytes() if dtype == "float32" else (array.view(np.uint32) >> 16).astype("<u2").tobytes()
    return TensorBytes(name=name, dtype=dtype, shape=(len(numbers),), data=data)


def test_the_tensors_that_differ_are_named_with_how_many_elements_and_by_how_much() -> None:
    before = [tensor("a", [1.0, 2.0, 3.0]), tensor("b", [1.0, 1.0]), tensor("c", [0.0])]
    after = [tensor("a", [1.0, 2.5, 3.0]), tensor("b", [2.0, -1.0]), tensor("c", [0.0])]
    assert differing_tensors(after, before) == [
        {"name": "b", "elements": 2, "differing": 2, "max_abs": 2.0},
        {"name": "a", "elements": 3, "differing": 1, "max_abs": 0.5},
    ]
    assert differing_tensors(before, before) == []


def test_minus_zero_is_another_number_and_has_no_distance() -> None:
    assert differing_tensors([tensor("a", [-0.0])], [tensor("a", [0.0])]) == [{"name": "a", "elements": 1, "differing": 1, "max_abs": 0.0}]


def test_a_tensor_that_is_not_there_or_of_another_shape_comes_first() -> None:
    found = differing_tensors([tensor("a", [1.0]), tensor("b", [1.0, 2.0])], [tensor("a", [9.0]), tensor("b", [1.0]), tensor("c", [1.0])])
    assert [row["name"] for row in found] == ["b", "c", "a"]
    assert found[0]["problem"] == "float32[2], recorded float32[1]"


def test_bfloat16_is_read_as_numbers() -> None:
    assert values(tensor("a", [1.5, -2.0], "bfloat16")).tolist() == [1.5, -2.0]


def test_the_drift_is_the_distance_over_the_recorded_norm() -> None:
    found = drift([tensor("a", [3.0, 0.0]), tensor("b", [4.5])], [tensor("a", [3.0, 0.0]), tensor("b", [4.0])])
    assert found == {"max_abs": 0.5, "relative": pytest.approx(0.1)}
