"""How many operations a model's training takes, and how many its device could do: what model FLOPs utilisation (MFU) is made of.

The rule: only what the model needs is counted, as in PaLM (arXiv 2204.02311, appendix B): no padding, and nothing computed twice.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

PEAK_TFLOPS = (
    ("GB200", 2500.0), ("B200", 2250.0), ("H100 PCIe", 756.0), ("H100 NVL", 835.0), ("H100", 989.0), ("H200", 989.0), ("GH200", 989.0),
    ("H800", 989.0), ("H20", 148.0), ("A100", 312.0), ("A800", 312.0), ("L40S", 362.0), ("L40", 181.0), ("L4", 121.0), ("A40", 150.0),
    ("A30", 165.0), ("A10", 125.0), ("RTX 6000 Ada", 364.0), ("RTX A6000", 155.0), ("RTX 5090", 210.0), ("RTX 4090", 165.0),
    ("RTX 3090", 71.0),
)  # fmt: skip
"""Part of a device's name -> dense bfloat16 operations a second with float32 sums, in 10^12, from its data sheet; the first that fits."""


def peak_flops(device: str, *, dtype: str, tf32: bool, given_tflops: float | None) -> float | None:
    """Operations a second that a device could do in this arithmetic; None where that is not known.

    Example:
        peak_flops("NVIDIA H100 80GB HBM3", dtype="bfloat16", tf32=False, given_tflops=None)  # -> 989e12
    """
    if given_tflops is not None:
        return given_tflops * 1e12
    words = re.split(r"[\s-]", device)
    known = next((tflops for part, tflops in PEAK_TFLOPS if part in words or (" " in part and part in device)), None)
    if known is None or (dtype == "float32" and not tf32):
        return None
    return known * 1e12 / (2 if dtype == "float32" else 1)  # TF32 is half as fast


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCount:
    """What one model's forward and backward pass takes: 2 operations a parameter and token forward, 2 for its input's gradient, 2 for its
    own; beside it attention's two products, twelve operations a layer, channel and pair of tokens."""

    parameters: int
    """That a token is multiplied with: without the input embedding, which is looked up."""
    trained: int
    """Of those with a gradient."""
    attention: int
    """Layers x heads x channels of a head."""

    @classmethod
    def of_model(cls, model: Any) -> "FlopCount":
        """Zeros for a mixture of experts, where a token meets some of the parameters only."""
        config = model.config.get_text_config()
        if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
            return cls(parameters=0, trained=0, attention=0)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        tied = head is not None and head.weight is embedding.weight
        looked_up = set() if tied else {id(parameter) for parameter in embedding.parameters()}
        sizes = [(getattr(one, "ds_numel", one.numel()), one.requires_grad) for one in model.parameters() if id(one) not in looked_up]
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            parameters=sum(size for size, _ in sizes),
            trained=sum(size for size, needs in sizes if needs),
            attention=config.num_hidden_layers * config.num_attention_heads * width,
        )

    def of(self, attention_mask: npt.NDArray[np.bool_], *, computed: int) -> float:
        """Operations for the real tokens of a micro-batch [B, L], of which `computed` ran through the model where prompts are shared."""
        lengths = attention_mask.sum(1, dtype=np.float64)
        real = float(lengths.sum())
        if not real:
            return 0.0
        linear = (4.0 * self.parameters + 2.0 * self.trained) * real
        return (linear + 12.0 * self.attention * float((lengths**2).sum())) * min(1.0, computed / real)
