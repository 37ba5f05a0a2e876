"""Lossless differences of two versions of the weights: positions and new values of the changed elements.

A version's bytes are its tensors' joined in name order. A block replaces elements of one piece of them: a header, the coded positions, the
new values. Values are overwritten, never added, so applying a delta twice changes nothing.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 8 << 20
"""Longest piece of one block: it bounds the memory needed in addition to the two versions."""
WIDTHS = (1, 2, 4)
"""Bytes of a coded gap; 0 for a block without positions, whose values replace the entire piece."""

_HEADER = struct.Struct("<QIIIBB")

Buffer = memoryview | bytes | bytearray


class Block(NamedTuple):
    """The header of a block, followed by `positions` bytes and `count` values of `item` bytes."""

    start: int
    """First byte of the piece in the version."""
    nbytes: int
    """Length of the piece."""
    changes: int
    """Number of replaced elements."""
    positions: int
    """Bytes of their coded positions."""
    item: int
    """Bytes of an element."""
    width: int
    """Bytes of a coded gap; 0 if all elements are replaced."""

    @property
    def body(self) -> int:
        """Number of bytes after the header: positions and values."""
        return self.positions + self.changes * self.item


def pieces(sizes: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield (start, bytes, item) of each piece of joined tensors, from their (bytes, bytes of an element); no piece spans two tensors."""
    start = 0
    for nbytes, item in sizes:
        longest = PIECE_BYTES // item * item
        yield from ((start + low, min(longest, nbytes - low), item) for low in range(0, nbytes, longest))
        start += nbytes


def encode(old: Buffer, new: Buffer, *, start: int, item: int) -> list[Any]:
    """Return a block that turns the piece `old` into `new`, as buffers to be joined; an empty list if both are equal.

    `new` is not copied if the entire piece is replaced: use the result before it changes.
    """
    before, after = _elements(old, item), _elements(new, item)
    changed = _changed(before, after, item)
    if changed is None:
        return [_HEADER.pack(start, after.nbytes, len(after), 0, item, 0), after]
    if not len(changed):
        return []
    gaps = np.diff(changed, prepend=np.int32(-1)) - 1
    longest = int(gaps.max())
    size, width = min((width * (len(gaps) + _skips(gaps, longest, width)), width) for width in WIDTHS)
    if size + len(changed) * item >= after.nbytes:
        return [_HEADER.pack(start, after.nbytes, len(after), 0, item, 0), after]
    coded = code_gaps(gaps, width)
    return [_HEADER.pack(start, after.nbytes, len(changed), coded.nbytes, item, width), coded, after[changed]]


def apply(stream: Buffer, target: memoryview) -> None:
    """Overwrite the elements of `target`, a complete version, that the blocks of `stream` change.

    Raises `ValueError`, with nothing overwritten, for a stream whose blocks do not match or lie outside of `target`.
    """
    blocks = list(read(stream, size=len(target)))
    for block, positions, values in blocks:
        piece = _elements(target[block.start : block.start + block.nbytes], block.item)
        if positions is None:
            piece[:] = values
        else:
            piece[positions()] = values


def read(stream: Buffer, *, size: int) -> Iterator[tuple[Block, Any, npt.NDArray[Any]]]:
    """Yield each block of a stream for a version of `size` bytes: header, function that decodes positions (None: all), new values.

    Raises `ValueError` for a malformed stream. Positions are decoded twice, here to check them, so that they are not stored.
    """
    view, at, end = memoryview(stream).cast("B"), 0, 0
    while at < len(view):
        if len(view) - at < _HEADER.size:
            raise ValueError(f"the weight delta ({len(view)} bytes) is truncated within the block header at byte {at}")
        block = Block(*_HEADER.unpack_from(view, at))
        at += _HEADER.size
        if problem := _flaw(block, left=len(view) - at, after=end, size=size):
            raise ValueError(f"weight delta block at byte {at - _HEADER.size}: {problem}")
        coded, values = view[at : at + block.positions], view[at + block.positions : at + block.body]
        decode = partial(_positions, coded, block) if block.width else None
        if decode is not None:
            decode()
        yield block, decode, _elements(values, block.item)
        at, end = at + block.body, block.start + block.nbytes


