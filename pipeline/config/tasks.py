"""The tables of what gives a sample its reward: reward functions and services, environments of several turns.

The rule: as in `penstock.pipeline.config.schema`.
"""

import shlex
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from penstock.pipeline.config.schema import SOURCE, NonNegative, Positive, PositiveFloat, Resolve, Section, absolute, absolute_source


def absolute_environment(text: str, base: Path) -> str:
    """The files in the command of `agent:COMMAND`, the path in file.py:Class; other names stay."""
    if not text.startswith("agent:"):
        return absolute_source(text, base)
    try:
        words = shlex.split(text.removeprefix("agent:"))
    except ValueError as error:
        raise ValueError(f"{text!r} is no command: {error}") from error
    return f"agent:{shlex.join(absolute(word, base) if (base / word).is_file() else word for word in words)}"


ENVIRONMENT = Resolve(absolute_environment)


class RewardSection(Section):
    functions: Annotated[list[str], SOURCE] = Field(["exact_match"], min_length=1)
    weights: list[float] | None = None
    timeout_s: PositiveFloat = 30.0
    concurrency: Positive = Field(64, description="groups that a child process judges side by side where a function is async or a service")
    on_error: Literal["stop", "drop"] = Field(
        "stop", description="whether a reward that fails in the same way for more than 5 % of the groups stops the run"
    )


class EnvironmentSection(Section):
    source: Annotated[str | None, ENVIRONMENT] = Field(
        None,
        description="file.py:Class, package:Class, gymnasium:ID, tiny:lake or agent:COMMAND, and samples are trajectories of several turns",
    )
    carrier: Literal["process", "log"] = Field("process", description="trajectories run in rollout workers, or in environment workers")
    processes: Positive = Field(2, description="child processes for environments, per worker that runs them")
    in_flight: Positive = Field(256, description="trajectories at a time, per worker that runs them")
    max_turns: Positive = Field(10, description="turns of the policy, after which a trajectory is truncated")
    max_tokens: Positive = Field(4096, description="tokens of a trajectory with its prompt, after which it is truncated")
    history: Literal["exact", "template"] = Field(
        "exact", description="whether the policy sees every token that was drawn, or the conversation as its template renders it"
    )
    resume: Literal["replay", "restart"] = Field(
        "replay", description="after a loss: play the recorded actions again on the same seed, or begin the trajectory anew"
    )
    reset_timeout_s: PositiveFloat = 60.0
    step_timeout_s: PositiveFloat = 30.0
    trajectory_timeout_s: PositiveFloat = Field(3600.0, description="of an environment's time in one trajectory")
    retries: NonNegative = Field(2, description="attempts after the first, of an environment that fails, before its sample is aborted")
