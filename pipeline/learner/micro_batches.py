"""Turns a step's scored groups into sequences with advantages, and those into padded micro-batches.

Pure functions of recorded groups in plan order and of a run's settings, shared by trainer, replay and `explain`. Boundaries between
micro-batches depend only on a step's sequences in order, so a step is divided equally while its groups still arrive and when it is read
back from the log.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.infra.backends.base import Backend, TokenBatch
from penstock.pipeline.algorithms.advantages import ADVANTAGES, is_trained
from penstock.pipeline.algorithms.registry import AGGREGATES
from penstock.pipeline.config.plugins import load, split_options
from penstock.topics.groups import Group
from penstock.topics.ledger import Planned
from penstock.topics.rollouts import Rollout

if TYPE_CHECKING:
    from penstock.infra.backends.ranks.process_set import ProcessSet


@dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """One sequence to train, a sample or a segment of a trajectory: token ids, and logprob and mask of each completion token."""

    group: int
    sample: int
    prompt_ids: npt.NDArray[np.int32]
    """[P], at least one token, which predicts the first completion token."""
    completion_ids: npt.NDArray[np.int32]
    """[T] token ids of the completion."""
    behaviour_logprobs: npt.NDArray[np.float32]
    """[T]; NaN for tokens that the policy did not generate."""
    loss_mask: npt.NDArray[np.bool_]
    """[T] True on tokens that are trained."""
    advantage: float
    temperature: float = 1.0
    sample_tokens: int | None = None
    """Trained tokens of the full sample, if this is one of several sequences of a trajectory."""
    support: npt.NDArray[np.int32] | None = None
    """[T, k] ids that each token was sampled from, padded with -1; None: the full vocabulary."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for arrays of different lengths or values that cannot be trained on."""
        tokens = len(self.completion_ids)
        if not tokens == len(self.behaviour_logprobs) == len(self.loss_mask) or not len(self.prompt_ids):
            raise ValueError(
                f"group {self.group} sample {self.sample}: {len(self.prompt_ids)} prompt tokens, {tokens} completion tokens, "
                f"{len(self.behaviour_logprobs)} logprobs, {len(self.loss_mask)} mask entries are inconsistent"
            )
        if not self.temperature > 0:
            raise ValueError(f"group {self.group} sample {self.sample}: temperature {self.temperature} must be above 0")
        if not np.isfinite(self.behaviour_logprobs[self.loss_mask]).all():
            raise ValueError(f"group {self.group} sample {self.sample}: a trained token has no finite logprob")

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @cached_property
    def computed_ids(self) -> npt.NDArray[np.int32]:
        """Token ids up to the one that predicts the last trained token: all that a model without padding must compute."""
        trained = np.flatnonzero(self.loss_mask)
        return np.concatenate([self.prompt_ids, self.completion_ids[: trained[-1]]]) if len(trained) else self.prompt_ids[:1]


def untrainable(group: Group, *, vocabulary: int | None) -> str | None:
    """The reason why a group cannot be trained on although its record could be decoded; None if it can."""
    if not len(group.prompt_ids):
        return "the prompt is empty"
    rollouts = [sample.rollout for sample in group.samples]
    for rollout in rollouts:
        if not 0 < rollout.temperature < float("inf"):
            return f"the temperature of sample {rollout.sample} is {rollout.temperature}"
    if vocabulary is None:
        return None
    supports = [rollout.support for rollout in rollouts if rollout.support is not None]
    largest = max(int(ids.max(initial=0)) for ids in (group.prompt_ids, *supports, *(rollout.token_ids for rollout in rollouts)))
    return f"token id {largest} is outside the model's vocabulary of {vocabulary}" if largest >= vocabulary else None


def advantage_function(name: str, *, trust_code: bool) -> Callable[..., Any]:
    """The advantage function of that name; a user's function is `package:function` or `file.py:function`, with options after `?`.

    Raises `PluginError`, and `ValueError` for a user's function without `trust_code`: reading a log must not execute code that it names.
    """
    base_name, options = split_options(name)
    if base_name not in ADVANTAGES and not trust_code:
        raise ValueError(f"{name} is code that came with the run: pass --trust-code to load it")
    function = ADVANTAGES[base_name] if base_name in ADVANTAGES else load(base_name)
    return partial(function, **options) if options else function


