"""What the machine can do at most: its GPU and driver, and rates of products and copies."""

import mmap
import os
from collections.abc import Iterator
from functools import partial

import torch

from penstock.gpu_check.figures import Figure, Machine, gigabytes_per_s
from penstock.infra.backends.hardware import MIN_DRIVER, driver_version, peak_flops


def machine(here: Machine) -> Iterator[Figure]:
    """GPU, memory and driver."""
    yield Figure(name="CPU cores", value=len(os.sched_getaffinity(0)))
    if not here.on_gpu:
        return
    properties, (free, total) = torch.cuda.get_device_properties(here.device), torch.cuda.mem_get_info(here.device)
    yield Figure(name="GPU memory", value=total / 1e9, unit="GB")
    yield Figure(name="of which free", value=free / total, at_least=0.95)
    yield Figure(name="multiprocessors", value=properties.multi_processor_count)
    release, branch = int(torch.version.cuda.split(".")[0]), (driver_version() or "0").split(".")[0]
    yield Figure(name=f"driver for CUDA {release}", value=int(branch), at_least=MIN_DRIVER.get(release))


def roofs(here: Machine) -> Iterator[Figure]:
    """Matrix products on the device, copies on it, and between host and device in ordinary, pinned and registered shared memory."""
    side = 8192 if here.on_gpu else 256
    a, b = (torch.randn(side, side, device=here.device, dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * side**3 / here.seconds(lambda: a @ b, repeats=20)
    peak = (
        peak_flops(torch.cuda.get_device_name(here.device), dtype="bfloat16", tf32=False, configured_tflops=None) if here.on_gpu else None
    )
    yield Figure(name="bfloat16 product", value=rate / 1e12, unit="TFLOP/s", at_least=peak and 0.6 * peak / 1e12)
    size = 2**30 if here.on_gpu else 2**20
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=here.device)
    target = torch.empty_like(source)
    yield gigabytes_per_s(name="copy on the device", value=2 * size / here.seconds(lambda: target.copy_(source)) / 1e9)
    shared = mmap.mmap(-1, size)
    hosts = {"ordinary": torch.zeros(size, dtype=torch.uint8), "registered": torch.frombuffer(shared, dtype=torch.uint8)}
    if here.on_gpu:
        hosts["pinned"] = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(hosts["registered"].data_ptr(), size, 0))
    rates = {}
    for name, host in hosts.items():
        out = here.seconds(partial(host.copy_, source, non_blocking=True))
        back = here.seconds(partial(target.copy_, host, non_blocking=True))
        rates[name] = size / out / 1e9, size / back / 1e9
    for name, (out, back) in rates.items():
        least = {"pinned": here.limit(20.0), "registered": 0.9 * rates["pinned"][0] if here.on_gpu else None}.get(name)
        yield gigabytes_per_s(name=f"out to {name} memory", value=out, at_least=least)
        yield gigabytes_per_s(name="and back", value=back, at_least=least and 0.9 * least)
    if here.on_gpu:
        torch.cuda.cudart().cudaHostUnregister(hosts["registered"].data_ptr())
