"""Creates a run: checks everything a user can get wrong, then registers the run and makes its topics."""

import json
import os
import re
import secrets
import subprocess
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from penstock.infra.errors import PenstockError
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Log
from penstock.pipeline.agents.environments.sources import check_source
from penstock.pipeline.config.fields import pinned
from penstock.pipeline.config.load import Config, ConfigError, to_json, with_values
from penstock.pipeline.config.plugins import PluginError, one_line
from penstock.pipeline.data.read_files import Row
from penstock.pipeline.data.run_data import open_data, open_eval_data
from penstock.pipeline.data.tokenization import digests
from penstock.pipeline.launch.check.changes import digests_of
from penstock.pipeline.launch.check.rows import RowReader, endless_warning
from penstock.pipeline.learner.micro_batches import TokenSequence, advantage_function, pack
from penstock.pipeline.runtime.registration.run_registry import find, make_key, usable, write
from penstock.pipeline.scheduling.rules import versions_of
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, TopicSpec, topics_of
from penstock.topics.runs import RunRecord

LENGTHS = (3, 1, 2)
"""Trained tokens of the synthetic samples; the rows differ in length."""


def create(
    config: Config,
    *,
    log: Log,
    run_id: str | None = None,
    notify: Callable[[str], None] = print,
    checked: Mapping[str, Any] | None = None,
    about: Mapping[str, Any] | None = None,
) -> RunRecord:
    """Check data and model, create the run's key and topics, and register the run; starts nothing. `about` extends the run's info.

    `checked` is the info that `check_inputs` has returned, where it has been called. Raises `ConfigError`: the id is taken or malformed, or
    sizes do not fit the model's context. Raises `PenstockError`: data or model cannot be used; one line, for data with file and line.
    """
    config = with_values(config, "model", path=pinned(config.model.path))
    info = {**(check_inputs(config, notify=notify)[0] if checked is None else checked), **(about or {})}
    run = usable(run_id or new_id(config))
    for warning in log.create_topics({RUNS_TOPIC: RUNS_SPEC}, copies=config.kafka.copies):
        notify(f"warning: {warning}")
    if find(log, run) is not None:
        raise ConfigError(f"run {run!r} already exists; choose another --run-id, or continue it with `penstock run --resume {run}`")
    log.create_topics(specs_of(config, run), copies=config.kafka.copies)
    make_key(run)
    now = time.time_ns()
    record = RunRecord(run=run, status="created", config=to_json(config), info=json.dumps(info), created_ns=now, updated_ns=now)
    write(log, record)
    return record


def specs_of(config: Config, run: str) -> dict[str, TopicSpec]:
    """Kafka name -> specification of each topic that a run with this configuration needs, without the register of runs."""
    return topics_of(
        run, partitions=config.partitions, weight_partitions=config.weight_partitions, weight_segment_bytes=config.weight_segment_bytes,
        sample_segment_bytes=config.sample_segment_bytes, turns=config.turns_by_log,
    )  # fmt: skip


def require_topics(config: Config, run: str, log: KafkaLog, *, notify: Callable[[str], None]) -> None:
    """Raise `ConfigError` unless all topics exist as the run needs them; `notify` gets a line for each other one."""
    if problems := log.problems_of({RUNS_TOPIC: RUNS_SPEC, **specs_of(config, run)}, copies=config.kafka.copies):
        notify("\n".join(problems))
        raise ConfigError(f"--topics existing: {len(problems)} topics of {run} are missing or differ; see the lines above")