def combined_advantages(function: Callable[..., Any], *, combine: str) -> Callable[[Group], Any]:
    """A function from a group to one advantage per sample: `function` of the rewards or, under `combine` = "advantages", the weighted
    sum of `function` of each reward component (GDPO, arXiv 2601.05242, without its last normalisation over the batch).

    A component that does not apply to a sample (None) adds nothing to it and is excluded from the mean of the others. A sample without
    a reward is not passed to the function; its advantage is 0.
    """

    def from_rewards(group: Group) -> Any:
        """Advantages of the scored samples; 0 keeps an unscored sample out of the gradient."""
        scored = np.asarray(function(np.array(group.rewards, np.float64)))
        if len(group.rewards) == len(group.samples):
            return scored
        advantages = np.zeros(len(group.samples), scored.dtype)
        advantages[[sample.reward is not None for sample in group.samples]] = scored
        return advantages

    def from_components(group: Group) -> Any:
        """Weighted sum of the advantages of each reward component."""
        advantages = np.zeros(len(group.samples), np.float64)
        values = np.array([sample.components for sample in group.samples], np.float64)  # None becomes NaN
        for weight, column in zip(group.reward_weights, values.T, strict=True):
            applies = ~np.isnan(column)
            if applies.any():
                advantages[applies] += weight * np.asarray(function(column[applies]), np.float64)
        return advantages.astype(np.float32)

    return from_components if combine == "advantages" else from_rewards


def sequences(group: Group, *, advantages: Callable[[Group], Any], truncated: str) -> list[TokenSequence]:
    """The trained sequences of a group in sample order, without samples that have no reward or are aborted, empty or masked.

    A trajectory has a sequence for each segment, all with the trajectory's advantage. `truncated` is `algorithm.truncated`: under "mask"
    a truncated sample is not trained, but its reward counts in the group's mean.
    """
    return [
        sequence
        for sample, advantage in zip(group.samples, advantages(group), strict=True)
        if sample.reward is not None and is_trained(sample.rollout, truncated=truncated)
        for sequence in _parts(sample.rollout, group.prompt_ids, float(advantage))
    ]


def _parts(rollout: Rollout, prompt_ids: npt.NDArray[np.int32], advantage: float) -> Iterator[TokenSequence]:
    """The sequences of one sample that contain a trained token: one, or one for each segment of a trajectory."""
    segments = rollout.segments or ((0, len(rollout.token_ids), 0),)
    if rollout.support is None and (rollout.top_k or rollout.top_p < 1.0):
        raise ValueError(
            f"group {rollout.group} sample {rollout.sample}: sampled with top_p {rollout.top_p:g} and top_k {rollout.top_k}, but the token "
            "ids that each token was sampled from were not recorded, so logprobs cannot be recomputed"
        )
    support = None if rollout.support is None else rollout.support.reshape(len(rollout.token_ids), -1)
    sample_tokens = int(rollout.loss_mask.sum()) if len(segments) > 1 else None
    for start, end, prompt in segments:
        first = start + prompt
        if rollout.loss_mask[first:end].any():
            yield TokenSequence(
                group=rollout.group,
                sample=rollout.sample,
                prompt_ids=rollout.token_ids[start:first] if prompt else prompt_ids,
                completion_ids=rollout.token_ids[first:end],
                behaviour_logprobs=rollout.behaviour_logprobs[first:end],
                loss_mask=rollout.loss_mask[first:end],
                advantage=advantage,
                temperature=rollout.temperature,
                sample_tokens=sample_tokens,
                support=None if support is None else support[first:end],
            )


MicroBatch = tuple[TokenSequence, ...]


Size = Callable[[Sequence[TokenSequence], int, TokenSequence], int]
"""(sequences of a micro-batch, their size in tokens, the next sequence) -> size with it."""


def padded_tokens(batch: Sequence[TokenSequence], _size: int, sequence: TokenSequence) -> int:
    """Size of a micro-batch with another sequence as padded rows: number of rows times longest row."""
    return (len(batch) + 1) * max(row.length for row in (*batch, sequence))


