"""A micro-batch with every distinct prefix once: shared prompts, heads of chat templates, equal beginnings of completions, equal samples.

The rule: it only says where each token stands; what is trained, and everything per token, stays [B, L] as in `TokenBatch`.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch

from penstock.infra.backends.batch import TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """T tokens in one line, and how the B rows of W columns find theirs: linear layers see the line, attention sees rows."""

    ids: torch.Tensor
    """[T]"""
    positions: torch.Tensor
    """[T] column of each token in its row."""
    whole: torch.Tensor
    """[A, W] place of every column, for rows that bring at least as much as they share; behind a row's end its last token again."""
    own: torch.Tensor
    """[N, C] places of the tokens that the other rows bring."""
    columns: torch.Tensor
    """[N, C] the columns of those."""
    keys: torch.Tensor
    """[N, W] place of every column of such a row."""
    allowed: torch.Tensor
    """[N, 1, C, W] which columns a row's own token sees."""
    outputs: torch.Tensor
    """[T] where a token's output lies in the outputs of `whole`, then `own`, flattened."""
    predict: torch.Tensor
    """[U] place of each token that predicts: K first tokens of completions are predicted by one, the prompt's last."""
    temperatures: torch.Tensor
    """[U] float32"""
    row: torch.Tensor
    """[M] which of the U predicts each trained token, ascending."""
    target: torch.Tensor
    """[M] its id."""
    slot: torch.Tensor
    """[M] its place in [B, L-1], flattened."""

    def to(self, device: torch.device) -> "PrefixTree":
        """The same on `device`."""
        return PrefixTree(**{field.name: getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)})


def prefix_tree(batch: TokenBatch) -> PrefixTree:
    """The tree of a micro-batch; where rows have nothing in common, they stand behind one another without padding.

    A row goes on from whichever earlier row it agrees with longest. What stands behind a row's last prediction is no input.
    """
    trained = batch.completion_mask
    lengths = np.where(trained.any(1), trained.shape[1] - trained[:, ::-1].argmax(1), 1)
    count, width = len(lengths), int(lengths.max())
    ids, column = batch.input_ids[:, :width], np.arange(width)
    places, begin = _places(ids, lengths)
    brings = lengths - begin
    total = int(brings.sum())
    owner = np.repeat(np.arange(count), brings)
    at = np.arange(total) - np.repeat(np.cumsum(brings) - brings - begin, brings)
    anew = np.flatnonzero((brings > 0) & (brings >= begin))  # attention over a whole causal row costs less than over its tail alone
    branches = np.flatnonzero((brings > 0) & (brings < begin))
    longest = int(brings[branches].max(initial=0))
    columns = np.minimum(begin[branches, None] + np.arange(longest), width - 1)
    first_output = np.zeros(count, np.int64)  # where the output of a row's column 0 lies, or would lie
    first_output[anew] = np.arange(len(anew)) * width
    first_output[branches] = len(anew) * width + np.arange(len(branches)) * longest - begin[branches]
    arrays = {
        "ids": ids[owner, at],
        "positions": at,
        "whole": places[anew],
        "own": places[branches[:, None], columns],
        "columns": columns,
        "keys": places[branches],
        "allowed": (column <= columns[:, :, None])[:, None],
        "outputs": first_output[owner] + at,
        **_predictions(batch, places),
    }
    return PrefixTree(**{name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()})


def _places(ids: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([B, W] place of every column in the line, [B] columns that a row shares with an earlier one)."""
    count, width = ids.shape
    column, total = np.arange(width), 0
    places, begin = np.zeros((count, width), np.int64), np.zeros(count, np.int64)
    for row, size in enumerate(lengths):
        if row:
            same = (ids[:row, :size] == ids[row, :size]) & (column[:size] < lengths[:row, None])
            agree = np.where(same.all(1), size, same.argmin(1))
            nearest = int(agree.argmax())
            begin[row] = agree[nearest]
            places[row, : begin[row]] = places[nearest, : begin[row]]
        places[row, begin[row] : size] = total + np.arange(size - begin[row])
        places[row, size:] = places[row, size - 1]
        total += int(size - begin[row])
    return places, begin


def _predictions(batch: TokenBatch, places: np.ndarray) -> dict[str, np.ndarray]:
    """What predicts each trained token; one token is predicted, to no effect, where a batch trains none, so that it has a loss."""
    trained = batch.completion_mask
    row, column = np.nonzero(trained) if trained.any() else (np.zeros(1, np.int64), np.zeros(1, np.int64))
    temperatures, degree = np.unique(batch.temperatures, return_inverse=True)
    pairs, predicted_by = np.unique(places[row, column] * len(temperatures) + degree[row], return_inverse=True)
    order = np.argsort(predicted_by, kind="stable")
    row, column = row[order], column[order]
    return {
        "predict": pairs // len(temperatures),
        "temperatures": temperatures[pairs % len(temperatures)],
        "row": predicted_by[order],
        "target": batch.input_ids[row, column + 1],
        "slot": row * trained.shape[1] + column,
    }
