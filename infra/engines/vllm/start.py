"""Starts vLLM's engine, in this process or its own, and restores this process's state.

Afterwards the process has the configured thread count, and its random generators, memory policy and environment are unchanged.
"""

import contextlib
import ctypes
import gc
import os
import platform
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.infra.engines.unused_packages import left_out
from penstock.infra.engines.vllm.watch import OWNER, SCRATCH
from penstock.infra.errors import EngineError

QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}
"""Defaults of environment variables: no progress bars in the worker's output, no usage statistics sent."""

LONGEST_DIRECTORY = 45
"""Characters: a socket's path has at most 107, of which its name and that of the engine's directory take 60."""

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Machine -> number of the system call."""


def start_vllm(arguments: Mapping[str, Any], *, threads: int, engine_process: bool, on_cpu: bool) -> tuple[Any, Path]:
    """vLLM's `LLMEngine` and the directory of its temporary files, which its owner removes. Raises `EngineError`."""
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
    scratch = Path(tempfile.mkdtemp(prefix="penstock-vllm-", dir=_short(tempfile.gettempdir())))
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with left_out():
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            import penstock.infra.engines.vllm.transfer  # noqa: F401  registers its backend before the model is loaded

        gc.freeze()  # vLLM collects garbage five times during its start, each time over a million imported objects
        return LLMEngine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=engine_process)


def _short(directory: str) -> str:
    """The directory, or /tmp if vLLM's sockets in it would have longer paths than the kernel allows."""
    return directory if len(directory) <= LONGEST_DIRECTORY else "/tmp"


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


def translated(error: Exception, arguments: Mapping[str, Any]) -> EngineError:
    """The error of vLLM's start as one line with advice."""
    words = one_line(error)
    if "KV cache" in words or "cache blocks" in words:
        advice = "raise rollout.vllm.gpu_memory_utilization or rollout.vllm.kv_cache_memory_bytes, or lower rollout.vllm.max_model_len"
        return EngineError(f"vLLM has too little memory for keys and values: {advice} (now {arguments.get('max_model_len')}) ({words})")
    if "available memory" in words.lower() or "out of memory" in words.lower():
        return EngineError(f"vLLM has too little memory: lower rollout.vllm.gpu_memory_utilization or take a smaller model ({words})")
    return EngineError(f"vLLM cannot start with the model in {arguments.get('model')}: {words}")


def one_line(error: BaseException) -> str:
    """Type and message of an error on one line of at most 400 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
