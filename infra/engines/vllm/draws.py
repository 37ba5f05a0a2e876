"""What vLLM's sampler on a CPU asks of each sample's random generator at each step, drawn many at a time.

The rule: a sample's numbers are those that vLLM would draw from its generator, one after the other; only fewer calls are made for them.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch

BLOCK = 64
"""Numbers that are drawn at once. A call costs several microseconds, and 64 samples side by side make 64 of them at each step."""


class Draws:
    """Numbers of generators, ahead of their use; forgotten with the generator."""

    def __init__(self) -> None:
        self._ahead: WeakKeyDictionary[torch.Generator, list[int]] = WeakKeyDictionary()

    def next_of(self, generator: torch.Generator) -> int:
        """The generator's next number in [0, 2^31)."""
        ahead = self._ahead.get(generator)
        if not ahead:
            drawn = torch.randint(0, 2**31, (BLOCK,), generator=generator, dtype=torch.long).tolist()
            ahead = self._ahead[generator] = drawn[::-1]
        return ahead.pop()


def install() -> None:
    """Have vLLM's sampler on a CPU draw that way; the rest of what it does stays as it is in the version that is pinned."""
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    stock, draws = TopKTopPSampler.forward_cpu, Draws()

    def forward_cpu(self: Any, logits: torch.Tensor, generators: dict[int, torch.Generator], k: Any, p: Any) -> Any:
        if self.use_fp64_gumbel or self.logprobs_mode != "processed_logprobs":  # the same for all steps of a process
            return stock(self, logits, generators, k, p)
        logits = topk_topp_sampler.apply_top_k_top_p(logits, k, p)
        seeds = torch.randint(0, 2**31, (len(logits),), dtype=torch.long)
        if generators:
            seeds[list(generators)] = torch.tensor([draws.next_of(one) for one in generators.values()], dtype=torch.long)
        sampled = torch.ops._C.fused_gumbel_argmax(logits.to(dtype=torch.float32), seeds)
        return sampled, logits.log_softmax(dim=-1, dtype=torch.float32)

    TopKTopPSampler.forward_cpu = forward_cpu
