"""From a step's scored groups to padded micro-batches: what of a group is trained, with which advantage, and beside which samples.

The rule: pure functions of recorded groups in plan order and of a run's settings, the same ones for the trainer, for replay and for
`explain`. A boundary depends on the sequences before it and the next one, never on what comes later or when, so a step cut while its
groups still arrive is cut like the same step read back from the log.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.infra.backends.batch import TokenBatch
from penstock.pipeline.algorithms.advantages import ADVANTAGES
from penstock.pipeline.algorithms.registry import AGGREGATES
from penstock.pipeline.config.plugins import load, split_options
from penstock.pipeline.envs.group_outcome import is_trained
from penstock.topics.groups import Group
from penstock.topics.samples import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """One sample as the trainer sees it: prompt and completion ids, and what belongs to each completion token."""

    group: int
    sample: int
    prompt_ids: npt.NDArray[np.int32]
    """[P], at least one token: the first completion token needs something before it."""
    completion_ids: npt.NDArray[np.int32]
    """[T]"""
    behaviour_logprobs: npt.NDArray[np.float32]
    """[T]; NaN where the model did not draw the token."""
    loss_mask: npt.NDArray[np.bool_]
    """[T] True on tokens that are trained."""
    advantage: float
    temperature: float = 1.0
    sample_tokens: int | None = None
    """Trained tokens of the whole sample, where this is one of several sequences of a trajectory."""
    support: npt.NDArray[np.int32] | None = None
    """[T, k] ids that each token was drawn from, -1 behind the last; None: the whole vocabulary."""

    def __post_init__(self) -> None:
        """Refuse arrays that do not belong together."""
        tokens = len(self.completion_ids)
        if not tokens == len(self.behaviour_logprobs) == len(self.loss_mask) or not len(self.prompt_ids):
            raise ValueError(
                f"group {self.group} sample {self.sample}: {len(self.prompt_ids)} prompt tokens, {tokens} completion tokens, "
                f"{len(self.behaviour_logprobs)} logprobs, {len(self.loss_mask)} mask entries do not fit together"
            )
        if not self.temperature > 0:
            raise ValueError(f"group {self.group} sample {self.sample}: temperature {self.temperature} cannot be trained")
        if not np.isfinite(self.behaviour_logprobs[self.loss_mask]).all():
            raise ValueError(f"group {self.group} sample {self.sample}: a trained token has no finite logprob")

    @property
    def length(self) -> int:
        """Tokens of prompt and completion together."""
        return len(self.prompt_ids) + len(self.completion_ids)


def untrainable(group: Group, *, vocabulary: int | None) -> str | None:
    """Why a group would end the trainer that trains it, although its record is sound; None for any other."""
    if not len(group.prompt_ids):
        return "its prompt has no token"
    rollouts = [sample.rollout for sample in group.samples]
    for rollout in rollouts:
        if not 0 < rollout.temperature < float("inf"):
            return f"the temperature of sample {rollout.sample} is {rollout.temperature}"
    if vocabulary is None:
        return None
    supports = [rollout.support for rollout in rollouts if rollout.support is not None]
    largest = max(int(ids.max(initial=0)) for ids in (group.prompt_ids, *supports, *(rollout.token_ids for rollout in rollouts)))
    return f"token id {largest} is beyond the model's {vocabulary} tokens" if largest >= vocabulary else None


def advantage_function(name: str, *, trust_code: bool) -> Callable[..., Any]:
    """The advantage of that name, or a user's own by `package:function` or `file.py:function`, with options after a question mark.

    Raises `PluginError`, and `ValueError` for a user's own without `trust_code`: whoever only looks at a log runs nothing it names.
    """
    plain, options = split_options(name)
    if plain not in ADVANTAGES and not trust_code:
        raise ValueError(f"{name} is the run's own function: --trust-code loads it")
    function = ADVANTAGES[plain] if plain in ADVANTAGES else load(plain)
    return partial(function, **options) if options else function


def combined_advantages(function: Callable[..., Any], *, combine: str) -> Callable[[Group], Any]:
    """From a group to one advantage a sample: the `function` of its rewards or, under `combine` = "advantages", for several rewards the
    weighted sum of the `function` of each component (GDPO, arXiv 2601.05242, without its last normalisation over the batch).

    A component that does not apply to a sample (None) adds nothing to it, and is not in the mean of the others. A sample without a reward
    is not passed to the function; its advantage is 0.
    """

    def of_rewards(group: Group) -> Any:
        given = np.asarray(function(np.array(group.rewards, np.float64)))
        if len(group.rewards) == len(group.samples):
            return given
        total = np.zeros(len(group.samples), given.dtype)
        total[[sample.reward is not None for sample in group.samples]] = given
        return total

    def of_components(group: Group) -> Any:
        total = np.zeros(len(group.samples), np.float64)
        values = np.array([sample.components for sample in group.samples], np.float64)  # None becomes NaN
        for weight, column in zip(group.reward_weights, values.T, strict=True):
            applies = ~np.isnan(column)
            if applies.any():
                total[applies] += weight * np.asarray(function(column[applies]), np.float64)
        return total.astype(np.float32)

    return of_components if combine == "advantages" else of_rewards


def sequences(group: Group, *, advantages: Callable[[Group], Any], truncated: str) -> list[TokenSequence]:
    """The samples of a group that are trained, in order of their numbers; those without a reward, aborted, empty and masked ones are not.

    A trajectory is a sequence for each of its segments, all with the trajectory's advantage. `truncated` is `algorithm.truncated`: under
    "mask" a sample that ran out of tokens is left out, its reward stays in the group's mean.
    """
    return [
        sequence
        for sample, advantage in zip(group.samples, advantages(group), strict=True)
        if sample.reward is not None and is_trained(sample.rollout, truncated=truncated)
        for sequence in _parts(sample.rollout, group.prompt_ids, float(advantage))
    ]


def _parts(rollout: Rollout, prompt_ids: npt.NDArray[np.int32], advantage: float) -> Iterator[TokenSequence]:
    """The sequences of one sample that have a trained token: a single one, or one for each segment of a trajectory."""
    segments = rollout.segments or ((0, len(rollout.token_ids), 0),)
    if rollout.support is None and (rollout.top_k or rollout.top_p < 1.0):
        raise ValueError(
            f"group {rollout.group} sample {rollout.sample}: top_p {rollout.top_p:g} and top_k {rollout.top_k} left tokens that are not "
            "recorded: its logprobs cannot be computed again"
        )
    support = None if rollout.support is None else rollout.support.reshape(len(rollout.token_ids), -1)
    whole = int(rollout.loss_mask.sum()) if len(segments) > 1 else None
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
                sample_tokens=whole,
                support=None if support is None else support[first:end],
            )


MicroBatch = tuple[TokenSequence, ...]


class MicroBatcher:
    """Fills one micro-batch after the other: rows times longest row stays within `token_budget`; a longer sequence goes alone."""

    def __init__(self, token_budget: int, *, most_groups: int | None = None) -> None:
        """`token_budget` counts padded tokens; `most_groups` is the most groups of which a micro-batch has samples."""
        if token_budget < 1:
            raise ValueError(f"a micro-batch needs a token budget above 0, not {token_budget}")
        self.token_budget, self.most_groups = token_budget, most_groups
        self._open: list[TokenSequence] = []
        self._longest = 0

    def add(self, sequence: TokenSequence) -> MicroBatch | None:
        """Take the next sequence; hands out the micro-batch that it did not fit into."""
        closed = None
        longest = max(self._longest, sequence.length)
        groups = {one.group for one in self._open} | {sequence.group}
        too_many = self.most_groups is not None and len(groups) > self.most_groups
        if self._open and (too_many or (len(self._open) + 1) * longest > self.token_budget):
            closed, longest = self.close(), sequence.length
        self._open.append(sequence)
        self._longest = longest
        return closed

    def close(self) -> MicroBatch | None:
        """Hand out what is left, when the step is whole."""
        closed = tuple(self._open) or None
        self._open, self._longest = [], 0
        return closed


def boundaries(batches: Iterable[Sequence[TokenSequence]]) -> tuple[int, ...]:
    """How many sequences of the step lie before the end of each micro-batch: what the ledger records.

    Example:
        boundaries([(a, b, c), (d,)])  # -> (3, 4)
    """
    return tuple(int(end) for end in np.cumsum([len(batch) for batch in batches], dtype=np.int64))


def pack(sequences: Sequence[TokenSequence]) -> TokenBatch:
    """Right-padded arrays of one micro-batch, rows in the order given."""
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
    """[B, width-1, k] with the most ids that any token has; None where all were drawn from the whole vocabulary."""
    given = [sequence.support.shape[1] for sequence in sequences if sequence.support is not None]
    if not given:
        return None
    assert len(given) == len(sequences), "a micro-batch has samples with and without a recorded support"
    padded = np.full((len(sequences), width - 1, max(given)), -1, np.int32)
    for row, sequence in enumerate(sequences):
        assert sequence.support is not None
        padded[row, len(sequence.prompt_ids) - 1 : sequence.length - 1, : sequence.support.shape[1]] = sequence.support
    return padded


def _sample_tokens(sequences: Sequence[TokenSequence]) -> npt.NDArray[np.int64] | None:
    if all(sequence.sample_tokens is None for sequence in sequences):
        return None
    own = [int(sequence.loss_mask.sum()) for sequence in sequences]
    return np.array([sequence.sample_tokens or mine for sequence, mine in zip(sequences, own, strict=True)], np.int64)


def denominator(masks: Iterable[np.ndarray[Any, Any]], plan: Iterable[Group], *, aggregate: str, counts_untrained: bool) -> float:
    """What a step's loss sum is divided by, from the masks [B, L] of its trained tokens and the groups of its plan.

    Trained tokens under `token_mean`; samples under `sequence_mean` and `constant`: all K of each group, so that a step does not weigh
    more the more of it is masked, or without `counts_untrained` those with a trained token.
    """
    if aggregate == "token_mean":
        return float(sum(int(mask.sum()) for mask in masks))
    if aggregate in AGGREGATES:
        trained = sum(int(mask.any(axis=1).sum()) for mask in masks)
        return float(sum(group.samples_per_prompt for group in plan) if counts_untrained else trained)
    raise ValueError(f"unknown loss aggregation {aggregate!r}: choose one of {', '.join(AGGREGATES)}")


def token_share(tokens: int, *, aggregate: str, max_tokens: int) -> float:
    """What each of a sequence's `tokens` trained tokens counts in the step's sum, before its division: 1, 1/tokens or 1/max_tokens.

    Example:
        token_share(4, aggregate="sequence_mean", max_tokens=16)  # -> 0.25
    """
    if aggregate == "token_mean":
        return 1.0
    return 1.0 / (max_tokens if aggregate == "constant" else max(tokens, 1))


def lowered_rewards(
    group: Group, *, coef: float, reference: Callable[[TokenBatch], npt.NDArray[np.float32]], token_budget: int
) -> tuple[Group, dict[str, float]]:
    """The group with `coef` times each sample's k1 taken off its reward, and the sum of all k1 as `kl_reference_k1_sum`.

    k1 is the sum over a sample's trained tokens of log behaviour - log reference: what the sample says of KL(behaviour || reference),
    without bias as the behaviour policy drew it (Schulman 2020; the reward of RLHF, arXiv 2203.02155). `reference` gives [B, L-1]
    logprobs of a micro-batch of at most `token_budget` padded tokens.
    """
    found: dict[int, float] = {}
    batcher = MicroBatcher(token_budget)
    rows = sequences(group, advantages=lambda group: np.zeros(len(group.samples), np.float32), truncated="train")
    batches = [full for row in rows if (full := batcher.add(row))]
    for batch in map(pack, [*batches, *filter(None, [batcher.close()])]):
        apart = np.where(batch.completion_mask, batch.behaviour_logprobs - reference(batch), 0.0).sum(1, dtype=np.float64)
        for sample, value in zip(batch.samples.tolist(), apart.tolist(), strict=True):
            found[sample] = found.get(sample, 0.0) + value
    samples = tuple(
        one if one.reward is None else replace(one, reward=one.reward - coef * found.get(one.rollout.sample, 0.0)) for one in group.samples
    )
    return replace(group, samples=samples), {"kl_reference_k1_sum": sum(found.values())}
