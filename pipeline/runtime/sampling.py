"""Converts a prompt to an engine request, and a completion to the record in `rollouts`.

A token is trained unless it was generated under a version that is too old, or from a distribution that is not recorded.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.infra.engines.base import Completion, GroupRequest, Sampling
from penstock.pipeline.agents.record import EpisodeRequest, Trajectory
from penstock.pipeline.config.load import Config
from penstock.pipeline.config.schema import SamplingSection
from penstock.pipeline.data.references import SOURCE_COLUMN
from penstock.topics.prompts import Prompt
from penstock.topics.rollouts import Rollout

_TRAJECTORY = ("segments", "turns", "messages", "environment", "environment_version", "environment_seed")


def request_of(prompt: Prompt, samples: Sequence[int], *, config: Config, stop_ids: Sequence[int]) -> GroupRequest:
    """Request for these samples of a prompt's group, with the run's sampling settings and seed."""
    chosen = config.sampling_for(source_of(prompt.columns))
    sampling = Sampling(
        temperature=chosen.temperature, top_p=chosen.top_p, top_k=chosen.top_k, max_new_tokens=chosen.max_new_tokens,
        stop_ids=tuple(stop_ids), stop=tuple(chosen.stop), seeded=chosen.seeded,
    )  # fmt: skip
    rows = prompt.samples_per_prompt + config.schedule.oversample
    request = GroupRequest(
        group=prompt.group, prompt_ids=prompt.token_ids, samples=tuple(samples), rows=rows, seed=config.run.seed, sampling=sampling,
        stream=config.data.first_group + prompt.group,
    )  # fmt: skip
    if config.environment.source is None:
        return request
    return episode_request(request, text=prompt.prompt, messages=prompt.messages, columns=json.loads(prompt.columns))


def episode_request(request: GroupRequest, *, text: str, messages: str | None, columns: Mapping[str, Any]) -> EpisodeRequest:
    """Extend a request to one for episodes of an environment, which gets the prompt, its chat messages (JSON) and the row's columns."""
    fields = {name: getattr(request, name) for name in GroupRequest.__dataclass_fields__}
    return EpisodeRequest(**fields, prompt=text, messages=messages, row=columns)


def source_of(columns: str) -> str | None:
    """The source of a prompt in a mixture, from its columns as JSON; None if there is only one source."""
    if f'"{SOURCE_COLUMN}"' not in columns:
        return None
    source: str | None = json.loads(columns).get(SOURCE_COLUMN)
    return source


def rollout_of(completion: Completion, *, sampling: SamplingSection, worker: str, oldest_trained: int = 0) -> Rollout:
    """Convert a completion to a sample; tokens of versions below `oldest_trained` are masked out of the loss."""
    spans = completion.spans
    versions = np.array([span.version for span in spans], np.int32)
    starts = np.array([span.start for span in spans], np.int32)
    tokens = len(completion.token_ids)
    fresh = np.repeat(versions >= oldest_trained, np.diff(starts, append=tokens))
    columns: dict[str, Any] = {}
    if isinstance(completion, Trajectory):
        fresh &= completion.loss_mask
        columns = {name: getattr(completion, name) for name in _TRAJECTORY}
    if completion.support is not None:
        fresh &= (completion.support[:, :1] >= 0).any(1)  # the distribution of a token is not recorded: it cannot be trained
        columns["support"] = completion.support.ravel()
    return Rollout(
        group=completion.group, sample=completion.sample, token_ids=completion.token_ids, behaviour_logprobs=completion.logprobs,
        loss_mask=fresh, span_versions=versions, span_starts=starts, finish=completion.finish, temperature=sampling.temperature,
        top_p=sampling.top_p, top_k=sampling.top_k, started_ns=completion.started_ns, ended_ns=completion.ended_ns, worker=worker,
        **columns,
    )  # fmt: skip
