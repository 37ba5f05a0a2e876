"""Sets up torch for a process that trains: device, threads, deterministic kernels and the memory allocator."""

import ctypes
import os

import torch

from penstock.infra.backends.settings import BackendSettings

LARGE_BLOCK_BYTES = 2**26
"""Blocks of at least this size are mapped one by one and freed at once: the gradient of an embedding, not an activation."""


def choose_device(device: str) -> torch.device:
    """Return the device for this process; `cuda` is its GPU (LOCAL_RANK), and so is `auto` if there is one, else the CPU."""
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu" if device == "auto" else device)


def fix_arithmetic(settings: BackendSettings) -> None:
    """Set threads, seed and deterministic kernels for the whole process, so that equal micro-batches give equal bits on this machine.

    Under `deterministic = "warn"` an operation without a deterministic form only warns, and attention on a GPU uses its fastest backward
    pass, which is not deterministic.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with a fixed workspace
    # transformers imports deepspeed if it is installed, which detects the accelerator and prints it unless this is set
    os.environ.setdefault("DS_ACCELERATOR", choose_device(settings.device).type)
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    torch.use_deterministic_algorithms(True, warn_only=settings.deterministic != "strict")
    torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = settings.tf32
    torch.utils.deterministic.fill_uninitialized_memory = False  # no operation here reads uninitialised memory; filling it costs 15 %
    # By default glibc maps and unmaps each activation, which takes half of a small model's step: let it keep freed blocks.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(mmap_threshold, LARGE_BLOCK_BYTES)
        mallopt(trim_threshold, 2**30)


def return_freed_memory() -> None:
    """Return freed blocks to the system: blocks of a step and of a weight copy leave gaps that the next one does not fill."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
