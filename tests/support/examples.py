"""One example of each record of a group, in which a test changes the fields that it is about."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.infra.engines.base import Completion, Span
from penstock.topics.groups import Group, ScoredSample
from penstock.topics.prompts import Prompt
from penstock.topics.rollouts import Rollout
from penstock.topics.weights import Manifest


def prompt_of(group: int, **changes: Any) -> Prompt:
    """The prompt of a group, one token long."""
    prompt = Prompt(
        group=group, slot=group, min_version=0, samples_per_prompt=2, epoch=0, row=group, prompt="p", messages=None,
        token_ids=np.array([1], np.int32), columns="{}", created_ns=1,
    )  # fmt: skip
    return replace(prompt, **changes)


def sample_of(group: int, sample: int, token_ids: Sequence[int] | np.ndarray = (1,), *, version: int = 0, **changes: Any) -> Rollout:
    """A sample of one policy version, whose tokens are all in the loss and have the logprob 0."""
    ids = np.array(token_ids, np.int32)
    rollout = Rollout(
        group=group, sample=sample, token_ids=ids, behaviour_logprobs=np.zeros(len(ids), np.float32), loss_mask=np.ones(len(ids), np.bool_),
        span_versions=np.array([version], np.int32), span_starts=np.zeros(1, np.int32), finish="stop", temperature=1.0, top_p=1.0, top_k=0,
        started_ns=1, ended_ns=2, worker="rollout-0",
    )  # fmt: skip
    return replace(rollout, **changes)


def group_of(prompt: Prompt, samples: Sequence[ScoredSample], **changes: Any) -> Group:
    """The scored outcome of a prompt's samples, with one reward function."""
    group = Group(
        group=prompt.group, outcome="scored", reason=None, slot=prompt.slot, min_version=prompt.min_version,
        samples_per_prompt=prompt.samples_per_prompt, epoch=prompt.epoch, row=prompt.row, prompt=prompt.prompt,
        prompt_ids=prompt.token_ids, columns=prompt.columns, reward_names=("exact_match",), reward_weights=(1.0,),
        samples=tuple(samples), created_ns=prompt.created_ns, scored_ns=2,
    )  # fmt: skip
    return replace(group, **changes)


def manifest_of(version: int, **changes: Any) -> Manifest:
    """A full version of one tensor in one chunk of 256 bytes."""
    manifest = Manifest(
        version=version, step=version, encoding="full", base_version=None, digest="d" * 64, nbytes=256, names=("w",), dtypes=("float32",),
        shapes=((8, 8),), chunk_partitions=(1,), chunk_offsets=(0,), chunk_sizes=(256,), chunk_sha256=("e" * 64,), created_ns=1,
    )  # fmt: skip
    return replace(manifest, **changes)


def completion_of(group: int, sample: int, token_ids: Sequence[int] = (1,), *, logprob: float = 0.0, **changes: Any) -> Completion:
    """What an engine returns for a sample, under version 0."""
    completion = Completion(
        group=group, sample=sample, token_ids=np.array(token_ids, np.int32), logprobs=np.full(len(token_ids), logprob, np.float32),
        finish="stop", spans=(Span(0, 0),), started_ns=1, ended_ns=2,
    )  # fmt: skip
    return replace(completion, **changes)
