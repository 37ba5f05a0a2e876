import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.algorithms.losses import batch_loss
from penstock.pipeline.learner.micro_batches import (
    MicroBatch,
    MicroBatcher,
    TokenSequence,
    boundaries,
    denominator,
    distinct_tokens,
    pack,
    padded_tokens,
    sequences,
)
from tests.support.strategies import a_group


def sequence(prompt=2, tokens=3, *, group=0, sample=0, mask=None, advantage=1.0, temperature=1.0):
    first = 10 * group + 100 * sample + 1
    return TokenSequence(
        group=group,
        sample=sample,
        prompt_ids=np.arange(first, first + prompt, dtype=np.int32),
        completion_ids=np.arange(first + prompt, first + prompt + tokens, dtype=np.int32),
        behaviour_logprobs=-np.arange(1, tokens + 1, dtype=np.float32),
        loss_mask=np.ones(tokens, bool) if mask is None else np.array(mask, bool),
        advantage=advantage,
        temperature=temperature,
    )


def micro_batches(sequences, *, token_budget, **limits) -> list[MicroBatch]:
    batcher = MicroBatcher(token_budget, **limits)
    return [batch for sequence in sequences for batch in batcher.add(sequence)] + batcher.close()


LENGTHS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 12)), max_size=30)
BUDGETS = st.integers(1, 60)


def made(lengths):
    return [sequence(prompt, tokens, sample=index) for index, (prompt, tokens) in enumerate(lengths)]


@given(LENGTHS, BUDGETS)
def test_micro_batches_keep_the_order_and_the_budget(lengths, budget):
    sequences = made(lengths)
    batches = micro_batches(sequences, token_budget=budget)
    assert [s for batch in batches for s in batch] == sequences
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(s.length for s in batch) <= budget
    assert boundaries(batches) == tuple(np.cumsum([len(batch) for batch in batches]))


@given(LENGTHS, BUDGETS)
def test_a_micro_batch_is_closed_only_by_a_sequence_that_does_not_fit(lengths, budget):
    batches = micro_batches(made(lengths), token_budget=budget)
    for batch, after in itertools.pairwise(batches):
        widened = [*batch, after[0]]
        assert len(widened) * max(s.length for s in widened) > budget


@given(LENGTHS, BUDGETS, st.integers(0, 30))
def test_boundaries_never_depend_on_what_comes_later(lengths, budget, cut):
    sequences = made(lengths)
    whole = micro_batches(sequences, token_budget=budget)
    batcher = MicroBatcher(budget)
    early = [closed for s in sequences[:cut] for closed in batcher.add(s)]
    assert early == whole[: len(early)]
    late = [closed for s in sequences[cut:] for closed in batcher.add(s)]
    assert early + late + batcher.close() == whole
    assert batcher.close() == []


@given(LENGTHS, BUDGETS, BUDGETS)
def test_recorded_boundaries_give_the_recorded_micro_batches_under_any_budget(lengths, budget, other):
    sequences = made(lengths)
    recorded = micro_batches(sequences, token_budget=budget)
    assert micro_batches(sequences, token_budget=other, most_groups=1, ends=boundaries(recorded)) == recorded


def test_a_sequence_longer_than_the_budget_goes_alone():
    batches = micro_batches([sequence(2, 1), sequence(2, 9), sequence(2, 1)], token_budget=6)
    assert boundaries(batches) == (1, 2, 3)


def test_completions_of_very_unequal_length_keep_the_budget_and_at_least_two_fifths_of_it_is_real() -> None:
    random = np.random.default_rng(0)
    lengths = [(prompt, min(4096, int(random.lognormal(5.5, 1.0)))) for prompt in random.integers(50, 300, 32) for _ in range(8)]
    batches = micro_batches(made(lengths), token_budget=16_384)
    padded = sum(len(batch) * max(one.length for one in batch) for batch in batches)
    assert max(len(batch) * max(one.length for one in batch) for batch in batches) <= 16_384
    assert 0.4 < sum(one.length for batch in batches for one in batch) / padded < 0.6