def new_id(config: Config) -> str:
    """A run id that no other run has yet."""
    slug = re.sub(r"[^a-z0-9]+", "-", config.run.name.lower()).strip("-")[:32] or "run"
    return f"{slug}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def check_inputs(config: Config, *, notify: Callable[[str], None] = print) -> tuple[dict[str, Any], list[Row], list[Row]]:
    """Check data, model and user functions; return the run's info (rows, steps, digests) and rows to try the reward functions on.

    These are the first row of each kind, and further rows at equal distances in the data.

    Raises what `create` raises; `notify` gets warnings.
    """
    data, model = config.data, config.model_directory
    try:
        model_digests = digests(model, chat_template=data.chat_template)
        model_config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        _check_architecture(model_config, directory=model)
        context = model_config.get("max_position_embeddings")
        notify(f"checking the prompts of {', '.join(config.data_sources)}")
        reader = RowReader(config, notify=notify)
        dataset, held_out_sets = open_data(config), open_eval_data(config)
        reader.read(dataset)
        dataset.order(config)
        if config.environment.source is not None:
            reward_functions = (config.reward.functions, config.eval_reward.functions, *data.rewards.values())
            check_source(config.environment.source, rewards=reward_functions)
        reader.read_held_out(held_out_sets)
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise PenstockError(str(error)) from error
    for warning in (reader.replaced_warning(), endless_warning(config, model_digests["stop_ids"], reader.renderer)):
        if warning:
            notify(f"warning: {warning}")
    check_user_functions(config)
    rows, steps = len(dataset), config.steps(len(dataset))
    _check_length(config, rows=rows, steps=steps, notify=notify)
    longest = data.max_prompt_tokens + config.sampling.max_new_tokens
    if context is not None and config.sampling.max_new_tokens >= context:
        raise ConfigError(f"sampling.max_new_tokens = {config.sampling.max_new_tokens} exceeds the model's context of {context} tokens")
    if context is not None and longest > context:
        raise ConfigError(
            f"data.max_prompt_tokens = {data.max_prompt_tokens} and sampling.max_new_tokens = {config.sampling.max_new_tokens}: "
            f"together they exceed the model's context of {context} tokens; lower one of them"
        )
    _warn(config, steps, notify)
    if config.mlflow.enabled and find_spec("mlflow") is None:
        notify("MLflow is not installed: metrics are written to metrics.jsonl only; pip install '.[tracking]' in the checkout adds it")
    install = {"install_s": float(os.environ["PENSTOCK_INSTALL_S"])} if os.environ.get("PENSTOCK_INSTALL_S") else {}
    info = {
        **install,
        **digests_of(config, dataset.sources, held_out_sets),
        "rows": rows,
        "steps": steps,
        "prompts": config.prompts(rows),
        "versions": versions_of(steps, steps_per_version=config.schedule.steps_per_version),
        "digests": model_digests,
        "git": git_revision(),
    }
    return info, reader.kinds, reader.spread


def _check_architecture(config: Mapping[str, Any], *, directory: Path) -> None:
    """Raise `ConfigError` for a model that workers could not load, by its `config.json`: not a causal LM, or quantised."""
    names = config.get("architectures") or ()
    decoder = any(str(name).endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for name in names)
    if config.get("is_encoder_decoder") or (names and not decoder):
        raise ConfigError(
            f"model.path: the model in {directory} is {', '.join(map(str, names)) or 'an encoder and decoder'}, no causal language model; "
            "use a model whose architectures in config.json end in ForCausalLM"
        )
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "") if isinstance(quantised, Mapping) else quantised
        raise ConfigError(f"model.path: the model in {directory} is quantised ({method}) and cannot be trained; use the unquantised model")


def _check_length(config: Config, *, rows: int, steps: int, notify: Callable[[str], None]) -> None:
    """Raise `ConfigError` if the run is too short for its warm-up or for a step; warn if a step repeats rows or prompts remain."""
    epochs, prompts, warmup = config.run.epochs, config.schedule.prompts_per_step, config.trainer.warmup_steps
    total = None if epochs is None else int(epochs * rows)
    if warmup > steps:
        raise ConfigError(f"trainer.warmup_steps = {warmup}: the run has {steps} steps, so trainer.lr is never reached; set up to {steps}")
    if total is not None and total < prompts:
        lower = f"lower schedule.prompts_per_step = {prompts} to {total}, or set" if total else "raise run.epochs, or set"
        raise ConfigError(f"run.epochs = {epochs:g}: {rows} rows yield {total} prompts, fewer than one step needs; {lower} run.steps")
    if total is not None and total % prompts:
        rest = total % prompts
        notify(f"run.epochs = {epochs:g}: {total} prompts make {steps} steps of {prompts}; the remaining {rest} are not trained on")
    if rows < prompts:
        notify(f"warning: the data has fewer rows ({rows}) than schedule.prompts_per_step ({prompts}): a step trains on a row repeatedly")


