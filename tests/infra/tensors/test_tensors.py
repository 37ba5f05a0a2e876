import hashlib

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.tensors.stream import TensorBytes, digest, expected_nbytes, hash_of


def make(name, dtype="float32", shape=(2, 3), seed=0):
    data = np.random.default_rng(seed).bytes(expected_nbytes(dtype, shape))
    return TensorBytes(name=name, dtype=dtype, shape=tuple(shape), data=data)


def test_the_digest_can_be_worked_out_by_hand():
    tensor = TensorBytes(name="w", dtype="bfloat16", shape=(2,), data=b"\x80\x3f\x00\x40")
    hashed = b"1:w;bfloat16;2;4;\x80\x3f\x00\x40"
    assert digest([tensor], "sha256") == hashlib.sha256(hashed).hexdigest()
    assert digest([tensor]) == f"blake3:{blake3(hashed).hexdigest()}"


@given(st.lists(st.integers(0, 400_000), max_size=4), st.randoms(use_true_random=False))
def test_the_digest_depends_neither_on_the_order_of_tensors_nor_on_how_many_threads_hash_them(sizes, random):
    tensors = [make(f"t{number}", "int8", (size,), number) for number, size in enumerate(sizes)]
    one = blake3()
    for tensor in tensors:
        one.update(f"2:{tensor.name};int8;{tensor.nbytes};{tensor.nbytes};".encode() + tensor.data)
    assert digest(random.sample(tensors, len(tensors))) == f"blake3:{one.hexdigest()}"


@pytest.mark.parametrize("hash_name", ["blake3", "sha256"])
def test_a_recorded_digest_tells_its_hash_function(hash_name):
    assert hash_of(digest([make("a")], hash_name)) == hash_name


@pytest.mark.parametrize("other", [
    make("b", seed=1), make("a", seed=2), make("a", shape=(3, 2), seed=1), make("a", dtype="int32", seed=1),
])  # fmt: skip
def test_the_digest_tells_apart_names_bytes_shapes_and_dtypes(other):
    assert digest([make("a", seed=1)]) != digest([other])


@pytest.mark.parametrize(("dtype", "shape"), [("complex64", (1,)), ("float32", (-1,))])
def test_a_tensor_that_cannot_be_is_refused(dtype, shape):
    with pytest.raises(ValueError, match=r"complex64|shape"):
        expected_nbytes(dtype, shape)


def test_two_tensors_of_one_name_and_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="two tensors are named 'a'"):
        digest([make("a"), make("a", seed=1)])
    with pytest.raises(ValueError, match="a: 3 bytes"):
        digest([TensorBytes(name="a", dtype="float32", shape=(1,), data=b"abc")])