def distinct_tokens(batch: Sequence[TokenSequence], size: int, sequence: TokenSequence) -> int:
    """Size of a micro-batch with another sequence, common prefixes counted once; slightly too large if only other groups share them."""
    earlier = [row for row in batch if row.group == sequence.group] or batch[-1:]
    ids = sequence.computed_ids
    return size + len(ids) - max((_common(ids, row.computed_ids) for row in earlier), default=0)


def _common(first: npt.NDArray[np.int32], second: npt.NDArray[np.int32]) -> int:
    """Length of the common prefix of two sequences of token ids."""
    length = min(len(first), len(second))
    differ = first[:length] != second[:length]
    return int(differ.argmax()) if differ.any() else length


class MicroBatcher:
    """Splits a step's sequences into micro-batches of at most `token_budget` tokens and `most_groups` groups.

    Micro-batches end in rounds of `ranks`, and the last round is divided evenly, so that ranks which train one each of a round have equal
    work. A sequence longer than the budget is a micro-batch of its own. With `ends`, the recorded `boundaries` of a step, only they decide.
    """

    def __init__(
        self,
        token_budget: int,
        *,
        size: Size = padded_tokens,
        ranks: int = 1,
        most_groups: int | None = None,
        ends: Collection[int] | None = None,
    ) -> None:
        """Raise `ValueError` for a token budget below 1."""
        if token_budget < 1:
            raise ValueError(f"a micro-batch needs a token budget above 0, not {token_budget}")
        self.token_budget, self.size, self.ranks, self.most_groups, self.ends = token_budget, size, ranks, most_groups, ends
        self._open: list[TokenSequence] = []
        self._round: list[MicroBatch] = []
        self._size = 0
        self._added = 0

    def add(self, sequence: TokenSequence) -> list[MicroBatch]:
        """Add the next sequence; returns the micro-batches of the round that ends before it, usually none."""
        size, complete = self.size(self._open, self._size, sequence), list[MicroBatch]()
        if self._open and self._ends_before(sequence, size):
            self._round.append(tuple(self._open))
            self._open, size = [], self.size((), 0, sequence)
            if self.ends is not None or len(self._round) == self.ranks:
                complete, self._round = self._round, []
        self._open.append(sequence)
        self._size = size
        self._added += 1
        return complete

    def close(self) -> list[MicroBatch]:
        """Return the last micro-batches of a step."""
        last = [*self._round, *([tuple(self._open)] if self._open else [])]
        self._open, self._round, self._size = [], [], 0
        return last if self.ends is not None or self.ranks == 1 else self._even([row for batch in last for row in batch])

    def _ends_before(self, sequence: TokenSequence, size: int) -> bool:
        """True if the open micro-batch must end before this sequence, with which it would have `size` tokens."""
        if self.ends is not None:
            return self._added in self.ends
        if self.most_groups is not None and len({row.group for row in (*self._open, sequence)}) > self.most_groups:
            return True
        return size > self.token_budget

    def _even(self, rows: Sequence[TokenSequence]) -> list[MicroBatch]:
        """Divide the last sequences of a step into one micro-batch per rank, or fewer of one each; the largest is as small as possible."""
        low, high = 1, self.token_budget
        while high - low > self.token_budget // 64:
            middle = (low + high) // 2
            low, high = (low, middle) if len(_filled(rows, middle, self.size)) <= self.ranks else (middle + 1, high)
        parts = _filled(rows, high, self.size)
        while len(parts) < min(self.ranks, len(rows)):
            most = max(range(len(parts)), key=lambda number: len(parts[number]))
            half = len(parts[most]) // 2
            parts[most : most + 1] = [parts[most][:half], parts[most][half:]]
        return parts


def _filled(rows: Sequence[TokenSequence], token_budget: int, size: Size) -> list[MicroBatch]:
    """Divide rows into micro-batches of at most `token_budget` tokens each."""
    batcher = MicroBatcher(token_budget, size=size)
    return [batch for row in rows for batch in batcher.add(row)] + batcher.close()