def _warn(config: Config, steps: int, notify: Callable[[str], None]) -> None:
    """Warn if a sample may be longer than a micro-batch, or if the run may end before its learning-rate schedule."""
    completion, budget = config.sampling.max_new_tokens, config.trainer.micro_batch_tokens
    longest = config.environment.max_tokens if config.environment.source is not None else config.data.max_prompt_tokens + completion
    if longest > budget:
        notify(
            f"trainer.micro_batch_tokens = {budget}: a sample may have {longest} tokens with its prompt; a sample longer than a "
            "micro-batch forms one alone, regardless of its memory"
        )
    if config.run.epochs is not None and config.trainer.lr_schedule != "constant" and config.algorithm.filter_zero_variance:
        notify(
            f"trainer.lr_schedule = {config.trainer.lr_schedule!r} spans {steps} steps, but under run.epochs filtered groups are not "
            "replaced: the run may end earlier, at a higher learning rate; run.steps fixes the number of steps"
        )


def git_revision() -> str | None:
    """Git revision of the working directory, marked if it has changes; None outside of a checkout."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() or None


def check_user_functions(config: Config) -> None:
    """Try the advantage on the rewards of one group, and a user's loss on a synthetic micro-batch. Raises `ConfigError`."""
    for key, name, attempt in (
        ("algorithm.advantage", config.advantage, _try_advantage),
        ("algorithm.loss", config.algorithm.loss, _try_loss),
    ):
        if key == "algorithm.loss" and ":" not in name:
            continue
        try:
            mistake = attempt(config)
        except PluginError as error:
            raise ConfigError(f"{key}: {error}") from error
        except Exception as error:  # a user's function may raise anything
            raise ConfigError(f"{key}: {name} raises an error on synthetic samples: {one_line(error)}") from error
        if mistake:
            raise ConfigError(f"{key}: {name} {' '.join(mistake.split())}")


def _try_advantage(config: Config) -> str | None:
    """The mistake of the advantage function on the rewards of one group; None if it has none."""
    count = config.schedule.samples_per_prompt
    advantages = np.asarray(advantage_function(config.advantage, trust_code=True)(np.linspace(0.0, 1.0, count)), np.float64)
    if advantages.shape != (count,) or not np.isfinite(advantages).all():
        return f"returned {advantages.tolist()} for {count} rewards, expected {count} finite numbers"
    return None


def _try_loss(config: Config) -> str | None:
    """The mistake of a user's loss on a synthetic micro-batch; None if it has none."""
    import torch

    from penstock.pipeline.learner.train_step import Objective

    objective = Objective.of(config)
    batch = pack([_sequence(number, tokens) for number, tokens in enumerate(LENGTHS)])
    logprobs = torch.tensor(batch.behaviour_logprobs - 0.01, requires_grad=True)
    proximal = None if objective.proximal == "current" else batch.behaviour_logprobs
    inputs: dict[str, Any] = {"reference": batch.behaviour_logprobs} if objective.kl_coef else {}
    if config.algorithm.entropy_coef:
        inputs["entropies"] = -logprobs
    returned: Any = objective.batch_loss(logprobs, batch, proximal=proximal, **inputs)
    if not (isinstance(returned, tuple) and len(returned) == 2):
        return f"returned a {type(returned).__name__}, expected (loss sum, statistics)"
    loss, stats = returned
    if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.requires_grad:
        return "returned a loss without a gradient: expected the sum over the trained tokens, a scalar tensor computed from logprobs"
    if not isinstance(stats, dict) or not all(isinstance(value, int | float) for value in stats.values()):
        return f"returned the statistics {stats!r}, expected a dict of name to number"
    loss.backward()  # type: ignore[no-untyped-call]
    gradient = logprobs.grad
    if gradient is None or not bool(torch.isfinite(gradient).all()) or not bool(torch.isfinite(loss)):
        return f"returned the loss {float(loss.detach())} with a gradient that is missing or not finite"
    if bool(gradient[~torch.as_tensor(batch.completion_mask)].any()):
        return "returned a loss with a gradient for prompt or padding tokens: multiply token losses by batch.completion_mask"
    return None


def _sequence(number: int, tokens: int) -> TokenSequence:
    """A synthetic sequence with this number of trained tokens, for the trial of a loss."""
    return TokenSequence(
        group=0, sample=number, prompt_ids=np.array([1, 2], np.int32), completion_ids=np.arange(3, 3 + tokens, dtype=np.int32),
        behaviour_logprobs=np.linspace(-1.0, -2.0, tokens, dtype=np.float32), loss_mask=np.ones(tokens, np.bool_),
        advantage=(1.0, -1.0, 0.5)[number],
    )  # fmt: skip
