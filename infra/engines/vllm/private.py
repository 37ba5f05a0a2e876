"""vLLM's undocumented parts that Penstock uses, all looked up when an engine starts, so that another release fails with their names."""

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from penstock.infra.errors import EngineError

IN_MODULES = (
    "vllm.distributed.weight_transfer.base:WeightTransferEngine",
    "vllm.distributed.weight_transfer.base:WeightTransferInitInfo",
    "vllm.distributed.weight_transfer.base:WeightTransferUpdateInfo",
    "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory._registry",
    "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory.register_engine",
    "vllm.model_executor.model_loader.reload:finalize_layerwise_reload",
    "vllm.model_executor.model_loader.reload:initialize_layerwise_reload",
    "vllm.outputs:CompletionOutput.weight_versions",
    "vllm.v1.engine:FinishReason.ABORT",
    "vllm.v1.engine.core:EngineCore.pause_scheduler",
    "vllm.v1.engine.core:EngineCore.resume_scheduler",
    "vllm.v1.engine.core_client:SyncMPClient.call_utility",
    "vllm.v1.engine.llm_engine:LLMEngine.set_weight_version",
    "vllm.v1.engine.output_processor:RequestState.make_request_output",
    "vllm.v1.metrics.stats:SchedulerStats.kv_cache_usage",
    "vllm.v1.metrics.stats:SchedulerStats.num_running_reqs",
    "vllm.v1.metrics.stats:SchedulerStats.prefix_cache_stats",
)
IN_AN_ENGINE = (
    "engine_core.shutdown", "engine_core.sleep", "engine_core.wake_up", "logger_manager", "output_processor.log_stats",
    "output_processor.request_states", "vllm_config.model_config.hf_config", "vllm_config.parallel_config.world_size",
)  # fmt: skip
IN_THIS_PROCESS = ("engine_core.engine_core.pause_scheduler", "engine_core.engine_core.resume_scheduler")
IN_ITS_OWN = (
    "engine_core.call_utility", "engine_core.outputs_queue.not_empty", "engine_core.outputs_queue.queue",
    "engine_core.resources.engine_manager.processes", "engine_core.utility_results",
)  # fmt: skip


def check_modules() -> None:
    """Import vLLM and raise `EngineError` with all undocumented parts that the installed release lacks."""
    missing = []
    for part in IN_MODULES:
        module, _, path = part.partition(":")
        try:
            owner: Any = import_module(module)
        except ImportError:
            missing.append(module)
        else:
            missing += [part] if _lacks(owner, path) else []
    _refuse(missing)


def check_engine(engine: Any, *, own_process: bool) -> None:
    """Raise `EngineError` with all undocumented parts that a running `LLMEngine` lacks."""
    _refuse(path for path in (*IN_AN_ENGINE, *(IN_ITS_OWN if own_process else IN_THIS_PROCESS)) if _lacks(engine, path))


def _lacks(owner: Any, path: str) -> bool:
    """Return True if an attribute of the dotted `path` from `owner` is missing."""
    for name in path.split("."):
        if not hasattr(owner, name):
            return name not in getattr(owner, "__dataclass_fields__", ())  # a field without a default is no attribute of its class
        owner = getattr(owner, name)
    return False


def _refuse(missing: Iterable[str]) -> None:
    if names := ", ".join(missing):
        raise EngineError(f"vLLM {_version()} lacks {names}, which Penstock uses: install vLLM 0.32")


def _version() -> str:
    return str(getattr(sys.modules.get("vllm"), "__version__", "of an unknown version"))
