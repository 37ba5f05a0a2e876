"""Which engine and which backend a configuration names; the heavy ones are imported when they are made.

The rule: one model is loaded at a time in a process, because transformers changes global state while it loads.
"""

import threading
from pathlib import Path

from penstock.infra.backends import Backend, open_backend
from penstock.infra.engines.base import Engine
from penstock.infra.errors import EngineError
from penstock.pipeline.config.load import Config, ConfigError

_LOADING = threading.Lock()


def check_engine(config: Config) -> None:
    """Refuse an engine that cannot be made on this machine, as far as that shows without making it. Raises `ConfigError`."""
    if config.rollout.engine != "vllm":
        return
    from penstock.infra.engines.vllm.arguments import check_installed, engine_arguments
    from penstock.infra.engines.vllm.model_info import read_geometry

    rollout, directory = config.rollout, Path(config.model.path)
    try:
        engine_arguments(
            rollout.vllm,
            directory=directory,
            geometry=read_geometry(directory),
            dtype=rollout.dtype,
            seed=config.run.seed,
            concurrency=rollout.concurrency,
            longest=_longest(config),
            engine_process=rollout.engine_process,
            on_cpu=check_installed(rollout.device),
        )
    except EngineError as error:
        raise ConfigError(str(error)) from error


def make_engine(config: Config) -> Engine:
    """An engine with the initial model loaded. Raises `EngineError`."""
    rollout = config.rollout
    if rollout.engine == "toy":
        from penstock.infra.engines.toy import ToyEngine

        return ToyEngine(delay_s=rollout.toy_delay_s)
    if rollout.engine == "vllm":
        return _vllm_engine(config)
    with _LOADING:
        import torch

        from penstock.infra.engines.transformers.engine import TransformersEngine

        device = ("cuda" if torch.cuda.is_available() else "cpu") if rollout.device == "auto" else rollout.device
        return TransformersEngine(config.model.path, dtype=rollout.dtype, device=device, threads=rollout.threads)


def _vllm_engine(config: Config) -> Engine:
    from penstock.infra.engines.vllm.engine import VllmEngine

    check_engine(config)
    rollout = config.rollout
    with _LOADING:
        return VllmEngine(
            config.model.path,
            dtype=rollout.dtype,
            device=rollout.device,
            threads=rollout.threads,
            concurrency=rollout.concurrency,
            longest=_longest(config),
            kv_cache=rollout.kv_cache,
            engine_process=rollout.engine_process,
            seed=config.run.seed,
            arguments=rollout.vllm,
        )


def _longest(config: Config) -> int:
    """Tokens of the longest prompt with its completion, held-out ones included."""
    return config.data.max_prompt_tokens + max(config.sampling.max_new_tokens, config.eval.max_new_tokens or 0)


def make_backend(config: Config, *, steps: int) -> Backend:
    """A backend with the model in `model.path` and a learning rate schedule over the run's `steps`. Raises `BackendError`."""
    chosen = config.trainer
    own = {"zero_stage": chosen.zero_stage} if chosen.backend == "deepspeed" else {}
    with _LOADING:
        return open_backend(
            chosen.backend,
            model_path=config.model.path,
            lr=chosen.lr,
            dtype=chosen.dtype,
            device=chosen.device,
            betas=(chosen.betas[0], chosen.betas[1]),
            weight_decay=chosen.weight_decay,
            lr_schedule=chosen.lr_schedule,
            warmup_steps=chosen.warmup_steps,
            total_steps=chosen.initial_steps + steps,
            max_grad_norm=chosen.max_grad_norm,
            threads=chosen.threads,
            seed=config.run.seed,
            gradient_checkpointing=chosen.gradient_checkpointing,
            reference=config.algorithm.kl_coef > 0,
            reference_path=config.algorithm.reference,
            snapshot=config.proximal == "snapshot",
            **own,
        )
