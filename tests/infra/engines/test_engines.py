"""All engines keep one contract: the same tests run on the toy, on the transformers engine and on vLLM."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.infra.engines.base import DIRECTORY_VERSION, Completion, Engine, EngineSettings, GroupRequest, Sampling, Span
from penstock.infra.engines.registry import ENGINES
from penstock.infra.engines.shared_device import Sleepable
from penstock.infra.engines.toy import ToyEngine
from penstock.infra.errors import EngineError
from penstock.infra.tensors.stream import TensorBytes
from tests.support.refusals import one_line

SAMPLING = Sampling(max_new_tokens=12, stop_ids=(2, 7))
ROWS = 6
SHAPES = {"embedding": (20, 4), "head": (4,)}


def tiny_qwen3(directory: Path, *, head_dim: int = 16) -> Path:
    """A random Qwen3 of a few thousand parameters whose generation config says the opposite of what is asked for."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=head_dim, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.generation_config.update(temperature=0.01, top_k=1, do_sample=True, eos_token_id=5, max_new_tokens=1)
    model.save_pretrained(directory)
    return directory


def one_vllm_engine(directory: Path) -> tuple[Any, Callable[[], None]]:
    """An engine on vLLM for all tests, because starting one takes seconds: `close` makes it as new; and what really closes it."""
    from safetensors.numpy import load_file

    from penstock.infra.engines.vllm.engine import VllmEngine
    from penstock.infra.engines.vllm.rows import Counts

    class Renewed(VllmEngine):
        values = load_file(directory / "model.safetensors")

        def close(self) -> None:
            for one in self.groups_in_flight():
                self.abort(one.group)
            if self.version != DIRECTORY_VERSION:
                self.load_weights(DIRECTORY_VERSION, weights_of(self))
            self._counts = self._llm.logger_manager = Counts(ROWS)

    made = Renewed(EngineSettings(directory=directory, concurrency=ROWS))
    return made, lambda: VllmEngine.close(made)


Make = Callable[[], Any]
EXACT = ["toy", "transformers"]
"""Engines whose samples are bit-identical whatever is drawn beside them; in a batch that changes all the time no sample is."""
WITH_VLLM = [
    *EXACT,
    pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]),
]


@pytest.fixture(scope="module", params=WITH_VLLM)
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    if request.param == "toy":
        yield lambda: ToyEngine(vocabulary=40, parameters=SHAPES)
    elif request.param == "vllm":
        engine, close = one_vllm_engine(tiny_qwen3(tmp_path_factory.mktemp("model"), head_dim=32))
        yield lambda: engine
        close()
    else:
        from penstock.infra.engines.transformers.engine import TransformersEngine

        directory = tiny_qwen3(tmp_path_factory.mktemp("model"))
        yield lambda: TransformersEngine(directory)


@pytest.fixture(scope="module")
def shared(make: Make) -> Iterator[tuple[Any, list[TensorBytes]]]:
    """An engine for all tests that need no new one, and its first weights: what it has traced is used again."""
    made = make()
    yield made, weights_of(made)
    made.close()


@pytest.fixture
def engine(shared: tuple[Any, list[TensorBytes]], make: Make) -> Iterator[Any]:
    """An engine that is as new."""
    one, weights = shared
    if isinstance(one, ToyEngine):
        one = make()
    yield one
    if type(one).__name__ != "TransformersEngine":
        one.close()
        return
    for group in one.groups_in_flight():
        one.abort(group.group)
    if one.version != DIRECTORY_VERSION:
        one.load_weights(DIRECTORY_VERSION, weights)
    one._stats = dict.fromkeys(one._stats, 0.0)


def asked(group: int = 3, **changes: Any) -> GroupRequest:
    prompt = np.array([4, 9, 11, 30], dtype=np.int32)
    first = GroupRequest(group=group, prompt_ids=prompt, samples=tuple(range(ROWS)), rows=ROWS, seed=17, sampling=SAMPLING)
    return replace(first, **changes)


def drawn(engine: Engine, *requests: GroupRequest) -> dict[tuple[int, int], Completion]:
    for request in requests:
        engine.submit(request)
    found: dict[tuple[int, int], Completion] = {}
    while not engine.idle:
        for completion in engine.step():
            assert (completion.group, completion.sample) not in found
            found[completion.group, completion.sample] = completion
    return found


def same(one: Completion, other: Completion) -> bool:
    return (
        one.token_ids.tobytes() == other.token_ids.tobytes()
        and one.logprobs.tobytes() == other.logprobs.tobytes()
        and one.finish == other.finish
    )


