"""Engines on vLLM that a test makes for itself: untied models, long runs of swaps, and updates that fail halfway."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.errors import EngineError
from tests.support.vllm_helpers import LIMIT, draw_with_swaps, largest_error, open_engine, request, save_model, tensors_of, version_values

pytestmark = [pytest.mark.costly, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]


@pytest.mark.slow
def test_an_untied_output_layer_is_swapped_too(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model", tied=False)
    values, engine = version_values(directory), open_engine(directory)
    try:
        asked = [request(group, tokens=24) for group in range(3)]
        found, swaps = draw_with_swaps(engine, asked, values, every=8)
    finally:
        engine.close()
    assert swaps
    assert largest_error(directory, {one.group: one for one in asked}, found, values) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_ten_thousand_tokens_over_ten_swaps_have_true_labels(tmp_path: Path, is_tied: bool, temperature: float) -> None:
    directory = save_model(tmp_path / "model", tied=is_tied)
    values, engine = version_values(directory), open_engine(directory)
    try:
        asked = [request(group, temperature=temperature, tokens=160, prompt=5 + group % 60) for group in range(40)]
        found, swaps = draw_with_swaps(engine, asked, values, every=40)
    finally:
        engine.close()
    tokens = sum(len(one.token_ids) for one in found)
    worst = largest_error(directory, {one.group: one for one in asked}, found, values)
    print(f"{tokens} tokens, {swaps} swaps: largest difference {worst:.1e}")
    assert tokens >= 10_000
    assert swaps >= 10
    assert worst < LIMIT


def test_an_update_that_fails_halfway_ends_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.infra.engines.vllm.transfer import Transfer

    directory = save_model(tmp_path / "model", tied=True)
    engine, values = open_engine(directory), version_values(directory)
    try:
        engine.submit(request(1))
        engine.step()

        def half(_: Any, __: Any) -> None:
            raise RuntimeError("the buffer\nis gone")

        monkeypatch.setattr(Transfer, "receive_weights", half)
        with pytest.raises(EngineError, match=r"while loading weights version 5 .*the buffer is gone.*restarted") as caught:
            engine.load_weights(5, tensors_of(values(5)))
        assert "\n" not in str(caught.value)
        for use in (engine.step, lambda: engine.load_weights(6, tensors_of(values(6))), lambda: engine.abort(1)):
            with pytest.raises(EngineError, match="version 5"):
                use()
    finally:
        engine.close()
