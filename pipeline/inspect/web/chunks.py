"""Texts and tokens of groups in chunks that a browser inflates one at a time; the oldest chunks are dropped first."""

import base64
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.pipeline.inspect.report.summary import finite
from penstock.topics.rollouts import Rollout

LOGPROB_STEP = 0.001
"""[nat] Behaviour logprobs are rounded to multiples of this; the lowest is -65.534."""
NO_LOGPROB = 0xFFFF
Column = npt.NDArray[Any]


def pack(facts: Mapping[str, Any], columns: Mapping[str, Column] | None = None) -> str:
    """Encode facts and numeric columns [N] as base64: a length, JSON with null for infinite numbers and NaN, and the columns' bytes."""
    arrays = {name: np.ascontiguousarray(array, array.dtype.newbyteorder("<")) for name, array in (columns or {}).items()}
    layout = [[name, f"{array.dtype.kind}{array.dtype.itemsize}", len(array)] for name, array in arrays.items()]
    header = json.dumps({"facts": finite(facts), "columns": layout}, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    head = header.encode("utf-8", "replace")
    # First bytes of all numbers, then their second bytes, and so on: high bytes hardly differ, which compresses well.
    planes = (array.view(np.uint8).reshape(len(array), array.dtype.itemsize).T.tobytes() for array in arrays.values())
    return deflated(b"".join([struct.pack("<I", len(head)), head, *planes]))


def deflated(raw: bytes) -> str:
    """Compress bytes to a zlib stream in base64, which browsers inflate as `deflate`."""
    return base64.b64encode(zlib.compress(raw, 6)).decode("ascii")


def logprobs(values: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.uint16]:
    """Encode logprobs [N] in steps of `LOGPROB_STEP` below zero, `NO_LOGPROB` for NaN: 0.0, -0.6931 and NaN are 0, 693 and 65535."""
    missing = np.isnan(values)
    steps = np.clip(np.rint(np.where(missing, 0.0, -values) / LOGPROB_STEP), 0, NO_LOGPROB - 1)
    return np.where(missing, NO_LOGPROB, steps).astype(np.uint16)


def smallest(values: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.integer[Any]]:
    """Convert non-negative numbers to uint16 if all of them fit, otherwise to uint32."""
    return values.astype(np.uint16 if not len(values) or int(values.max()) < 1 << 16 else np.uint32)


CHUNK_GROUPS = 64
CHUNK_TOKENS = 150_000
CHUNK_CHARACTERS = 1 << 20


class ChunkSlot(NamedTuple):
    """The position of a group's details: number of the chunk, and slot within it."""

    chunk: int
    slot: int


@dataclass(slots=True)
class Chunks:
    """Chunks of texts (`x0`, `x1`, …) and of tokens (`k0`, …), each base64 of a zlib stream; a group has the same slot in both."""

    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, str] = field(default_factory=dict)
    ids: set[int] = field(default_factory=set)
    _number: int = 0
    _rows: list[object] = field(default_factory=list)
    _rollouts: list[Sequence[Rollout]] = field(default_factory=list)
    _characters: int = 0
    _tokens: int = 0

    def add(self, prompt: str, columns: str, completions: Sequence[str | None], rollouts: Sequence[Rollout]) -> ChunkSlot:
        """Add a group's texts and the tokens of `rollouts`; return their slot."""
        chunk_slot = ChunkSlot(self._number, len(self._rows))
        self._rows.append([prompt, columns, list(completions)])
        self._rollouts.append(rollouts)
        self._characters += len(prompt) + len(columns) + sum(len(text or "") for text in completions)
        self._tokens += sum(len(rollout.token_ids) for rollout in rollouts)
        if len(self._rows) >= CHUNK_GROUPS or self._tokens >= CHUNK_TOKENS or self._characters >= CHUNK_CHARACTERS:
            self.close()
        return chunk_slot

    def close(self) -> None:
        """Compress the groups added since the last chunk into a chunk."""
        if not self._rows:
            return
        text = json.dumps(self._rows, separators=(",", ":"), ensure_ascii=False)
        self.texts[self._number] = deflated(text.encode("utf-8", "replace"))
        if self._tokens:
            self.tokens[self._number] = self._packed()
        self._number += 1
        self._rows, self._rollouts, self._characters, self._tokens = [], [], 0, 0

    def shrink(self, max_bytes: int) -> None:
        """Drop the oldest chunks, tokens before texts, until they fit into `max_bytes`."""
        for chunks in (self.tokens, self.texts):
            while chunks and self.bytes > max_bytes:
                del chunks[min(chunks)]

    @property
    def bytes(self) -> int:
        """Size of all chunks in a page."""
        return sum(map(len, self.texts.values())) + sum(map(len, self.tokens.values()))

    def _packed(self) -> str:
        """Return the tokens of the groups added since the last chunk, as `pack` encodes them, and note their ids."""
        rollouts = [rollout for group in self._rollouts for rollout in group]
        ids = np.concatenate([rollout.token_ids for rollout in rollouts])
        self.ids.update(np.unique(ids).tolist())
        masked_out = [~rollout.loss_mask for rollout in rollouts]
        columns = {
            "id": smallest(ids) if not len(ids) or ids.min() >= 0 else ids,
            "logprob": logprobs(np.concatenate([rollout.behaviour_logprobs for rollout in rollouts])),
            "length": np.array([len(rollout.token_ids) for rollout in rollouts], np.uint32),
            "spans": np.array([len(rollout.span_versions) for rollout in rollouts], np.uint32),
            "span_version": np.concatenate([rollout.span_versions for rollout in rollouts]),
            "span_start": np.concatenate([rollout.span_starts for rollout in rollouts]),
        }
        if any(mask.any() for mask in masked_out):
            columns["left_out"] = np.concatenate(masked_out).astype(np.uint8)
        return pack({"samples": [len(group) for group in self._rollouts]}, columns)
