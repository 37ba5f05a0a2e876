"""Texts and tokens of groups in chunks that a browser inflates one at a time; the oldest chunks are dropped first."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from penstock.pipeline.observe.html.pack import deflated, logprobs, pack, smallest
from penstock.topics.samples import Rollout

CHUNK_GROUPS = 64
CHUNK_TOKENS = 150_000
CHUNK_CHARACTERS = 1 << 20


class Place(NamedTuple):
    """The position of a group's details: number of the piece, and slot within it."""

    chunk: int
    slot: int


@dataclass(slots=True)
class Chunks:
    """Pieces of texts (`x0`, `x1`, …) and of tokens (`k0`, …), each base64 of a zlib stream; one group has one place in both."""

    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, str] = field(default_factory=dict)
    ids: set[int] = field(default_factory=set)
    """Token ids that occur."""
    _number: int = 0
    _rows: list[object] = field(default_factory=list)
    _drawn: list[Sequence[Rollout]] = field(default_factory=list)
    _characters: int = 0
    _tokens: int = 0

    def add(self, prompt: str, columns: str, completions: Sequence[str | None], rollouts: Sequence[Rollout]) -> Place:
        """Add a group's texts, and the tokens of those of its samples that are wanted; return their place."""
        place = Place(self._number, len(self._rows))
        self._rows.append([prompt, columns, list(completions)])
        self._drawn.append(rollouts)
        self._characters += len(prompt) + len(columns) + sum(len(text or "") for text in completions)
        self._tokens += sum(len(rollout.token_ids) for rollout in rollouts)
        if len(self._rows) >= CHUNK_GROUPS or self._tokens >= CHUNK_TOKENS or self._characters >= CHUNK_CHARACTERS:
            self.close()
        return place

    def close(self) -> None:
        """Pack what is there."""
        if not self._rows:
            return
        text = json.dumps(self._rows, separators=(",", ":"), ensure_ascii=False)
        self.texts[self._number] = deflated(text.encode("utf-8", "replace"))
        if self._tokens:
            self.tokens[self._number] = self._packed()
        self._number += 1
        self._rows, self._drawn, self._characters, self._tokens = [], [], 0, 0

    def shrink(self, max_bytes: int) -> bool:
        """Drop the oldest pieces until all of them are that small, tokens before texts; whether any was dropped."""
        dropped = False
        for pieces in (self.tokens, self.texts):
            while pieces and self.bytes > max_bytes:
                del pieces[min(pieces)]
                dropped = True
        return dropped

    @property
    def bytes(self) -> int:
        """What all pieces take in a page."""
        return sum(map(len, self.texts.values())) + sum(map(len, self.tokens.values()))

    def _packed(self) -> str:
        drawn = [rollout for group in self._drawn for rollout in group]
        ids = np.concatenate([rollout.token_ids for rollout in drawn])
        self.ids.update(np.unique(ids).tolist())
        left_out = [~rollout.loss_mask for rollout in drawn]
        columns = {
            "id": smallest(ids) if not len(ids) or ids.min() >= 0 else ids,
            "logprob": logprobs(np.concatenate([rollout.behaviour_logprobs for rollout in drawn])),
            "length": np.array([len(rollout.token_ids) for rollout in drawn], np.uint32),
            "spans": np.array([len(rollout.span_versions) for rollout in drawn], np.uint32),
            "span_version": np.concatenate([rollout.span_versions for rollout in drawn]),
            "span_start": np.concatenate([rollout.span_starts for rollout in drawn]),
        }
        if any(mask.any() for mask in left_out):
            columns["left_out"] = np.concatenate(left_out).astype(np.uint8)
        return pack({"samples": [len(group) for group in self._drawn]}, columns)
