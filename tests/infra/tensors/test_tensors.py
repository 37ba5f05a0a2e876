import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.infra.tensors.stream import ITEM_BYTES, TensorBytes, digest, expected_nbytes, join, split


def make(name, dtype="float32", shape=(2, 3), seed=0):
    data = np.random.default_rng(seed).bytes(expected_nbytes(dtype, shape))
    return TensorBytes(name=name, dtype=dtype, shape=tuple(shape), data=data)


def fields(tensors):
    return {"names": [t.name for t in tensors], "dtypes": [t.dtype for t in tensors], "shapes": [t.shape for t in tensors]}


@st.composite
def tensor_sets(draw):
    names = draw(st.lists(st.text(min_size=1, max_size=8), min_size=0, max_size=5, unique=True))
    shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    return [make(name, draw(st.sampled_from(sorted(ITEM_BYTES))), draw(shapes), seed) for seed, name in enumerate(names)]


@settings(deadline=None)
@given(tensor_sets(), st.integers(1, 40), st.randoms(use_true_random=False))
def test_weights_cut_anywhere_and_listed_in_any_order_come_back_bit_for_bit(tensors, max_bytes, random):
    chunks = list(split(tensors, max_bytes=max_bytes))
    assert all(len(chunk) == max_bytes for chunk in chunks[:-1])
    assert all(0 < len(chunk) <= max_bytes for chunk in chunks)
    shuffled = random.sample(tensors, len(tensors))
    back = join(chunks, **fields(shuffled), expected_digest=digest(shuffled))
    assert {t.name: (t.dtype, t.shape, bytes(t.data)) for t in back} == {t.name: (t.dtype, t.shape, t.data) for t in tensors}
    assert [t.name for t in back] == sorted(t.name for t in tensors)


def test_the_digest_can_be_worked_out_by_hand():
    tensor = TensorBytes(name="w", dtype="bfloat16", shape=(2,), data=b"\x80\x3f\x00\x40")
    assert digest([tensor]) == hashlib.sha256(b"1:w;bfloat16;2;4;\x80\x3f\x00\x40").hexdigest()


@pytest.mark.parametrize("other", [
    make("b", seed=1), make("a", seed=2), make("a", shape=(3, 2), seed=1), make("a", dtype="int32", seed=1),
])  # fmt: skip
def test_the_digest_tells_apart_names_bytes_shapes_and_dtypes(other):
    assert digest([make("a", seed=1)]) != digest([other])


def test_a_flipped_bit_is_refused():
    tensors = [make("a"), make("b", seed=1)]
    chunks = [bytearray(chunk) for chunk in split(tensors, max_bytes=16)]
    chunks[1][3] ^= 1
    with pytest.raises(ValueError, match="digest"):
        join(chunks, **fields(tensors), expected_digest=digest(tensors))


def test_a_missing_chunk_is_refused():
    tensors = [make("a"), make("b", seed=1)]
    with pytest.raises(ValueError, match="32 bytes where the manifest's tensors take 48"):
        join(list(split(tensors, max_bytes=16))[:-1], **fields(tensors))


@pytest.mark.parametrize(("dtype", "shape"), [("complex64", (1,)), ("float32", (-1,))])
def test_a_tensor_that_cannot_be_is_refused(dtype, shape):
    with pytest.raises(ValueError, match=r"complex64|shape"):
        join([], names=["a"], dtypes=[dtype], shapes=[shape])


def test_two_tensors_of_one_name_and_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="two tensors are named 'a'"):
        digest([make("a"), make("a", seed=1)])
    with pytest.raises(ValueError, match="a: 3 bytes"):
        list(split([TensorBytes(name="a", dtype="float32", shape=(1,), data=b"abc")]))