def computed(batch: MicroBatch) -> int:
    """Tokens of a micro-batch that pass through a model which computes common prefixes once."""
    from penstock.infra.backends.logprobs.prefix_tree import prefix_tree  # imports transformers

    return len(prefix_tree(pack(batch)).ids)


def of_prompts(*, groups, per_group, prompt, mean, longest=1024):
    """Sequences of groups with one random prompt each, below a common head of ten tokens; completions are log-normal."""
    random = np.random.default_rng(1)
    rows = []
    for group in range(groups):
        prompt_ids = np.concatenate([np.arange(10), random.integers(0, 9, prompt - 10)]).astype(np.int32)
        for sample in range(per_group):
            tokens = int(np.clip(random.lognormal(np.log(mean) - 0.18, 0.6), 2, longest))
            ids, logprobs = random.integers(0, 9, tokens).astype(np.int32), np.full(tokens, -1, np.float32)
            rows.append(TokenSequence(
                group=group, sample=sample, prompt_ids=prompt_ids, completion_ids=ids, behaviour_logprobs=logprobs,
                loss_mask=np.ones(tokens, bool), advantage=1.0,
            ))  # fmt: skip
    return rows


@pytest.mark.costly  # imports transformers
@pytest.mark.parametrize("seed", range(5))
def test_the_size_of_a_micro_batch_by_computed_tokens_is_that_of_its_prefix_tree(seed):
    random = np.random.default_rng(seed)
    rows = of_prompts(groups=6, per_group=int(random.integers(1, 6)), prompt=int(random.integers(11, 60)), mean=int(random.integers(5, 90)))
    budget = int(random.integers(100, 900))
    batches = micro_batches(rows, token_budget=budget, size=distinct_tokens)
    for batch, after in itertools.pairwise(batches):
        assert len(batch) == 1 or computed(batch) <= budget
        assert computed((*batch, after[0])) > 0.95 * budget


@pytest.mark.costly  # imports transformers
def test_a_usual_step_computes_hardly_a_token_twice_and_fills_its_micro_batches():
    rows = of_prompts(groups=32, per_group=8, prompt=250, mean=300)
    distinct = computed(rows)
    batches = micro_batches(rows, token_budget=16_384, size=distinct_tokens)
    sizes = [computed(batch) for batch in batches]
    assert sum(sizes) <= 1.05 * distinct
    assert max(sizes) <= 16_384
    assert min(sizes[:-1]) >= 0.9 * 16_384
    assert len(batches) < 0.5 * len(micro_batches(rows, token_budget=16_384))


def size_of(batch, size):
    return functools.reduce(lambda total, n: size(batch[:n], total, batch[n]), range(len(batch)), 0)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("size", [padded_tokens, distinct_tokens])
@pytest.mark.parametrize(("groups", "budget"), [(2, 16_384), (32, 16_384), (32, 4096)])
def test_every_rank_has_about_equal_work_in_each_round(ranks, size, groups, budget):
    rows = of_prompts(groups=groups, per_group=8, prompt=250, mean=300)
    batches = micro_batches(rows, token_budget=budget, size=size, ranks=ranks)
    assert [row for batch in batches for row in batch] == rows
    assert len(batches) % ranks == 0
    for number in range(0, len(batches), ranks):
        sizes = [size_of(batch, size) for batch in batches[number : number + ranks]]
        assert max(sizes) <= budget
        assert max(sizes) - min(sizes) <= max(2600, 0.4 * budget)
    assert micro_batches(rows, token_budget=budget, size=size, ranks=ranks, ends=boundaries(batches)) == batches


def test_a_step_of_fewer_sequences_than_ranks_has_one_for_each():
    rows = of_prompts(groups=1, per_group=3, prompt=250, mean=300)
    assert micro_batches(rows, token_budget=16_384, size=distinct_tokens, ranks=4) == [(row,) for row in rows]


