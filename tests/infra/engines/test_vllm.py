"""What only an engine that swaps weights in flight can show: labels that are true, token by token, and nothing left half done."""

import math
import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.infra.engines.base import Completion
from penstock.infra.engines.vllm.rows import logprobs_and_support, sample_seed
from penstock.infra.errors import EngineError
from tests.support.vllm_helpers import (
    LIMIT,
    ROWS,
    draw_with_swaps,
    largest_error,
    open_engine,
    request,
    save_model,
    tensors_of,
    version_values,
)

pytestmark = [pytest.mark.costly, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]


TEXTS = [f"{chr(97 + token // 10)}{chr(97 + token % 10)}" for token in range(90)]
"""Of the tokens: two letters each, so that a text of two is one token, or the end of one and the beginning of the next."""


def save_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(WordLevel({text: token for token, text in enumerate(TEXTS)}, unk_token=TEXTS[0]))
    made.decoder = Fuse()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(directory)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="module")
def engine(tied: Path) -> Iterator[Any]:
    import torch

    before = random.getstate(), torch.get_rng_state().tolist(), os.environ.get("TMPDIR"), 1
    save_tokenizer(tied)
    made = open_engine(tied, top_k=8, stops_at_text=True)
    assert before == (random.getstate(), torch.get_rng_state().tolist(), os.environ.get("TMPDIR"), 1)
    yield made
    made.close()


def test_each_token_has_the_logprob_of_the_version_it_is_labelled_with(engine: Any, tied: Path) -> None:
    values = version_values(tied)
    asked = [request(group, temperature=(1.0, 0.7)[group % 2]) for group in range(8)]
    found, swaps = draw_with_swaps(engine, asked, values, every=17)
    assert len(found) == 8 * ROWS
    assert swaps >= 4
    assert max(len(completion.spans) for completion in found) >= 3
    worst = largest_error(tied, {one.group: one for one in asked}, found, values)
    print(f"{sum(len(one.token_ids) for one in found)} tokens, {swaps} swaps: largest difference {worst:.1e}")
    assert worst < LIMIT


def test_tokens_of_a_limited_distribution_have_their_support_and_logprobs_over_it(engine: Any, tied: Path) -> None:
    values = version_values(tied)
    asked = [request(group, temperature=0.8, top_k=8, top_p=(1.0, 0.7)[group % 2]) for group in range(20, 26)]
    found, swaps = draw_with_swaps(engine, asked, values, every=17)
    assert swaps >= 2
    assert largest_error(tied, {one.group: one for one in asked}, found, values) < LIMIT
    for one in found:
        assert one.support is not None
        assert ((one.support >= 0).sum(1) >= 1).all() and (one.support[:, 0] == one.token_ids).all()
    assert {one.support.shape[1] <= 8 for one in found if one.support is not None} == {True}  # no logits tie in float32


def test_a_completion_ends_with_the_token_that_makes_a_stop_text_whole_also_under_new_weights(engine: Any, tied: Path) -> None:
    values, stop = version_values(tied), "cd"
    asked = [request(group, stop=("no such text", stop)) for group in range(30, 36)]
    found, swaps = draw_with_swaps(engine, asked, values, every=17)
    assert swaps >= 2
    assert largest_error(tied, {one.group: one for one in asked}, found, values) < LIMIT
    texts = ["".join(TEXTS[token] for token in one.token_ids) for one in found]
    for text, one in zip(texts, found, strict=True):
        assert stop not in text[: -len(TEXTS[0])]
        assert one.finish == ("stop" if stop in text or one.token_ids[-1] == 2 else "length")
    across = [text for text in texts if stop in text and text[-2:] != stop]
    assert across and len([text for text in texts if text[-2:] == stop]) > 0  # in the midst of two tokens, and in one
    free = draw_with_swaps(engine, [request(group) for group in range(30, 36)], values, every=17)[0]
    assert sum(len(one.token_ids) for one in found) < sum(len(one.token_ids) for one in free)


