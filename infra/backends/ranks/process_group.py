"""Imports DeepSpeed without its log output, and joins its process group.

A single process needs no network, compiler or launcher; several read their addresses from torchrun's environment variables.
"""

import atexit
import importlib
import logging
import os
import socket
import sys
import warnings
from datetime import timedelta
from typing import Any

import torch


def import_deepspeed(device: torch.device) -> Any:
    """Import deepspeed for this kind of device, with its log limited to errors."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # read once, at import; else it detects the device and prints a warning
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's collectives warn once per parameter
    deepspeed = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu":
        # Plain gloo works on a CPU; the shared-memory extension would call a C++ compiler at run time.
        importlib.import_module("deepspeed.comm.torch")
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    return deepspeed


def join_process_group(deepspeed: Any, device: torch.device, *, timeout_s: float = 600) -> int:
    """Join the launcher's group, or create one for this process alone; returns the number of processes."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not torch.distributed.is_initialized():
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    if not torch.distributed.is_initialized() or deepspeed.comm.comm.cdb is None:
        leave_process_group_at_exit()  # not on close: DeepSpeed keeps subgroups until the process exits
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=timedelta(seconds=timeout_s))
    size: int = torch.distributed.get_world_size()
    return size


def leave_process_group_at_exit() -> None:
    """Destroy the process group when this process exits normally."""
    atexit.register(_leave_process_group)


def _leave_process_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def loopback() -> str:
    """Name of the loopback network interface."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), names[0])
