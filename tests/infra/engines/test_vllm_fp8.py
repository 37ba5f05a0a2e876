"""Under vLLM's quantisation to FP8 a version is loaded as a whole. The CPU has no kernel that quantises: torch stands in for it."""

from collections.abc import Callable
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.engines.base import Completion
from penstock.infra.engines.vllm import start
from tests.support.vllm_helpers import draw_with_swaps, load_model, open_engine, request, save_model, tensors_of

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


@pytest.fixture
def biased(tmp_path: Path) -> list[Path]:
    """Two models whose queries, keys and values have biases, with other weights and biases each."""
    import torch

    folders = [save_model(tmp_path / name, tied=False, hidden=256, head_dim=128, attention_bias=True) for name in ("first", "second")]
    for seed, folder in enumerate(folders):
        model, random = load_model(folder), torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            size = 0.3 if parameter.ndim == 1 else 0.3 * parameter.abs().mean()
            parameter.add_(seed * size * torch.randn(parameter.shape, generator=random))
        model.save_pretrained(folder)
    return folders


def drawn(engine: Any) -> list[tuple[int, int, list[int], list[float]]]:
    found: list[Completion] = draw_with_swaps(engine, [request(group, tokens=30) for group in range(3)], None, every=10**6)[0]
    return sorted((one.group, one.sample, one.token_ids.tolist(), one.logprobs.tolist()) for one in found)


def distance(one: list[Any], other: list[Any]) -> float:
    """Mean difference of the logprobs of first tokens, where they are the same."""
    gaps = [abs(mine[3][0] - its[3][0]) for mine, its in zip(one, other, strict=True) if mine[2][0] == its[2][0]]
    return sum(gaps) / len(gaps)


def test_weights_and_biases_that_are_swapped_in_equal_those_of_an_engine_that_starts_with_them(
    opened: Callable[[Path, str | None], Any], biased: list[Path]
) -> None:
    first, second = biased
    with closing(opened(first, start.FP8)) as engine:
        before = drawn(engine)
        engine.load_weights(0, tensors_of(dict(load_model(second).named_parameters())))
        swapped = drawn(engine)
    with closing(opened(second, start.FP8)) as engine:
        started = drawn(engine)
    with closing(opened(second, None)) as engine:
        exact = drawn(engine)
    assert swapped == started
    assert swapped not in (before, exact)
    model = load_model(second)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
    model.save_pretrained(first)
    with closing(opened(first, None)) as engine:
        assert distance(started, exact) < distance(started, drawn(engine)) / 2, "the biases are in use"
