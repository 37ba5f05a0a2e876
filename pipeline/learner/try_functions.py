"""A user's own loss and advantage, tried on made samples before a run is created.

The rule: what would stop the trainer at its first step is one line while nothing has started yet.
"""

from typing import Any

import numpy as np

from penstock.infra.errors import ConfigError
from penstock.pipeline.config.plugins import PluginError, one_line
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.learner.training_samples import TokenSequence, advantage_function, pack

LENGTHS = (3, 1, 2)
"""Trained tokens of the made samples: rows of a micro-batch differ in length."""


def try_own_functions(config: Config) -> None:
    """Call the advantage with as many rewards as a group has, and an own loss with a made micro-batch. Raises `ConfigError`."""
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
        # The border to a user's function, whatever it raises.
        except Exception as error:
            raise ConfigError(f"{key}: {name} fails on made samples: {one_line(error)}") from error
        if mistake:
            raise ConfigError(f"{key}: {name} {' '.join(mistake.split())}")


def _try_advantage(config: Config) -> str | None:
    count = config.schedule.samples_per_prompt
    found = np.asarray(advantage_function(config.advantage, trust_code=True)(np.linspace(0.0, 1.0, count)), np.float64)
    if found.shape != (count,) or not np.isfinite(found).all():
        return f"returned {found.tolist()} for {count} rewards, expected {count} finite numbers"
    return None


def _try_loss(config: Config) -> str | None:
    import torch

    from penstock.pipeline.learner.train_step import Objective

    objective = Objective.of(config)
    batch = pack([_sequence(number, tokens) for number, tokens in enumerate(LENGTHS)])
    logprobs = torch.tensor(batch.behaviour_logprobs - 0.01, requires_grad=True)
    near = None if objective.proximal == "current" else batch.behaviour_logprobs
    given: dict[str, Any] = {"reference": batch.behaviour_logprobs} if objective.kl_coef else {}
    if config.algorithm.entropy_coef:
        given["entropies"] = -logprobs
    returned: Any = objective.batch_loss(logprobs, batch, proximal=near, **given)
    if not (isinstance(returned, tuple) and len(returned) == 2):
        return f"returned a {type(returned).__name__}, expected (loss sum, statistics)"
    loss, stats = returned
    if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.requires_grad:
        return "returned no loss to differentiate: expected the sum over the trained tokens, a tensor of one number made from logprobs"
    if not isinstance(stats, dict) or not all(isinstance(value, int | float) for value in stats.values()):
        return f"returned the statistics {stats!r}, expected a dict from names to plain numbers"
    loss.backward()  # type: ignore[no-untyped-call]
    gradient = logprobs.grad
    if gradient is None or not bool(torch.isfinite(gradient).all()) or not bool(torch.isfinite(loss)):
        return f"gave the loss {float(loss.detach())} and a gradient that is missing or not finite"
    if bool(gradient[~torch.as_tensor(batch.completion_mask)].any()):
        return "has a gradient outside of batch.completion_mask, where prompts and padding are"
    return None


def _sequence(number: int, tokens: int) -> TokenSequence:
    return TokenSequence(
        group=0,
        sample=number,
        prompt_ids=np.array([1, 2], np.int32),
        completion_ids=np.arange(3, 3 + tokens, dtype=np.int32),
        behaviour_logprobs=np.linspace(-1.0, -2.0, tokens, dtype=np.float32),
        loss_mask=np.ones(tokens, np.bool_),
        advantage=(1.0, -1.0, 0.5)[number],
    )