def boundaries(batches: Iterable[Sequence[TokenSequence]]) -> tuple[int, ...]:
    """Number of the step's sequences up to the end of each micro-batch, as the ledger records it."""
    return tuple(int(end) for end in np.cumsum([len(batch) for batch in batches], dtype=np.int64))


def pack(sequences: Sequence[TokenSequence]) -> TokenBatch:
    """Pad the sequences of one micro-batch on the right, one row per sequence."""
    if not sequences:
        raise ValueError("a micro-batch needs at least one sequence")
    rows, width = len(sequences), max(2, *(sequence.length for sequence in sequences))
    input_ids = np.zeros((rows, width), np.int64)
    attention = np.zeros((rows, width), np.bool_)
    trained = np.zeros((rows, width - 1), np.bool_)
    behaviour = np.zeros((rows, width - 1), np.float32)
    for row, sequence in enumerate(sequences):
        start, end = len(sequence.prompt_ids), sequence.length
        input_ids[row, :start] = sequence.prompt_ids
        input_ids[row, start:end] = sequence.completion_ids
        attention[row, :end] = True
        trained[row, start - 1 : end - 1] = sequence.loss_mask
        behaviour[row, start - 1 : end - 1] = np.where(sequence.loss_mask, sequence.behaviour_logprobs, 0.0)
    return TokenBatch(
        input_ids=input_ids,
        attention_mask=attention,
        completion_mask=trained,
        behaviour_logprobs=behaviour,
        advantages=np.array([sequence.advantage for sequence in sequences], np.float32),
        temperatures=np.array([sequence.temperature for sequence in sequences], np.float32),
        groups=np.array([sequence.group for sequence in sequences], np.int64),
        samples=np.array([sequence.sample for sequence in sequences], np.int64),
        sample_tokens=_sample_tokens(sequences),
        support=_support(sequences, width),
    )


def _support(sequences: Sequence[TokenSequence], width: int) -> npt.NDArray[np.int32] | None:
    """[B, width-1, k] padded with -1; None if all tokens were sampled from the full vocabulary."""
    sizes = [sequence.support.shape[1] for sequence in sequences if sequence.support is not None]
    if not sizes:
        return None
    assert len(sizes) == len(sequences), "a micro-batch has samples with and without a recorded support"
    padded = np.full((len(sequences), width - 1, max(sizes)), -1, np.int32)
    for row, sequence in enumerate(sequences):
        assert sequence.support is not None
        padded[row, len(sequence.prompt_ids) - 1 : sequence.length - 1, : sequence.support.shape[1]] = sequence.support
    return padded


def _sample_tokens(sequences: Sequence[TokenSequence]) -> npt.NDArray[np.int64] | None:
    """[B] trained tokens of the sample that each row is part of; None if every row is a full sample."""
    if all(sequence.sample_tokens is None for sequence in sequences):
        return None
    return np.array([sequence.sample_tokens or int(sequence.loss_mask.sum()) for sequence in sequences], np.int64)


def denominator(masks: Iterable[np.ndarray[Any, Any]], plan: Iterable[Group], *, aggregate: str, counts_untrained: bool) -> float:
    """Divisor of a step's loss sum, from masks [B, L] of trained tokens and the groups of the plan.

    Under `token_mean` it counts trained tokens, under `sequence_mean` and `constant` samples: with `counts_untrained` all K of each group,
    so that masked samples do not raise the weight of the others, else those with a trained token.
    """
    if aggregate == "token_mean":
        return float(sum(int(mask.sum()) for mask in masks))
    if aggregate in AGGREGATES:
        trained = sum(int(mask.any(axis=1).sum()) for mask in masks)
        return float(sum(group.samples_per_prompt for group in plan) if counts_untrained else trained)
    raise ValueError(f"unknown loss aggregation {aggregate!r}: choose one of {', '.join(AGGREGATES)}")


def token_share(tokens: int, *, aggregate: str, max_tokens: int) -> float:
    """Weight of one trained token of a sequence with `tokens` of them in the step's loss sum: 1, 1/tokens or 1/max_tokens."""
    if aggregate == "token_mean":
        return 1.0
    return 1.0 / (max_tokens if aggregate == "constant" else max(tokens, 1))


