"""Converts a conversation to the columns of a sample: tokens of all segments, loss mask, versions, turns."""

import json
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from penstock.infra.engines.base import Completion, Finish, GroupRequest, Span
from penstock.pipeline.data.conversation.segments import Segment
from penstock.topics.rollouts import ENVIRONMENT, GENERATED, MODEL, Turn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpisodeRequest(GroupRequest):
    """A request for a group of trajectories, with the row that their environments receive."""

    messages: str | None
    """JSON list of the prompt's chat messages; None for a plain text."""
    prompt: str
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory(Completion):
    """A sample of several turns; the fields of `Completion` cover all segments in order."""

    loss_mask: npt.NDArray[np.bool_]
    segments: tuple[tuple[int, int, int], ...]
    """(start, end, prompt tokens in it) of each trained sequence in the columns."""
    turns: tuple[Turn, ...]
    messages: str
    environment: str | None
    environment_version: str | None
    environment_seed: int | None
    environment_s: float = 0.0
    results_cut: int = 0
    """Messages of its environment cut at `environment.max_result_tokens`."""
    replaced: int = 0
    """Lone surrogates in the texts of its environment, replaced by U+FFFD."""


@dataclass(slots=True, kw_only=True)
class EpisodeState:
    """Messages, rewards by turn number, and timing of a trajectory so far."""

    messages: list[dict[str, Any]]
    rewards: dict[int, float]
    generated: list[int] = field(default_factory=list)
    environment: str | None = None
    version: str | None = None
    seed: int | None = None
    environment_s: float = 0.0
    results_cut: int = 0
    started_ns: int = 0
    ended_ns: int = 0
    replaced: int = 0
    """Number of lone surrogates replaced in the environment's texts."""


def trajectory_of(
    segments: Sequence[Segment],
    request: GroupRequest,
    sample: int,
    *,
    episode_state: EpisodeState,
    finish: Finish,
    cause: str | None,
    version: int,
) -> Trajectory:
    """Convert an episode to the sample to publish: the columns of all segments in order, without the group's own prompt.

    A segment is a sequence that is trained as one: a new one starts if the history does not continue the last. `version` labels a sample
    without tokens; `cause` is the failure of the environment, added as a last turn.
    """
    ids, mask, logprobs, versions, bounds, turns = [], [], [], [], [], []
    total = 0
    for number, segment in enumerate(segments):
        prompt = np.asarray(request.prompt_ids)
        follows = number == 0 and np.array_equal(segment.token_ids[: len(prompt)], prompt) and segment.prompt >= len(prompt)
        cut = len(prompt) if follows else 0
        for part in segment.parts:
            start, end = max(part.start, cut), part.end
            if start < end:
                reward = episode_state.rewards.get(part.turn) if part.source == MODEL else None
                offset = total - cut
                turns.append(Turn(start=offset + start, end=offset + end, source=part.source, finish=part.finish, reward=reward))
        ids.append(segment.token_ids[cut:])
        mask.append(segment.mask[cut:])
        logprobs.append(segment.logprobs[cut:])
        versions.append(segment.versions[cut:])
        size = len(segment.token_ids) - cut
        bounds.append((total, total + size, 0 if follows else segment.prompt))
        total += size
    if cause is not None:
        turns.append(Turn(start=total, end=total, source=ENVIRONMENT, finish=cause))
    return Trajectory(
        group=request.group,
        sample=sample,
        token_ids=np.concatenate([np.empty(0, np.int32), *ids]),
        logprobs=np.concatenate([np.empty(0, np.float32), *logprobs]),
        finish=finish,
        spans=_spans(np.concatenate([np.empty(0, np.int32), *versions]), version),
        started_ns=episode_state.started_ns,
        ended_ns=episode_state.ended_ns,
        loss_mask=np.concatenate([np.empty(0, np.bool_), *mask]),
        segments=tuple(bounds),
        turns=tuple(turns),
        messages=json.dumps(_marked(episode_state.messages, episode_state.generated)),
        environment=episode_state.environment,
        environment_version=episode_state.version,
        environment_seed=episode_state.seed,
        environment_s=episode_state.environment_s,
        results_cut=episode_state.results_cut,
        replaced=episode_state.replaced,
    )


def _marked(messages: Sequence[dict[str, Any]], generated: Sequence[int]) -> list[dict[str, Any]]:
    """Return the messages with the key `GENERATED` on exactly those that the policy generated (their indices)."""
    unmarked = [{key: value for key, value in message.items() if key != GENERATED} for message in messages]
    for index in generated:
        unmarked[index][GENERATED] = True
    return unmarked


def _spans(versions: npt.NDArray[np.int32], version: int) -> tuple[Span, ...]:
    """Return the policy versions of tokens as spans; one empty span if there are no tokens."""
    if not len(versions):
        return (Span(version, 0),)
    starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist()]
    return tuple(Span(int(versions[start]), start) for start in starts)


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """One generated turn: T tokens, the stop id included, with logprobs (nats) and policy versions."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    finish: Literal["stop", "length", "abort"]
    started_ns: int = 0
    ended_ns: int = 0


class Generate(Protocol):
    """Generates one turn of a trajectory."""

    def __call__(self, token_ids: npt.NDArray[np.int32], *, turn: int, max_new_tokens: int) -> Awaitable[Generation]:
        """Generate at most `max_new_tokens` tokens after the context `token_ids`."""
        ...
