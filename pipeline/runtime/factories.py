"""Opens the engine, the backend and the checkpoints of a configuration."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from penstock.infra.backends.base import Backend
from penstock.infra.backends.registry import BACKENDS, open_backend
from penstock.infra.checkpoints import CheckpointStore
from penstock.infra.engines.base import Engine, EngineSettings
from penstock.infra.engines.shared_device import SharedDevice
from penstock.infra.errors import EngineError
from penstock.infra.paths import run_directory
from penstock.pipeline.agents.driver import Limits
from penstock.pipeline.agents.engine import TrajectoryEngine
from penstock.pipeline.config.load import Config, ConfigError
from penstock.pipeline.data.conversation.messages import Template
from penstock.pipeline.data.conversation.template import template_of
from penstock.pipeline.data.tokenization import digests

_LOADING = threading.Lock()
"""A process loads one model at a time, because transformers changes global state while it loads."""


@contextmanager
def _mistakes() -> Iterator[None]:
    """In the block, turn the rejection of settings by an engine or a backend into `ConfigError`."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_engine(config: Config) -> None:
    """Raise `ConfigError` if the engine cannot be opened on this machine; does not open it."""
    settings = _settings_of(config, sleeps=config.colocated)
    if config.trainer.gpus and not config.rollout.gpus_per_worker and not config.colocated and settings.device == "auto":
        settings = replace(settings, device="cpu")  # the trainer has all GPUs that the run has
    try:
        config.engine.check(settings)
    except EngineError as error:
        raise ConfigError(str(error)) from error


def make_engine(config: Config, *, episodes: bool = True, sleeps: bool = False) -> Engine:
    """Open the engine with the initial model, wrapped by `with_environments` if the run has an environment and `episodes`.

    `sleeps`: it must be able to free its device's memory while other processes use it. Raises `EngineError`, `ConfigError`.
    """
    with _LOADING, _mistakes():
        engine = config.engine.open(_settings_of(config, sleeps=sleeps))
    return engine if config.environment.source is None or not episodes else with_environments(engine, config)


def with_environments(engine: Engine, config: Config, *, notify: Callable[[str], None] = lambda _: None) -> TrajectoryEngine:
    """Wrap an engine so that each sample is a multi-turn episode."""
    chosen = config.environment
    assert chosen.source is not None
    return TrajectoryEngine(
        engine, source=chosen.source, template=template_for(config), limits=limits_of(config), processes=chosen.processes,
        in_flight=chosen.in_flight, rules=chosen.rules(), notify=notify,
    )  # fmt: skip


def limits_of(config: Config) -> Limits:
    """The limits of an episode in turns, tokens and seconds, from `[environment]` and `[sampling]`."""
    chosen = config.environment
    return Limits(
        max_turns=chosen.max_turns, turn_tokens=config.sampling.max_new_tokens, trajectory_tokens=chosen.max_tokens,
        reset_timeout_s=chosen.reset_timeout_s, step_timeout_s=chosen.step_timeout_s, trajectory_timeout_s=chosen.trajectory_timeout_s,
        retries=chosen.retries, replay=chosen.resume == "replay", history=chosen.history, result_tokens=chosen.max_result_tokens,
    )  # fmt: skip


def template_for(config: Config) -> Template:
    """The chat template with which the turns of an episode are rendered."""
    data, path = config.data, config.model_directory
    stop_ids = digests(path, chat_template=data.chat_template)["stop_ids"]
    return template_of(path, chat_template=data.chat_template, stop_ids=stop_ids, arguments=data.template_arguments)


def _settings_of(config: Config, *, sleeps: bool) -> EngineSettings:
    """The settings with which the rollout engine is opened; `sleeps`: it must be able to free its device's memory."""
    rollout = config.rollout
    completion = config.data.max_prompt_tokens + max(config.sampling.max_new_tokens, config.eval.max_new_tokens or 0)
    return EngineSettings(
        directory=config.model_directory, dtype=rollout.dtype, float32_head=config.model.float32_head, device=rollout.device,
        threads=rollout.threads, seed=config.run.seed, concurrency=rollout.concurrency,
        longest=config.environment.max_tokens if config.environment.source is not None else completion, kv_cache=rollout.kv_cache,
        engine_process=rollout.engine_process, arguments=rollout.vllm, delay_s=rollout.toy_delay_s, top_k=config.sampling.top_k,
        stops_at_text=bool(config.sampling.stop), sleeps=sleeps,
    )  # fmt: skip


def make_backend(config: Config, *, steps: int) -> Backend:
    """A backend with the model in `model.path` and a learning rate schedule over the run's `steps`. Raises `BackendError`."""
    chosen = config.trainer
    own = {key: getattr(chosen, key) for key in BACKENDS[chosen.backend].own}
    with _LOADING, _mistakes():
        return open_backend(
            chosen.backend, model_path=str(config.model_directory), lr=chosen.lr, dtype=chosen.dtype, device=chosen.device,
            float32_head=config.model.float32_head, betas=(chosen.betas[0], chosen.betas[1]), weight_decay=chosen.weight_decay,
            lr_schedule=chosen.lr_schedule, warmup_steps=chosen.warmup_steps, total_steps=chosen.initial_steps + steps,
            max_grad_norm=chosen.max_grad_norm, threads=chosen.threads, deterministic=chosen.deterministic, tf32=chosen.tf32,
            seed=config.run.seed, gradient_checkpointing=chosen.gradient_checkpointing, compile=chosen.compile,
            offload_activations=chosen.offload_activations,
            share_prompts=chosen.share_prompts, lora_rank=chosen.lora_rank, lora_alpha=chosen.lora_alpha,
            reference=config.algorithm.kl_coef > 0, reference_path=config.algorithm.reference, snapshot=config.proximal == "snapshot",
            entropy=True, entropy_bonus=config.algorithm.entropy_coef > 0, peak_tflops=chosen.peak_tflops,
            value_lr=config.algorithm.value_lr, share_weights=config.weights.transport == "ipc", **own,
        )  # fmt: skip


def open_device(config: Config, run: str) -> SharedDevice | None:
    """The run's device, shared by processes of this machine; None if each has its own."""
    return SharedDevice(run_directory(run) / "device") if config.colocated else None


def open_store(config: Config, run: str, *, to_read: bool = False) -> CheckpointStore | None:
    """The checkpoints of a run; None if it writes none. `to_read` ignores an unfinished one. Raises `CheckpointError`."""
    chosen = config.trainer
    if not chosen.checkpoint_every:
        return None
    directory = Path(chosen.checkpoint_dir) / run if chosen.checkpoint_dir else run_directory(run) / "checkpoints"
    return CheckpointStore(directory, keep_last=chosen.checkpoint_keep_last, keep_every=chosen.checkpoint_keep_every, to_read=to_read)