def lowered_rewards(
    group: Group, *, coef: float, reference: Callable[[TokenBatch], npt.NDArray[np.float32]], token_budget: int
) -> tuple[Group, dict[str, float]]:
    """Subtract `coef` times k1 from each sample's reward; returns the group and the sum of all k1 as `kl_reference_k1_sum`.

    k1 is the sum of log behaviour - log reference over a sample's trained tokens: an unbiased estimate of KL(behaviour || reference)
    (Schulman 2020; the reward of RLHF, arXiv 2203.02155). `reference` returns the [B, L-1] logprobs of a micro-batch of at most
    `token_budget` padded tokens.
    """
    k1: dict[int, float] = {}
    batcher = MicroBatcher(token_budget)
    rows = sequences(group, advantages=lambda group: np.zeros(len(group.samples), np.float32), truncated="train")
    batches = [full for row in rows for full in batcher.add(row)]
    for batch in map(pack, [*batches, *batcher.close()]):
        sums = np.where(batch.completion_mask, batch.behaviour_logprobs - reference(batch), 0.0).sum(1, dtype=np.float64)
        for number, value in zip(batch.samples.tolist(), sums.tolist(), strict=True):
            k1[number] = k1.get(number, 0.0) + value
    samples = tuple(
        sample if sample.reward is None else replace(sample, reward=sample.reward - coef * k1.get(sample.rollout.sample, 0.0))
        for sample in group.samples
    )
    return replace(group, samples=samples), {"kl_reference_k1_sum": sum(k1.values())}


Stats = dict[str, float]


@dataclass(slots=True)
class Ranks:
    """The ranks of a trainer during one step, as rank 0 sees them."""

    processes: "ProcessSet"
    planned: dict[int, Planned] = field(default_factory=dict)
    """Group -> its partition, offset and digest."""
    _assigned: Counter[int] = field(default_factory=Counter)
    """Group -> number of its sequences that are in micro-batches; a trajectory may be several sequences of one sample."""

    def rank_of(self, number: int) -> int:
        """Rank that trains micro-batch `number` of a step. Rank 0 trains the last of each round, so that no other rank waits for it."""
        return (number + 1) % self.processes.size

    def delegates(self, number: int, sequences: Sequence[TokenSequence]) -> bool:
        """Send micro-batch `number` of a step to the rank that trains it; False if that is this process, rank 0."""
        rank, rows = self.rank_of(number), []
        for sequence in sequences:
            rows.append([sequence.group, self._assigned[sequence.group]])
            self._assigned[sequence.group] += 1
        if rank:
            plan = [self.planned[group] for group in dict.fromkeys(sequence.group for sequence in sequences)]
            fields = [[member.group, member.sha256, member.partition, member.offset] for member in plan]
            self.processes.send(rank, do="train", plan=fields, rows=rows)
        return bool(rank)

    def finish(self, backend: Backend, own: Sequence[Stats], *, batches: int) -> list[Stats]:
        """Give ranks with fewer micro-batches an empty one; returns the statistics of all micro-batches in plan order."""
        for number in range(batches, batches + -batches % self.processes.size):
            if rank := self.rank_of(number):
                self.processes.send(rank, do="nothing")
            else:
                train_empty_batch(backend)
        self.processes.broadcast(do="report")
        by_rank = [iter(stats) for stats in (own, *self.processes.replies())]
        return [next(by_rank[self.rank_of(number)]) for number in range(batches)]


def train_empty_batch(backend: Backend) -> None:
    """Run a micro-batch of one untrained token backward with weight zero: the collectives of a backward pass need every rank."""
    empty = TokenSequence(
        group=0, sample=0, prompt_ids=np.zeros(1, np.int32), completion_ids=np.zeros(1, np.int32),
        behaviour_logprobs=np.zeros(1, np.float32), loss_mask=np.zeros(1, np.bool_), advantage=0.0,
    )  # fmt: skip
    backend.backward(pack([empty]), lambda logprobs, *_: (0.0 * logprobs.sum(), {}))
