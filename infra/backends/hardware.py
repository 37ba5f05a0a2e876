"""This machine: processor, memory, NVIDIA GPUs and driver; peak FLOP/s of devices, and FLOPs of training a model for its utilisation (MFU).

FLOPs are what the model needs, as in PaLM (arXiv 2204.02311, appendix B): no padding and no recomputation.

`python -m penstock.infra.backends.hardware LOCK` checks the driver for the CUDA packages of a lock file. It needs no installed package:
`make gpu` runs it first.
"""

import ctypes
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.infra.errors import ConfigError

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})
"""Linux's names of instructions that multiply bfloat16: AVX512-BF16, AMX, AVX-NE-CONVERT; on ARM bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """A machine's processor."""

    cores: int
    """Cores that this process may use: those of its CPU affinity, and no more than its cgroups' quota."""
    bfloat16: bool
    """True if it has instructions that multiply bfloat16; without them bfloat16 is slower than float32."""
    vendor: str = "unknown"
    """Libraries choose their matrix multiplication by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of memory of a process: the machine's, or what a limit of its container or Slurm job leaves of them."""

    total: int
    available: int
    """Without those that others use; files that the system has cached are available."""


def this_memory() -> Memory:
    """Return the memory of this process: the machine's, or the lowest limit of its cgroups."""
    import psutil

    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for folder in _cgroups("memory"):
        limit, used = _words(folder, "memory.max", "memory.limit_in_bytes"), _words(folder, "memory.current", "memory.usage_in_bytes")
        if used and limit and limit[0].isdecimal():
            words = _words(folder, "memory.stat")
            usage = dict(zip(words[::2], map(int, words[1::2]), strict=True))
            cached = usage.get("total_inactive_file", usage.get("inactive_file", 0))
            total, available = min(total, int(limit[0])), min(available, max(0, int(limit[0]) - int(used[0]) + cached))
    return Memory(total=total, available=available)


def _cgroups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroups with this controller, from its own to the root, in either version of cgroups.

    If a container has no namespace of cgroups, only the root exists of the folders that the kernel names: it is the container's own.
    """
    for line in OWN_CGROUPS.read_text(encoding="utf-8").splitlines() if OWN_CGROUPS.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = CGROUPS / controller if controllers else CGROUPS
            own = root / path.lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def _words(folder: Path, *names: str) -> list[str]:
    """Return the words of those of the files that exist."""
    return [word for name in names if (folder / name).is_file() for word in (folder / name).read_text(encoding="utf-8").split()]


def this_cpu() -> Cpu:
    """Return this machine's processor, with the cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroups("cpu"):
        with suppress(ValueError):  # "max" if there is no limit
            quota, period = map(int, _words(folder, "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"))
            cores = min(cores, math.ceil(quota / period)) if quota > 0 else cores
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    return described(text, cores=cores)


def described(cpuinfo: str, *, cores: int) -> Cpu:
    """Return the processor that a text in the format of `/proc/cpuinfo` describes.

        Example:
            described("vendor_id : GenuineIntel
    flags : fpu avx512f avx512_bf16", cores=2)
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
"""Part of a device's name -> dense bfloat16 TFLOP/s with float32 sums, from its data sheet; the first match is used."""


def peak_flops(device: str, *, dtype: str, tf32: bool, configured_tflops: float | None) -> float | None:
    """Return the peak FLOP/s of a device in this arithmetic; None if unknown."""
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
    """Parameters of those that have a gradient."""
    attention: int
    """Layers x heads x channels of a head."""

    @classmethod
    def of_model(cls, model: Any) -> "FlopCount":
        """Return the count of a model; zeros for a mixture of experts, in which a token uses only some of the parameters."""
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
        """Return FLOPs for sequences of these lengths; with shared prompts only `computed` of their tokens pass through the model."""
        real = sum(lengths)
        if not real:
            return 0.0
        linear = (4.0 * self.parameters + 2.0 * self.trained) * real
        return (linear + 12.0 * self.attention * float(sum(length * length for length in lengths))) * min(1.0, computed / real)


