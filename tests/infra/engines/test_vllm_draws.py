"""Numbers that are drawn ahead are those that vLLM draws one at a time."""

import importlib.util
from typing import Any

import pytest

pytest.importorskip("vllm")


def sampler_as_installed() -> Any:
    """vLLM's module once more, as it stands on disk, whatever was done to the one that is imported."""
    spec = importlib.util.find_spec("vllm.v1.sample.ops.topk_topp_sampler")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TopKTopPSampler("processed_logprobs")


def test_samples_that_come_and_go_are_drawn_as_by_vllms_own_sampler() -> None:
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    import penstock.infra.engines.vllm.transfer  # noqa: F401  it installs them where the model is
    from penstock.infra.engines.vllm.draws import BLOCK

    random = torch.Generator().manual_seed(0)
    rows = [[torch.Generator().manual_seed(seed) for seed in range(6)] for _ in range(2)]
    ours, stock = TopKTopPSampler("processed_logprobs"), sampler_as_installed()
    assert ours.forward_cpu.__code__ is not stock.forward_cpu.__code__
    for step in range(2 * BLOCK):
        seeded = [row for row in range(6) if (step + row) % 5]  # the rest are greedy, or have not begun
        chosen, kept = torch.randn((len(seeded) + 1, 90), generator=random), torch.tensor([5] * (len(seeded) + 1))
        drawn = []
        for sampler, generators in ((ours, rows[0]), (stock, rows[1])):
            torch.manual_seed(step)  # for the row without a seed of its own
            own = {at: generators[row] for at, row in enumerate(seeded)}
            drawn.append(sampler.forward_cpu(chosen.clone(), own, kept if step % 2 else None, None))
        assert torch.equal(drawn[0][0], drawn[1][0])
        assert torch.equal(drawn[0][1], drawn[1][1])
