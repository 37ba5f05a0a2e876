"""NVIDIA GPUs and driver of this machine.

`python -m penstock.infra.backends.nvidia LOCK` checks the driver for the CUDA packages of a lock file. It needs no
installed package: `make gpu` runs it first.
"""

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from penstock.infra.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
MEMORY = "PENSTOCK_GPU_MEMORY_GB"
"""Environment variable with the memory of the GPUs in GiB, one number or one for each, to plan a run for other GPUs."""
GIB = 2**30
DRIVER_FILE = Path("/proc/driver/nvidia/version")
DRIVER_QUERY = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
MIN_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA release -> oldest driver branch that runs its programs ("CUDA compatibility" in NVIDIA's release notes)."""


def visible_gpus() -> tuple[str, ...]:
    """This machine's GPUs: those in CUDA_VISIBLE_DEVICES, else the numbers of the NVIDIA devices; possibly none."""
    chosen = os.environ.get(VISIBLE)
    if chosen is not None:
        return tuple(part.strip() for part in chosen.split(",") if part.strip() and part.strip() != "-1")
    count = sum(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia[0-9]*"))
    return tuple(map(str, range(count)))


def gpu_memory(gpus: Sequence[str]) -> tuple[int, ...]:
    """Bytes of memory of each GPU, from `PENSTOCK_GPU_MEMORY_GB` or the driver; empty if unknown. Raises `ConfigError`."""
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
    """Total memory of each GPU by NVML, which comes with the driver and uses no GPU memory; empty if NVML does not know a GPU."""
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
    """Version of the loaded driver, such as "580.159.04"; None if there is none. `query` is for WSL, which has no `file`."""
    text = ""
    with suppress(OSError, subprocess.TimeoutExpired):
        text = file.read_text() if file.exists() else subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout
    version = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return version and version[0]


def library_cuda(name: str = "libcuda.so.1") -> int:
    """Newest CUDA release that the driver's library supports; 0 without it. NVIDIA's forward-compatibility package brings a newer one."""
    version = ctypes.c_int(0)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000


def torch_cuda() -> str | None:
    """CUDA release of the installed torch, such as "13.0", read without importing it; None without torch or for another device."""
    spec = find_spec("torch")
    file = Path(spec.origin or "").with_name("version.py") if spec else Path()
    release = re.search(r"^cuda\b.*'([\d.]+)'", file.read_text(encoding="utf-8"), re.MULTILINE) if file.is_file() else None
    return release and release[1]


def driver_problem(cuda: str, driver: str | None, library: int = 0) -> str | None:
    """The reason why programs for a CUDA release cannot run with this driver, and the remedy; None if they can.

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
    pin = re.search(r"^nvidia-cuda-runtime==(\S+)", Path(lock).read_text(encoding="utf-8"), re.MULTILINE)
    problem = driver_problem(pin[1] if pin else "0", driver_version(Path(file)), library_cuda())
    if problem:
        print(f"penstock: {problem}", file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
