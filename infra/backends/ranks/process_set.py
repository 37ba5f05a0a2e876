"""The processes of one trainer: DeepSpeed's import and process group, messages through the group's store, and tensors through gloo."""

import atexit
import importlib
import json
import logging
import os
import socket
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from penstock.infra.errors import BackendError
from penstock.infra.tensors.stream import TensorBytes
from penstock.infra.tensors.torch_copy import from_bytes, tensor_bytes


def import_deepspeed(device: torch.device) -> Any:
    """Import deepspeed for this kind of device, with its log limited to errors, and return it."""
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
    """Join the launcher's process group, or create one for this process alone; return the number of processes."""
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
    """Return the name of the loopback network interface."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), names[0])


PATIENCE = timedelta(days=365)
"""Timeout of a message: a rank waits as long as rank 0 waits for samples, and stops waiting when rank 0 exits."""
COLLECTIVE_LIMIT = timedelta(minutes=30)
"""Timeout of one collective, and so of one rank's computation while the others wait."""


def store_on_free_port(size: int) -> Any:
    """Return a store for `size` processes of this machine, served by this process on a free port (`store.port`)."""
    return torch.distributed.TCPStore("127.0.0.1", 0, size, True, wait_for_workers=False)


@dataclass(slots=True)
class ProcessSet:
    """One process of a trainer, and its connections to the others."""

    rank: int
    size: int
    store: Any
    _gloo: Any = None
    """Process group for tensors in host memory; None for the default group."""
    _numbers: Counter[str] = field(default_factory=Counter)

    @classmethod
    def join(cls, *, on_gpu: bool, store: Any = None) -> "ProcessSet":
        """Join by torchrun's environment variables; `store` is the one that this process serves, if any. Raises `BackendError`."""
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        try:
            if store is None:
                store, rank, size = next(iter(torch.distributed.rendezvous("env://", rank, size, timeout=COLLECTIVE_LIMIT)))
            group = torch.distributed.PrefixStore("group", store)
            if on_gpu:
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            torch.distributed.init_process_group(
                "nccl" if on_gpu else "gloo", store=group, rank=rank, world_size=size, timeout=COLLECTIVE_LIMIT
            )
            leave_process_group_at_exit()
            gloo = torch.distributed.new_group(backend="gloo", timeout=COLLECTIVE_LIMIT) if on_gpu else None
        except (RuntimeError, ValueError, KeyError) as error:
            raise BackendError(f"rank {rank} of {size} cannot reach the trainer's other ranks: {str(error).splitlines()[0]}") from error
        return cls(rank, size, torch.distributed.PrefixStore("messages", store), gloo)

    def send(self, rank: int, **message: Any) -> None:
        """Send one rank a message; `do` names its command."""
        self.store.set(self._next(f"to-{rank}"), json.dumps(message))

    def broadcast(self, **message: Any) -> None:
        """Send every other rank the same message."""
        for rank in range(1, self.size):
            self.send(rank, **message)

    def receive(self) -> dict[str, Any]:
        """Wait for rank 0's next message. Raises `BackendError` if rank 0 has exited."""
        return dict(self._take(f"to-{self.rank}"))

    def reply(self, value: Any) -> None:
        self.store.set(self._next(f"from-{self.rank}"), json.dumps(value))

    def replies(self) -> list[Any]:
        """Wait for one reply of every other rank, in the order of ranks."""
        return [self._take(f"from-{rank}") for rank in range(1, self.size)]

    def send_tensors(self, tensors: Iterable[TensorBytes]) -> Iterator[TensorBytes]:
        """Broadcast tensors to every other rank and yield each; must be iterated to the end."""
        for tensor in tensors:
            self.broadcast(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape)
            self._broadcast(from_bytes(tensor))
            yield tensor
        self.broadcast(name=None)

    def receive_tensors(self) -> Iterator[TensorBytes]:
        """Yield the tensors that rank 0 sends by `send_tensors`."""
        while (header := self.receive())["name"] is not None:
            tensor = torch.empty(header["shape"], dtype=getattr(torch, header["dtype"]))
            self._broadcast(tensor)
            yield tensor_bytes(header["name"], tensor)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            torch.distributed.broadcast(tensor.reshape(-1).view(torch.uint8), src=0, group=self._gloo)

    def _next(self, queue: str) -> str:
        self._numbers[queue] += 1
        return f"{queue}/{self._numbers[queue]}"

    def _take(self, queue: str) -> Any:
        """Wait for the next message of a queue, delete and return it. Raises `BackendError` if the store's process has exited."""
        key = self._next(queue)
        try:
            self.store.wait([key], PATIENCE)
            text = self.store.get(key)
            self.store.delete_key(key)
        except RuntimeError as error:
            raise BackendError(f"rank {self.rank} lost the trainer's other ranks; see their logs ({str(error).splitlines()[0]})") from error
        return json.loads(text)