VISIBLE = "CUDA_VISIBLE_DEVICES"
MEMORY = "PENSTOCK_GPU_MEMORY_GB"
"""Environment variable with the memory of the GPUs in GiB, one number or one for each, to plan a run for other GPUs."""
GIB = 2**30
DRIVER_FILE = Path("/proc/driver/nvidia/version")
DRIVER_QUERY = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
MIN_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA release -> oldest driver branch that runs its programs ("CUDA compatibility" in NVIDIA's release notes)."""


def visible_gpus() -> tuple[str, ...]:
    """Return this machine's GPUs: those in CUDA_VISIBLE_DEVICES, else the numbers of the NVIDIA devices; possibly none."""
    chosen = os.environ.get(VISIBLE)
    if chosen is not None:
        return tuple(part.strip() for part in chosen.split(",") if part.strip() and part.strip() != "-1")
    count = sum(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia[0-9]*"))
    return tuple(map(str, range(count)))


def gpu_memory(gpus: Sequence[str]) -> tuple[int, ...]:
    """Return bytes of memory of each GPU, from `PENSTOCK_GPU_MEMORY_GB` or the driver; empty if unknown. Raises `ConfigError`."""
    text = os.environ.get(MEMORY, "")
    try:
        sizes = [int(float(word) * GIB) for word in text.split(",") if word.strip()]
    except (ValueError, OverflowError):
        sizes = [0]
    if text and (min(sizes, default=0) <= 0 or len(sizes) not in (1, len(gpus))):
        raise ConfigError(f"{MEMORY}: {text!r}; expected GiB of memory, one number or one for each of {len(gpus)} GPUs")
    return tuple(sizes * len(gpus))[: len(gpus)] if sizes else _driver_memory(gpus)


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`, in bytes."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def _driver_memory(gpus: Sequence[str]) -> tuple[int, ...]:
    """Return each GPU's total memory by NVML, which comes with the driver; empty if NVML does not find a GPU."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    sizes = []
    for gpu in gpus if not nvml.nvmlInit_v2() else ():
        device, memory = ctypes.c_void_p(), _Memory()
        by_number = (nvml.nvmlDeviceGetHandleByIndex_v2, int(gpu)) if gpu.isdigit() else (nvml.nvmlDeviceGetHandleByUUID, gpu.encode())
        if by_number[0](by_number[1], ctypes.byref(device)) or nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
            return ()
        sizes.append(int(memory.total))
    return tuple(sizes)


def driver_version(file: Path = DRIVER_FILE, query: Sequence[str] = DRIVER_QUERY) -> str | None:
    """Return the version of the loaded driver, such as "580.159.04"; None without one. `query` is for WSL, which has no `file`."""
    text = ""
    with suppress(OSError, subprocess.TimeoutExpired):
        text = file.read_text() if file.exists() else subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout
    version = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return version and version[0]


def library_cuda(name: str = "libcuda.so.1") -> int:
    """Return the newest CUDA release of the driver's library, 0 without it; NVIDIA's forward-compatibility package has a newer one."""
    version = ctypes.c_int(0)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000


def torch_cuda() -> str | None:
    """Return the CUDA release of the installed torch, such as "13.0", without importing it; None without torch or for another device."""
    spec = find_spec("torch")
    file = Path(spec.origin or "").with_name("version.py") if spec else Path()
    release = re.search(r"^cuda\b.*'([\d.]+)'", file.read_text(encoding="utf-8"), re.MULTILINE) if file.is_file() else None
    return release and release[1]


def driver_problem(cuda: str, driver: str | None, library: int = 0) -> str | None:
    """Return why programs for a CUDA release cannot run with this driver, and the remedy; None if they can.

    Example:
        driver_problem("13.0", "570.86.15")
        # -> "driver 570.86.15 is too old for CUDA 13: install 580 or newer, or NVIDIA's forward-compatibility package"
    """
    release = int(cuda.partition(".")[0])
    required = MIN_DRIVER.get(release, max(MIN_DRIVER.values()))
    if driver is None:
        return f"no NVIDIA driver is loaded here: install {required} or newer; in a container, start it with access to the GPUs"
    if int(driver.partition(".")[0]) < required and library < release:
        return f"driver {driver} is too old for CUDA {release}: install {required} or newer, or NVIDIA's forward-compatibility package"
    return None


def _main(lock: str, file: str = str(DRIVER_FILE)) -> int:
    """Print a problem of the driver with the CUDA packages of a lock file; return 1 if there is one, else 0."""
    pin = re.search(r"^nvidia-cuda-runtime==(\S+)", Path(lock).read_text(encoding="utf-8"), re.MULTILINE)
    problem = driver_problem(pin[1] if pin else "0", driver_version(Path(file)), library_cuda())
    if problem:
        print(f"penstock: {problem}", file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
