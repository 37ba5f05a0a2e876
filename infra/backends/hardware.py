"""This machine's processor, the peak FLOP/s of devices, and the FLOPs of training a model, for model FLOPs utilisation (MFU).

FLOPs are what the model needs, as in PaLM (arXiv 2204.02311, appendix B): no padding and no recomputation. Imports nothing heavy.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})
"""Linux's names of instructions that multiply bfloat16: AVX512-BF16, AMX, AVX-NE-CONVERT; on ARM bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """A machine's processor."""

    cores: int
    """Cores that this process may use."""
    bfloat16: bool
    """True if it has instructions that multiply bfloat16; without them bfloat16 is slower than float32."""
    vendor: str = "unknown"
    """Libraries choose their matrix multiplication by it."""


def this_cpu() -> Cpu:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    return described(text, cores=cores)


def described(cpuinfo: str, *, cores: int) -> Cpu:
    """The processor of a `/proc/cpuinfo` text.

    Example:
        described("vendor_id : GenuineIntel\\nflags : fpu avx512f avx512_bf16", cores=2)
        # -> Cpu(cores=2, bfloat16=True, vendor="GenuineIntel")
    """
    lines = [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in cpuinfo.splitlines())]
    return Cpu(
        cores=cores,
        bfloat16=any(BFLOAT16_FLAGS & set(value.split()) for name, value in lines if name in ("flags", "Features")),
        vendor=next((value for name, value in lines if name == "vendor_id"), "unknown"),
    )


PEAK_TFLOPS = (
    ("GB200", 2500.0), ("B200", 2250.0), ("H100 PCIe", 756.0), ("H100 NVL", 835.0), ("H100", 989.0), ("H200", 989.0), ("GH200", 989.0),
    ("H800", 989.0), ("H20", 148.0), ("A100", 312.0), ("A800", 312.0), ("L40S", 362.0), ("L40", 181.0), ("L4", 121.0), ("A40", 150.0),
    ("A30", 165.0), ("A10", 125.0), ("RTX 6000 Ada", 364.0), ("RTX A6000", 155.0), ("RTX 5090", 210.0), ("RTX 4090", 165.0),
    ("RTX 3090", 71.0),
)  # fmt: skip
"""Part of a device's name -> dense bfloat16 TFLOP/s with float32 sums, from its data sheet; the first match counts."""


def peak_flops(device: str, *, dtype: str, tf32: bool, configured_tflops: float | None) -> float | None:
    """Peak FLOP/s of a device in this arithmetic; None if unknown.

    Example:
        peak_flops("NVIDIA H100 80GB HBM3", dtype="bfloat16", tf32=False, configured_tflops=None)  # -> 989e12
    """
    if configured_tflops is not None:
        return configured_tflops * 1e12
    words = re.split(r"[\s-]", device)
    tflops = next((tflops for part, tflops in PEAK_TFLOPS if part in words or (" " in part and part in device)), None)
    if tflops is None or (dtype == "float32" and not tf32):
        return None
    return tflops * 1e12 / (2 if dtype == "float32" else 1)  # TF32 is half as fast


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCount:
    """FLOPs of a model's forward and backward pass: 2 per parameter and token forward, 2 for the gradient of its input, 2 for its own, and
    for attention's two products 12 per layer, channel and pair of tokens."""

    parameters: int
    """Parameters that a token is multiplied with: all but the input embedding, which is looked up."""
    trained: int
    """Those of them that have a gradient."""
    attention: int
    """Layers x heads x channels of a head."""

    @classmethod
    def of_model(cls, model: Any) -> "FlopCount":
        """The count of a model; zeros for a mixture of experts, in which a token uses only some of the parameters."""
        config = model.config.get_text_config()
        if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
            return cls(parameters=0, trained=0, attention=0)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        tied = head is not None and head.weight is embedding.weight
        looked_up = set() if tied else {id(parameter) for parameter in embedding.parameters()}
        multiplied = [parameter for parameter in model.parameters() if id(parameter) not in looked_up]
        sizes = [(getattr(parameter, "ds_numel", parameter.numel()), parameter.requires_grad) for parameter in multiplied]
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            parameters=sum(size for size, _ in sizes),
            trained=sum(size for size, needs in sizes if needs),
            attention=config.num_hidden_layers * config.num_attention_heads * width,
        )

    def of(self, lengths: Sequence[int], *, computed: int) -> float:
        """FLOPs for sequences of these lengths; with shared prompts only `computed` of their tokens pass through the model."""
        real = sum(lengths)
        if not real:
            return 0.0
        linear = (4.0 * self.parameters + 2.0 * self.trained) * real
        return (linear + 12.0 * self.attention * float(sum(length * length for length in lengths))) * min(1.0, computed / real)
