"""Records of one sample without gaps: all with the same lengths have the same bytes but for the values, so one `struct` moves them.

The rule: a record is read this way only when every byte that is not a value is what our own encoder writes for these lengths; any
other record is Arrow's to judge."""

import struct
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from penstock.topics.samples import Finish, Rollout, flaw, no_trajectory, write_samples, zeros
from penstock.topics.wire.codec import Codec
from penstock.topics.wire.columns import Number, Writer

_KNOWN = 4096
"""Combinations of lengths kept; a run has one for each completion length and way to finish."""


class Shape:
    """The layout of a record of one sample: `tokens`, `spans`, the way it finished, bytes of the worker's name."""

    __slots__ = ("_body", "_finish", "_finish_size", "_front", "_spans", "_tail", "_tokens", "_worker_size")

    def __init__(self, codec: Codec, *, tokens: int, spans: int, finish: Finish, worker_size: int) -> None:
        self._tokens, self._spans, self._worker_size = tokens, spans, worker_size
        self._finish = finish.encode()
        self._finish_size = len(self._finish)
        ids, marks, numbers = _room(4 * tokens), _room((tokens + 7) // 8), _room(4 * spans)
        texts = f"ii{_room(self._finish_size)}ddqqqii{_room(worker_size)}"
        self._body = struct.Struct(f"<qqii{ids}ii{ids}ii{marks}ii{numbers}ii{numbers}{texts}")
        sample = zeros(tokens=tokens, spans=spans, finish=finish, worker_size=worker_size)
        payload = encode(codec, sample)
        trajectory = no_trajectory(1).body
        end = payload.rindex(trajectory)
        self._front, self._tail = payload[: end - self._body.size], payload[end:]
        assert self.write(sample) == payload, "the encoder and the layout of a sample differ"

    @property
    def front(self) -> bytes:
        """What stands before the values; it tells all the lengths."""
        return self._front

    def write(self, sample: Rollout) -> bytes:
        """The payload of a sample of this shape, whose arrays fit together."""
        tokens, spans = self._tokens, self._spans
        return b"".join(
            (
                self._front,
                self._body.pack(
                    sample.group,
                    sample.sample,
                    0,
                    tokens,
                    np.asarray(sample.token_ids, np.int32).tobytes(),
                    0,
                    tokens,
                    np.asarray(sample.behaviour_logprobs, np.float32).tobytes(),
                    0,
                    tokens,
                    np.packbits(sample.loss_mask, bitorder="little").tobytes(),
                    0,
                    spans,
                    np.asarray(sample.span_versions, np.int32).tobytes(),
                    0,
                    spans,
                    np.asarray(sample.span_starts, np.int32).tobytes(),
                    0,
                    self._finish_size,
                    self._finish,
                    sample.temperature,
                    sample.top_p,
                    sample.top_k,
                    sample.started_ns,
                    sample.ended_ns,
                    0,
                    self._worker_size,
                    sample.worker.encode(),
                ),
                self._tail,
            )
        )

    def read(self, value: bytes) -> Rollout | None:
        """The sample in a payload that begins with `front`; None when anything else is not as `write` writes it."""
        try:
            return self._read(value)
        except ValueError:  # text that is not UTF-8: Arrow says it better
            return None

    def _read(self, value: bytes) -> Rollout | None:
        start = len(self._front)
        if len(value) != start + self._body.size + len(self._tail) or not value.endswith(self._tail):
            return None
        found = self._body.unpack_from(value, start)
        t, s = (0, self._tokens), (0, self._spans)
        lists = found[2:4] == found[5:7] == found[8:10] == t and found[11:13] == found[14:16] == s
        if not lists or found[17:20] != (0, self._finish_size, self._finish) or found[25:27] != (0, self._worker_size):
            return None
        logprobs = _array(found[7], np.float32)
        sample = Rollout(
            group=found[0],
            sample=found[1],
            token_ids=_array(found[4], np.int32),
            behaviour_logprobs=logprobs,
            loss_mask=np.unpackbits(_array(found[10], np.uint8), count=self._tokens, bitorder="little").view(np.bool_),
            span_versions=_array(found[13], np.int32),
            span_starts=_array(found[16], np.int32),
            finish=self._finish.decode(),  # type: ignore[arg-type]
            temperature=found[20],
            top_p=found[21],
            top_k=found[22],
            started_ns=found[23],
            ended_ns=found[24],
            worker=found[27].decode(),
        )
        return None if flaw(sample, gaps=bool(np.isnan(logprobs).any())) else sample


class Shapes:
    """The shapes of one codec's records that were met so far."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._front = 0
        self._by_front: dict[bytes, Shape] = {}
        self._known = lru_cache(_KNOWN)(self._make)

    def of(self, sample: Rollout) -> Shape:
        """The shape of a sample that has no gaps and no flaw."""
        return self._known(len(sample.token_ids), len(sample.span_starts), sample.finish, len(sample.worker.encode()))

    def find(self, value: bytes) -> Shape | None:
        """The shape of the payload of a sample, if one like it was met before."""
        return self._by_front.get(value[: self._front])

    def _make(self, tokens: int, spans: int, finish: Finish, worker_size: int) -> Shape:
        shape = Shape(self._codec, tokens=tokens, spans=spans, finish=finish, worker_size=worker_size)
        if len(self._by_front) >= _KNOWN:
            self._by_front.clear()
        self._front = len(shape.front)
        self._by_front[shape.front] = shape
        return shape


def _array(data: bytes, kind: type[Number]) -> NDArray[Number]:
    return np.frombuffer(data, kind) if data else np.empty(0, kind)


def encode(codec: Codec, sample: Rollout) -> bytes:
    """The payload of any sample; raises `ValueError` where its arrays do not fit together."""
    writer = Writer()
    writer.int64s((sample.group,))
    write_samples(writer, (sample,))
    return codec.encode(writer)


def _room(size: int) -> str:
    """`struct`'s format of a buffer, padded to 8 bytes."""
    return f"{size}s{-size & 7}x"
