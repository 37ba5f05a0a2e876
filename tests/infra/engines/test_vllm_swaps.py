"""Engines on vLLM that a test makes for itself: untied models, long runs of swaps, and updates that fail halfway."""

from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.engines.base import Completion
from penstock.infra.errors import EngineError
from penstock.infra.tensors.host_memory import HostBuffers, located
from tests.support.refusals import one_line
from tests.support.vllm_helpers import LIMIT, draw_with_swaps, largest_error, open_engine, request, save_model, tensors_of, version_values

pytestmark = [pytest.mark.costly, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]


@pytest.mark.slow
def test_an_untied_output_layer_is_swapped_too(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model", tied=False)
    values = version_values(directory)
    with closing(open_engine(directory)) as engine:
        asked = [request(group, tokens=24) for group in range(3)]
        found, swaps = draw_with_swaps(engine, asked, values, every=8)
    assert swaps
    assert largest_error(directory, {one.group: one for one in asked}, found, values) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_ten_thousand_tokens_over_ten_swaps_have_true_labels(tmp_path: Path, is_tied: bool, temperature: float) -> None:
    directory = save_model(tmp_path / "model", tied=is_tied)
    values = version_values(directory)
    with closing(open_engine(directory)) as engine:
        asked = [request(group, temperature=temperature, tokens=160, prompt=5 + group % 60) for group in range(40)]
        found, swaps = draw_with_swaps(engine, asked, values, every=40)
    tokens = sum(len(one.token_ids) for one in found)
    worst = largest_error(directory, {one.group: one for one in asked}, found, values)
    print(f"{tokens} tokens, {swaps} swaps: largest difference {worst:.1e}")
    assert tokens >= 10_000
    assert swaps >= 10
    assert worst < LIMIT


@pytest.mark.slow
def test_an_engines_process_maps_a_version_in_shared_memory_and_another_is_copied_there(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model", tied=True)
    engine, values, buffers = open_engine(directory, engine_process=True), version_values(directory), HostBuffers(shared=True)
    call, paths = engine._llm.collective_rpc, list[str]()

    def noted(method: str, args: Any) -> Any:
        paths.append(args[0]["path"])
        return call(method, args=args)

    engine._llm.collective_rpc = noted
    try:
        asked, found = [request(group, tokens=24) for group in range(4)], list[Completion]()
        for version, group in enumerate(asked):
            engine.submit(group)
            found += engine.step()
            tensors = tensors_of(values(version))
            shared = buffers.copy(tensors) if version % 2 else tensors
            paths.clear()
            engine.load_weights(version, shared)
            memory = located(shared[0].data)[0]
            assert (memory is not None and paths[-1].endswith(f"/fd/{memory.file}")) == bool(version % 2)
        while not engine.idle:
            found += engine.step()
    finally:
        engine.close()
    assert len(found) == sum(len(group.samples) for group in asked)
    assert largest_error(directory, {one.group: one for one in asked}, found, values) < LIMIT


def test_an_update_that_fails_halfway_ends_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.infra.engines.vllm.transfer import Transfer

    directory = save_model(tmp_path / "model", tied=True)
    values = version_values(directory)
    with closing(open_engine(directory)) as engine:
        engine.submit(request(1))
        engine.step()

        def half(_: Any, __: Any) -> None:
            raise RuntimeError("the buffer\nis gone")

        monkeypatch.setattr(Transfer, "receive_weights", half)
        with one_line(EngineError, match=r"while loading weights version 5 .*the buffer is gone.*restart the worker"):
            engine.load_weights(5, tensors_of(values(5)))
        for use in (engine.step, lambda: engine.load_weights(6, tensors_of(values(6))), lambda: engine.abort(1)):
            with pytest.raises(EngineError, match="version 5"):
                use()
