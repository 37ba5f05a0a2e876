"""Runs a user's loss and advantage on a synthetic batch before the run is created."""

from typing import Any

import numpy as np

from penstock.infra.errors import ConfigError
from penstock.pipeline.config.plugins import PluginError, one_line
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.learner.training_samples import TokenSequence, advantage_function, pack

LENGTHS = (3, 1, 2)
"""Trained tokens of the synthetic samples; the rows differ in length."""


def check_user_functions(config: Config) -> None:
    """Call the advantage with the rewards of one group, and a user's loss with a synthetic micro-batch. Raises `ConfigError`."""
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
        # A user's function may raise anything.
        except Exception as error:
            raise ConfigError(f"{key}: {name} fails on synthetic samples: {one_line(error)}") from error
        if mistake:
            raise ConfigError(f"{key}: {name} {' '.join(mistake.split())}")


def _try_advantage(config: Config) -> str | None:
    count = config.schedule.samples_per_prompt
    advantages = np.asarray(advantage_function(config.advantage, trust_code=True)(np.linspace(0.0, 1.0, count)), np.float64)
    if advantages.shape != (count,) or not np.isfinite(advantages).all():
        return f"returned {advantages.tolist()} for {count} rewards, expected {count} finite numbers"
    return None


def _try_loss(config: Config) -> str | None:
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
        return "returned no loss to differentiate: expected the sum over the trained tokens, a scalar tensor computed from logprobs"
    if not isinstance(stats, dict) or not all(isinstance(value, int | float) for value in stats.values()):
        return f"returned the statistics {stats!r}, expected a dict of name to number"
    loss.backward()  # type: ignore[no-untyped-call]
    gradient = logprobs.grad
    if gradient is None or not bool(torch.isfinite(gradient).all()) or not bool(torch.isfinite(loss)):
        return f"gave the loss {float(loss.detach())} and a gradient that is missing or not finite"
    if bool(gradient[~torch.as_tensor(batch.completion_mask)].any()):
        return "has a gradient outside of batch.completion_mask, where prompts and padding are"
    return None


def _sequence(number: int, tokens: int) -> TokenSequence:
    return TokenSequence(
        group=0, sample=number, prompt_ids=np.array([1, 2], np.int32), completion_ids=np.arange(3, 3 + tokens, dtype=np.int32),
        behaviour_logprobs=np.linspace(-1.0, -2.0, tokens, dtype=np.float32), loss_mask=np.ones(tokens, np.bool_),
        advantage=(1.0, -1.0, 0.5)[number],
    )  # fmt: skip