def _positions(coded: memoryview, block: Block) -> npt.NDArray[np.int64]:
    """Return the positions of a block's changed elements. Raises `ValueError` if they do not match its header."""
    positions = positions_of(coded, block.width)
    if len(positions) != block.changes or (len(positions) and positions[-1] >= block.nbytes // block.item):
        raise ValueError(f"weight delta block from byte {block.start} on: {len(positions)} positions, expected {block.changes}")
    return positions


def code_gaps(gaps: npt.NDArray[Any], width: int) -> npt.NDArray[Any]:
    """Return the gaps between changed elements in `width` bytes each; the largest code means as many elements without a change.

    Example:
        code_gaps(np.array([3, 300]), 1)  # -> [3, 255, 45]
    """
    largest = _largest(width)
    if not len(gaps) or int(gaps.max()) < largest:
        return gaps.astype(f"<u{width}")
    skips = gaps // largest
    ends = np.cumsum(skips + 1) - 1
    coded = np.full(int(ends[-1]) + 1, largest, dtype=f"<u{width}")
    coded[ends] = gaps - skips * largest
    return coded


def positions_of(coded: Buffer, width: int) -> npt.NDArray[np.int64]:
    """Decode ascending positions from the gaps that `code_gaps` has coded, in codes of `width` bytes.

    A gap is the number of positions in between; the largest code means that many, and the gap continues in the next code.

    Example:
        positions_of(bytes([3, 255, 45]), 1)  # gaps 3 and 255 + 45 -> [3, 304]
    """
    codes = np.frombuffer(coded, dtype=f"<u{width}")
    present = codes != _largest(width)
    positions: npt.NDArray[np.int64] = (np.cumsum(codes + present.astype(np.int64)) - 1)[present]
    return positions


def _flaw(block: Block, *, left: int, after: int, size: int) -> str | None:
    """Return why a block with `left` bytes after its header cannot follow one that ends at `after` in `size` bytes; None if it can."""
    if block.item not in (1, 2, 4, 8) or block.width not in (0, *WIDTHS):
        return f"elements of {block.item} bytes and gaps of {block.width} are not supported"
    if block.start < after or block.start + block.nbytes > size or block.nbytes % block.item:
        return f"bytes {block.start} to {block.start + block.nbytes} are outside the remaining bytes {after} to {size} of the version"
    if block.body > left:
        return f"it has {block.body} bytes, {left} are left"
    if block.width and block.positions % block.width:
        return f"{block.positions} bytes of positions are not a multiple of the gap width {block.width}"
    if not block.width and (block.positions or block.changes * block.item != block.nbytes):
        return f"{block.changes} changed values do not fit into {block.nbytes} bytes"
    return None


def _changed(before: npt.NDArray[Any], after: npt.NDArray[Any], item: int) -> npt.NDArray[np.int32] | None:
    """Return the positions where two arrays differ, None if more than half of the elements do.

    Eight bytes are compared at a time: few of them differ, and only those are compared element by element.
    """
    several, shift = 8 // item, (8 // item).bit_length() - 1
    aligned = len(after) // several * several
    old, new = before[:aligned].view("<u8"), after[:aligned].view("<u8")
    words = np.flatnonzero(old != new).astype(np.int32)
    if len(words) > len(new) // 2 and int(np.count_nonzero(before != after)) > len(after) // 2:
        return None
    nearby = np.flatnonzero(old[words].view(after.dtype) != new[words].view(after.dtype)).astype(np.int32)
    positions = (words[nearby >> shift] << shift) + (nearby & several - 1)
    rest = aligned + np.flatnonzero(before[aligned:] != after[aligned:]).astype(np.int32)
    return np.concatenate([positions, rest]) if len(rest) else positions


def _elements(buffer: Buffer, item: int) -> npt.NDArray[Any]:
    return np.frombuffer(buffer, dtype=f"<u{item}")


def _skips(gaps: npt.NDArray[Any], longest: int, width: int) -> int:
    """Return the number of codes for elements without a change that `code_gaps` needs."""
    largest = _largest(width)
    return int((gaps // largest).sum()) if longest >= largest else 0


def _largest(width: int) -> int:
    return int(256**width) - 1


def joined(parts: Sequence[Any]) -> bytes:
    """Join the buffers of blocks to one stream."""
    return b"".join(memoryview(part).cast("B") for part in parts)
