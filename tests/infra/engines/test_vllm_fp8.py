"""Under vLLM's quantisation to FP8 a version is loaded as a whole. The CPU has no kernel that quantises: torch stands in for it."""

from collections.abc import Callable
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.engines.base import Completion
from penstock.infra.engines.vllm import start
from tests.support.vllm_helpers import draw_with_swaps, load_model, open_engine, request, save_model, tensors_of, version_values

pytestmark = [pytest.mark.costly, pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]


def quantised(weight: Any, scale: Any = None, **others: Any) -> Any:
    """What vLLM's `scaled_fp8_quant` returns: the values in FP8, and their scale."""
    import torch

    largest, values = torch.finfo(torch.float8_e4m3fn).max, weight.float()
    if scale is None:
        amax = values.abs().amax(-1, keepdim=True) if others.get("use_per_token_if_dynamic") else values.abs().max().reshape(1)
        scale = (amax / largest).clamp(min=1e-12)
    return (values / scale).clamp(-largest, largest).to(torch.float8_e4m3fn), scale


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, str | None], Any]:
    """Opens an engine in bfloat16 with a quantization, on the CPU."""
    from vllm import _custom_ops

    monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", quantised)
    monkeypatch.setattr(start, "_check_quantization", lambda *_, **__: None)
    return lambda directory, method: open_engine(directory, dtype="bfloat16", arguments={"quantization": method} if method else {})


def drawn(engine: Any) -> list[tuple[int, int, list[int], list[float]]]:
    found: list[Completion] = draw_with_swaps(engine, [request(group, tokens=30) for group in range(3)], None, every=10**6)[0]
    return sorted((one.group, one.sample, one.token_ids.tolist(), one.logprobs.tolist()) for one in found)


def test_weights_that_are_swapped_in_equal_those_of_an_engine_that_starts_with_them(
    opened: Callable[[Path, str | None], Any], tmp_path: Path
) -> None:
    first, second = (save_model(tmp_path / name, tied=False, hidden=256, head_dim=128) for name in ("first", "second"))
    new = version_values(first)(0)
    model = load_model(second)
    for name, parameter in model.named_parameters():
        parameter.copy_(new[name])
    model.save_pretrained(second)
    with closing(opened(first, start.FP8)) as engine:
        before = drawn(engine)
        engine.load_weights(0, tensors_of(new))
        swapped = drawn(engine)
    with closing(opened(second, start.FP8)) as engine:
        started = drawn(engine)
    with closing(opened(second, None)) as engine:
        exact = drawn(engine)
    assert swapped == started
    assert swapped not in (before, exact)