def test_packed_arrays_are_aligned_to_next_token_positions():
    batch = pack([sequence(2, 3, mask=[1, 0, 1], advantage=0.5, temperature=0.7), sequence(1, 1, group=4, sample=1, advantage=-1)])
    np.testing.assert_array_equal(batch.input_ids, [[1, 2, 3, 4, 5], [141, 142, 0, 0, 0]])
    np.testing.assert_array_equal(batch.attention_mask, [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    np.testing.assert_array_equal(batch.completion_mask, [[0, 1, 0, 1], [1, 0, 0, 0]])
    np.testing.assert_array_equal(batch.behaviour_logprobs, np.float32([[0, -1, 0, -3], [-1, 0, 0, 0]]))
    np.testing.assert_array_equal(batch.advantages, np.float32([0.5, -1]))
    np.testing.assert_array_equal(batch.temperatures, np.float32([0.7, 1]))
    assert (batch.groups.tolist(), batch.samples.tolist(), batch.tokens) == ([0, 4], [0, 1], 3)
    assert batch.logit_columns().tolist() == [0, 1, 3]


def test_a_batch_that_trains_nothing_still_has_a_column_to_run():
    assert pack([sequence(1, 0)]).logit_columns().tolist() == [0]
    assert pack([sequence(2, 2, mask=[0, 0])]).tokens == 0


def test_a_logprob_the_model_did_not_draw_becomes_zero_and_a_trained_one_must_be_finite():
    good = {"group": 0, "sample": 0, "prompt_ids": np.int32([1]), "completion_ids": np.int32([2, 3]), "advantage": 1.0}
    logprobs = np.float32([np.nan, -1])
    batch = pack([TokenSequence(**good, behaviour_logprobs=logprobs, loss_mask=np.array([False, True]))])
    np.testing.assert_array_equal(batch.behaviour_logprobs, np.float32([[0, -1]]))
    with pytest.raises(ValueError, match="no finite logprob"):
        TokenSequence(**good, behaviour_logprobs=logprobs, loss_mask=np.array([True, True]))


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match="are inconsistent"):
        sequence(2, 3, mask=[1, 1])
    with pytest.raises(ValueError, match="0 prompt tokens"):
        sequence(0, 3)
    with pytest.raises(ValueError, match="temperature 0"):
        sequence(temperature=0.0)
    with pytest.raises(ValueError, match="token budget"):
        MicroBatcher(0)
    with pytest.raises(ValueError, match="at least one sequence"):
        pack([])


def test_a_trajectory_in_two_segments_counts_as_one_sample_under_every_aggregation() -> None:
    group = a_group(samples=2, tokens=6)
    first, second = group.samples
    mask = np.array([False, True, True, False, False, True])
    split = replace(first.rollout, loss_mask=mask, finish="stop", segments=((0, 3, 0), (3, 6, 2)), turns=())
    whole = replace(second.rollout, loss_mask=np.array([True] * 6), finish="stop")
    group = replace(group, samples=(replace(first, rollout=split), replace(second, rollout=whole)))
    rows = sequences(group, advantages=lambda _: [2.0, -1.0], truncated="train")
    assert [(one.sample, len(one.prompt_ids), len(one.completion_ids), one.sample_tokens) for one in rows] == [
        (split.sample, len(group.prompt_ids), 3, 3),
        (split.sample, 2, 1, 3),
        (whole.sample, len(group.prompt_ids), 6, None),
    ]
    assert rows[1].prompt_ids.tolist() == split.token_ids[3:5].tolist()
    batch = pack(rows)
    logprobs = torch.tensor(batch.behaviour_logprobs)
    for aggregate, expected in {
        "token_mean": -(3 * 2 - 6 * 1) / 9,
        "sequence_mean": -(2 - 1) / 2,
        "constant": -(3 * 2 - 6) / 8 / 2,
    }.items():
        loss, _ = batch_loss(logprobs, batch, aggregate=aggregate, max_tokens=8)
        divisor = denominator([batch.completion_mask], [group], aggregate=aggregate, counts_untrained=True)
        assert float(loss) / divisor == pytest.approx(expected)