def test_ties_beyond_what_is_reported_leave_a_token_without_support() -> None:
    half, fifth = math.log(0.5), math.log(0.2)
    reported = SimpleNamespace(token_ids=[3, 3, 5, 6, 4, 4, 7, 8], logprobs=[half, half, half, -math.inf, fifth, fifth, fifth, fifth])
    logprobs, support = logprobs_and_support(reported, 2, limited=True)
    assert support is not None
    assert np.exp(logprobs).tolist() == pytest.approx([0.5, 0.2])
    assert support.tolist() == [[3, 5], [-1, -1]]


def test_an_aborted_group_gives_what_is_drawn_of_it_under_true_labels(engine: Any, tied: Path) -> None:
    values = version_values(tied)
    asked = {group: request(group, tokens=100) for group in (4, 6)}
    for one in asked.values():
        engine.submit(one)
    ended = [completion for _ in range(9) for completion in engine.step()]
    first = engine.version
    engine.load_weights(first + 1, tensors_of(values(first + 1)))
    ended += [completion for _ in range(6) for completion in engine.step()]
    [hand] = [one for one in engine.groups_in_flight() if one.group == 4]
    assert hand.oldest_version == first
    aborted = engine.abort(4)
    assert {one.finish for one in aborted} == {"abort"}
    assert hand.tokens == sum(len(one.token_ids) for one in [*aborted, *ended] if one.group == 4)
    assert [tuple(one.spans) for one in aborted] == [((first, 0), (first + 1, 9))] * len(aborted)
    assert largest_error(tied, asked, aborted, values) < LIMIT
    assert [one.group for one in engine.groups_in_flight()] == [6]
    assert len(engine.abort(6)) == ROWS - sum(one.group == 6 for one in ended)
    assert engine.idle


def test_kept_keys_and_values_serve_the_samples_in_work_and_no_new_ones(engine: Any, tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_keep", True)
    values = version_values(tied)
    old = request(20, prompt=70, tokens=40)
    new = replace(request(21, prompt=70, tokens=10), prompt_ids=old.prompt_ids)
    engine.submit(old)
    for _ in range(5):
        engine.step()
    engine.load_weights(engine.version + 1, tensors_of(values(engine.version + 1)))
    engine.submit(new)
    found: list[Completion] = []
    while not engine.idle:
        found += engine.step()
    of = {group: [one for one in found if one.group == group] for group in (20, 21)}
    assert largest_error(tied, {21: new}, of[21], values) < LIMIT
    assert largest_error(tied, {20: old}, of[20], values) > LIMIT


def test_samples_of_a_group_share_the_keys_and_values_of_their_prompt(engine: Any) -> None:
    before = engine.stats()
    engine.submit(request(30, prompt=80, tokens=4))
    while not engine.idle:
        engine.step()
    after = engine.stats()
    assert after["prefix_cache_queries"] - before["prefix_cache_queries"] == ROWS * 80
    assert after["prefix_cache_hits"] - before["prefix_cache_hits"] == (ROWS - 1) * 64  # whole blocks of 32
    assert 0 < after["occupancy"] <= 1
    assert after["swap_stall_max_s"] * after["swaps"] >= after["swap_stall_s"] >= after["swap_stall_last_s"] > 0


def test_the_process_is_left_as_it_was(engine: Any) -> None:
    import torch

    torch.set_num_threads(2)
    try:
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert not engine._scratch.exists()
    assert not str(tempfile.gettempdir()).startswith(str(engine._scratch))


def test_a_request_that_cannot_fit_is_refused_with_the_key_to_change(engine: Any) -> None:
    with pytest.raises(EngineError, match=r"group 50: 200 prompt tokens and 60 new ones exceed the 256 of rollout.vllm.max_model_len"):
        engine.submit(request(50, prompt=200))
    with pytest.raises(EngineError, match="outside the model's vocabulary of 90"):
        engine.submit(replace(request(51), prompt_ids=np.array([90], dtype=np.int32)))
    assert engine.idle


def test_a_samples_seed_is_its_own() -> None:
    seeds = {sample_seed(seed, group, sample) for seed in range(4) for group in range(20) for sample in range(8)}
    assert len(seeds) == 4 * 20 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(1, 2, 3) == sample_seed(1, 2, 3)
