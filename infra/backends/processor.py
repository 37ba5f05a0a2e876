"""This machine's processor, as Linux describes it; imports nothing heavy."""

import os
from dataclasses import dataclass
from pathlib import Path

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
    """The processor of this machine."""
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
