"""Where the values stand in the payload of a sample without gaps: its lengths decide, and all else is the same in every such payload.

The rule: what is said here of thousands of samples at once is what `penstock.topics.rollouts.encode` writes for each,
which a test compares.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.infra.kafka.blocks import Block
from penstock.pipeline.archive.arrays import Flags, Ints
from penstock.topics import rollouts
from penstock.topics.rollouts import FINISHES
from penstock.topics.samples import Rollout
from penstock.topics.wire.headers import MAX_HEADER_BYTES

Words = NDArray[np.uint64]
Lengths = tuple[int, int, int, int]
"""Tokens, spans, bytes of the finish, bytes of the worker's name."""

BY_SIZE = {len(finish): finish for finish in FINISHES}
assert len(BY_SIZE) == len(FINISHES) and max(BY_SIZE) <= 8
_FINISH_WORDS = np.zeros(9, np.uint64)
for _size, _finish in BY_SIZE.items():
    _FINISH_WORDS[_size] = int.from_bytes(_finish.encode(), "little")


def _padded(size: Ints) -> Ints:
    return size + 7 & -8


@dataclass(frozen=True)  # without slots: places are kept
class Layout:
    """The lengths of R samples, each [R]; from them the places of their values, in bytes after the first value, the group.

    The sample follows the group, then seven lists, each behind its length. After the finish come temperature, top_p, top_k, begin and end.
    """

    tokens: Ints
    spans: Ints
    finish: Ints
    worker: Ints

    @cached_property
    def ids(self) -> Ints:
        """Of the first token id."""
        return np.full_like(self.tokens, 24)

    @cached_property
    def logprobs(self) -> Ints:
        """Of the first logprob."""
        return self.ids + _padded(4 * self.tokens) + 8

    @cached_property
    def mask(self) -> Ints:
        """Of the first 8 tokens' bits."""
        return self.logprobs + _padded(4 * self.tokens) + 8

    @cached_property
    def versions(self) -> Ints:
        """Of the first span's version."""
        return self.mask + _padded((self.tokens + 7) // 8) + 8

    @cached_property
    def starts(self) -> Ints:
        """Of the first span's start."""
        return self.versions + _padded(4 * self.spans) + 8

    @cached_property
    def finished(self) -> Ints:
        """Of the finish."""
        return self.starts + _padded(4 * self.spans) + 8

    @cached_property
    def name(self) -> Ints:
        """Of the worker's name."""
        return self.finished + 8 + 5 * 8 + 8

    @cached_property
    def size(self) -> Ints:
        """Of all values."""
        return self.name + _padded(self.worker)

    def lengths(self) -> list[Lengths]:
        """[R] those of each sample."""
        columns = (self.tokens, self.spans, self.finish, self.worker)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def lists(self) -> Iterator[tuple[Ints, Ints, int]]:
        """(place, elements, bits of one) of each list; the four bytes before it say how many elements it has, those before are zero."""
        yield self.ids, self.tokens, 32
        yield self.logprobs, self.tokens, 32
        yield self.mask, self.tokens, 1
        yield self.versions, self.spans, 32
        yield self.starts, self.spans, 32
        yield self.finished, self.finish, 8
        yield self.name, self.worker, 8

    def fits(self, words: Words, first: Ints) -> Flags:
        """Whether all that is no value is as our encoder writes it; `first` are the places of the groups in `words`, in bytes.

        That is the lengths, the finish, and zeros where a list does not fill its last word.
        """
        good: Flags = words[first + self.finished >> 3] == _FINISH_WORDS[self.finish]
        for place, count, bits in self.lists():
            at, used = first + place, count * bits
            rest = (used & 63).astype(np.uint64)
            good &= words[at - 8 >> 3] == count.astype(np.uint64) << np.uint64(32)
            good &= (rest == 0) | (words[at + (used >> 6 << 3) >> 3] >> rest == 0)
        return good


def payload(lengths: Lengths) -> bytes:
    """Of some sample of these lengths."""
    tokens, spans, finish, worker = lengths
    sample = Rollout(
        group=0,
        sample=0,
        token_ids=np.zeros(tokens, np.int32),
        behaviour_logprobs=np.zeros(tokens, np.float32),
        loss_mask=np.zeros(tokens, np.bool_),
        span_versions=np.zeros(spans, np.int32),
        span_starts=np.zeros(spans, np.int32),
        finish=BY_SIZE[finish],
        temperature=0.0,
        top_p=0.0,
        top_k=0,
        started_ns=0,
        ended_ns=0,
        worker=" " * worker,
    )
    return rollouts.encode(sample)


def _around() -> tuple[int, bytes]:
    lengths = 0, 1, min(BY_SIZE), 8
    whole = payload(lengths)
    tail = whole[whole.rindex(8 * b" ") + 8 :]
    return len(whole) - int(Layout(*map(np.array, lengths)).size) - len(tail), tail


FRONT, TAIL = _around()
"""Bytes before the values, which the lengths decide, and what follows them, which is always the same."""


def of_block(block: Block) -> tuple[Flags, Layout]:
    """Which payloads have the size that the lengths in them make, and the lengths of these alone."""
    data, (begins, ends) = np.frombuffer(block.data, np.uint8), block.values

    def length(place: Ints) -> Ints:
        """What stands in the four bytes before; anything, where that is outside of the payload."""
        at = (begins + (FRONT - 4) + place)[:, None] + np.arange(4)
        return data.take(at, mode="clip").view("<i4")[:, 0].astype(np.int64)

    nothing = np.zeros(len(block), np.int64)
    tokens = length(Layout(nothing, nothing, nothing, nothing).ids)
    spans = length(Layout(tokens, nothing, nothing, nothing).versions)
    finish = length(Layout(tokens, spans, nothing, nothing).finished)
    worker = length(Layout(tokens, spans, finish, nothing).name)
    found = Layout(tokens, spans, finish, worker)
    usual: Flags = (FRONT + found.size + len(TAIL) == ends - begins) & np.isin(finish, list(BY_SIZE))
    usual &= (tokens >= 0) & (spans > 0) & (worker >= 0) & (worker <= MAX_HEADER_BYTES)
    return usual, found if usual.all() else Layout(tokens[usual], spans[usual], finish[usual], worker[usual])