def weights_of(engine: Any, *, scale: float = 1.0) -> list[TensorBytes]:
    """Weights that fit the engine, other than those it has when `scale` is not 1."""
    if isinstance(engine, ToyEngine):
        shapes: dict[str, Any] = dict(SHAPES)
        values = {name: np.full(shape, scale, dtype=np.float32) for name, shape in shapes.items()}
    elif hasattr(engine, "values"):
        values = {name: value * np.float32(scale) for name, value in engine.values.items()}
    else:
        values = {name: (parameter.numpy() * np.float32(scale)) for name, parameter in engine._model.named_parameters()}
    return [TensorBytes(name=name, dtype="float32", shape=value.shape, data=value.tobytes()) for name, value in values.items()]


def test_every_wanted_sample_comes_once_in_the_step_it_ends(engine: Any) -> None:
    engine.submit(asked())
    steps, found = 0, {}
    while not engine.idle:
        steps += 1
        for completion in engine.step():
            assert len(completion.token_ids) == steps
            found[completion.sample] = completion
    assert sorted(found) == list(range(ROWS))
    assert engine.step() == []


def test_a_completion_ends_with_a_stop_id_or_at_the_full_length(engine: Any) -> None:
    found = drawn(engine, *(asked(group) for group in range(8)))
    for completion in found.values():
        stops = np.isin(completion.token_ids, SAMPLING.stop_ids)
        assert not stops[:-1].any()
        assert completion.finish == ("stop" if stops[-1] else "length")
        assert stops[-1] or len(completion.token_ids) == SAMPLING.max_new_tokens
        assert completion.token_ids.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
        assert completion.logprobs.shape == completion.token_ids.shape
        assert (completion.logprobs <= 0).all()
        assert completion.started_ns <= completion.ended_ns
    assert {completion.finish for completion in found.values()} == {"stop", "length"}


def test_only_the_stop_ids_of_the_request_end_a_completion(engine: Any) -> None:
    found = drawn(engine, asked(sampling=replace(SAMPLING, stop_ids=())))
    assert {completion.finish for completion in found.values()} == {"length"}


@pytest.mark.parametrize("make", EXACT, indirect=True)
def test_a_group_is_bit_identical_whatever_was_drawn_before(make: Make) -> None:
    one, other = make(), make()
    expected = drawn(one, asked(3))
    drawn(other, asked(1, rows=2, samples=(1,)), asked(2, prompt_ids=np.arange(1, 30, dtype=np.int32)))
    found = drawn(other, asked(3))
    assert all(same(expected[key], found[key]) for key in expected)


@pytest.mark.parametrize("make", EXACT, indirect=True)
def test_a_group_is_bit_identical_beside_others_and_on_repetition(make: Make) -> None:
    engine = make()
    expected = drawn(engine, asked(3))
    for _ in range(3):
        found = drawn(engine, asked(4), asked(3), asked(5))
        assert all(same(expected[key], found[key]) for key in expected)


@pytest.mark.parametrize("make", EXACT, indirect=True)
@pytest.mark.parametrize("wanted", [(0,), (5,), (4, 1), (1, 2, 3)])
def test_a_sample_is_bit_identical_whichever_others_are_wanted(engine: Any, wanted: tuple[int, ...]) -> None:
    expected = drawn(engine, asked())
    found = drawn(engine, asked(samples=wanted))
    assert sorted(sample for _, sample in found) == sorted(wanted)
    assert all(same(expected[key], found[key]) for key in found)


def test_seed_group_and_sample_each_make_another_draw(engine: Any) -> None:
    ids = {completion.token_ids.tobytes() for completion in drawn(engine, asked(3), asked(4)).values()}
    ids |= {completion.token_ids.tobytes() for completion in drawn(engine, asked(3, seed=18)).values()}
    assert len(ids) > 2 * ROWS


def test_greedy_rows_agree_whatever_the_seed(engine: Any) -> None:
    greedy = replace(SAMPLING, greedy=True)
    found = drawn(engine, asked(sampling=greedy)) | drawn(engine, asked(9, seed=1, sampling=greedy))
    assert len({completion.token_ids.tobytes() for completion in found.values()}) == 1


def test_the_lowest_group_in_hand_is_drawn_first(engine: Any) -> None:
    found = drawn(engine, asked(8), asked(2), asked(5))
    assert list(dict.fromkeys(group for group, _ in found)) == [2, 5, 8]


def test_pending_counts_groups_and_idle_means_none(engine: Any) -> None:
    assert engine.idle
    engine.submit(asked(1))
    engine.submit(asked(2))
    engine.step()
    assert engine.pending == 2
    assert not engine.idle
    assert not engine.has_room
    drawn(engine)
    assert engine.stats()["groups"] == 2
    assert engine.stats()["tokens"] >= 2 * ROWS


def test_single_turns_are_taken_until_all_that_is_drawn_side_by_side_is_taken(engine: Any) -> None:
    taken = 0
    while engine.has_room:
        engine.submit(asked(taken, samples=(0,), rows=1))
        taken += 1
    assert taken == (ROWS if type(engine).__name__ == "Renewed" else engine._capacity if isinstance(engine, ToyEngine) else 1)
    drawn(engine)
    assert (engine.stats()["groups"], engine.has_room) == (taken, True)


def test_new_weights_change_the_draw_and_label_it(engine: Any) -> None:
    before = drawn(engine, asked())
    old, new = weights_of(engine), weights_of(engine, scale=0.5)
    assert engine.version == DIRECTORY_VERSION
    engine.load_weights(7, new)
    after = drawn(engine, asked())
    assert engine.version == 7
    assert {completion.spans[-1].version for completion in after.values()} == {7}
    assert not all(same(before[key], after[key]) for key in before)
    engine.load_weights(8, reversed(new))
    again = drawn(engine, asked())
    assert all(same(after[key], again[key]) for key in after)
    engine.load_weights(9, old)
    assert {completion.spans[0].version for completion in drawn(engine, asked()).values()} == {9}


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape", "twice", "short"])
def test_weights_that_do_not_fit_change_nothing(engine: Any, damage: str) -> None:
    engine.load_weights(1, weights_of(engine))
    before = drawn(engine, asked())
    tensors = weights_of(engine, scale=0.5)
    last = tensors[-1]
    damaged = {
        "missing": tensors[:-1],
        "unknown": [*tensors, replace(last, name="lm_head.bias")],
        "shape": [*tensors[:-1], replace(last, shape=(*last.shape, 1))],
        "twice": [*tensors, last],
        "short": [*tensors[:-1], replace(last, data=bytes(last.data)[:-4])],
    }[damage]
    with one_line(EngineError):
        engine.load_weights(2, iter(damaged))
    assert engine.version == 1
    after = drawn(engine, asked())
    assert all(same(before[key], after[key]) for key in before)


def test_weights_that_come_while_a_group_is_in_hand_are_refused_or_label_what_follows(engine: Any) -> None:
    weights = weights_of(engine)
    engine.load_weights(0, weights)
    engine.submit(asked())
    engine.step()
    name = {ToyEngine: "toy"}.get(type(engine), "transformers" if type(engine).__name__ == "TransformersEngine" else "vllm")
    if not ENGINES[name].swaps_in_flight:
        with pytest.raises(EngineError, match="in flight"):
            engine.load_weights(1, weights)
        return
    engine.load_weights(1, weights)
    longer = [completion for completion in drawn(engine).values() if len(completion.token_ids) > 1]
    assert longer
    assert all(completion.spans == (Span(0, 0), Span(1, 1)) for completion in longer)


def test_an_aborted_group_returns_what_is_drawn_of_it_and_is_gone(engine: Any) -> None:
    whole = drawn(engine, asked())
    engine.submit(asked())
    engine.submit(asked(group=9))
    ended = [*engine.step(), *engine.step()]
    assert engine.groups_in_flight()[0].tokens == 2 * (ROWS - len(ended)) + sum(len(completion.token_ids) for completion in ended)
    aborted = engine.abort(3)
    assert {completion.finish for completion in aborted} == {"abort"}
    assert {completion.sample for completion in aborted} == set(range(ROWS)) - {completion.sample for completion in ended}
    for completion in aborted:
        assert completion.token_ids.tolist() == whole[3, completion.sample].token_ids[:2].tolist()
    never_begun = engine.abort(9)
    assert [len(completion.token_ids) for completion in never_begun] == [0] * ROWS
    assert engine.idle
    assert engine.abort(3) == []


@pytest.mark.parametrize(("field", "value"), [("temperature", 0.0), ("top_p", 0.0), ("top_p", 1.5), ("top_k", -1), ("max_new_tokens", 0)])
def test_impossible_sampling_is_refused_with_its_value(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field}.*{value}"):
        replace(SAMPLING, **{field: value})


@pytest.mark.parametrize("wanted", [(), (1, 1), (ROWS,), (-1,)])
def test_a_group_request_wants_distinct_samples_of_its_rows(wanted: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="group 3"):
        asked(samples=wanted)


def test_an_engine_that_has_slept_draws_what_one_does_that_never_did(make: Make) -> None:
    engine = make()
    first = weights_of(engine, scale=0.5)
    engine.load_weights(1, first)
    expected = drawn(engine, asked(4))
    assert isinstance(engine, Sleepable)
    for _ in range(2):
        engine.sleep()
        assert engine.version == DIRECTORY_VERSION and engine.idle
        engine.wake()
        engine.load_weights(1, first)
        found = drawn(engine, asked(4))
        assert {key: one.spans for key, one in found.items()} == {key: one.spans for key, one in expected.items()}
        assert all(np.array_equal(one.token_ids, found[key].token_ids) for key, one in expected.items())
        assert all(np.allclose(one.logprobs, found[key].logprobs, atol=1e-5) for key, one in expected.items())
    for _ in range(2):  # the first time it is woken for nothing
        engine.sleep()
        engine.wake()
    engine.load_weights(2, first)
    assert {span.version for one in drawn(engine, asked(5)).values() for span in one.spans} == {2}
    engine.close()
