"""A re-scoring from beginning to end: read, judge, compare, and write a new run if one is wanted.

The rule: group by group; what is held of a run are its prompts and numbers, never its samples.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from penstock.infra.log import Log
from penstock.pipeline.config.load import Config, ConfigError
from penstock.pipeline.config.plugins import PluginError, split_options
from penstock.pipeline.envs import rewards
from penstock.pipeline.observe.recorded_run import read_run
from penstock.pipeline.replay.rescore.cases import cases
from penstock.pipeline.replay.rescore.compare import Comparison
from penstock.pipeline.replay.rescore.judge import changed, rescore
from penstock.pipeline.replay.rescore.new_run import NewRun
from penstock.pipeline.runtime.registration.run_registry import registration
from penstock.pipeline.runtime.registration.trust import NO_TRUST, Trust, require_trusted
from penstock.pipeline.runtime.registration.user_code import keys_of, user_code
from penstock.pipeline.runtime.topic_reader import deleted

PROGRESS_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RescoreRequest:
    """What is to be judged how."""

    functions: Sequence[str] = ()
    """Names or plug-ins instead of the run's; the run's own if empty."""
    weights: Sequence[float] = ()
    overrides: Sequence[str] = ()
    threshold: float = 0.5
    write: str | None = None
    """Id of a new run."""
    model: str | None = None
    processes: int | None = None
    trust: Trust = NO_TRUST
    """Whether functions that the run names may be loaded although no key here has signed it."""


def score_run(log: Log, run: str, request: RescoreRequest, *, notify: Callable[[str], None]) -> dict[str, Any]:
    """The report as plain data, ready for JSON.

    Raises `ConfigError` for a wish that makes no sense, `ValueError` for an unknown run, `PluginError` and `ChildError` for a reward that
    cannot be loaded, `LogError`.
    """
    source = read_run(log, run)
    config = changed(source.config, functions=request.functions, weights=request.weights, overrides=request.overrides)
    # A new run has the whole configuration, and what this machine signs has been trusted whole.
    given = [*keys_of(request.overrides), *(["reward.functions"] if request.functions else [])]
    code = user_code(config, sections=() if request.write else ("reward",), overridden=given)
    require_trusted(registration(log, run), trust=request.trust, notify=notify, code=code)
    described = {"before": describe(source.config, sources=source.reward_sources), "after": describe(config)}
    check(config)
    comparison, shown = Comparison(request.threshold), time.monotonic()
    origin = {"run": run, "reward": described["after"], "was": described["before"]}
    gone = deleted(log, *(f"{run}.{topic}" for topic in ("prompts", "rollouts", "groups")))
    begun = NewRun.begin(log, source, request.write, config, origin=origin) if request.write else nullcontext()
    with begun as new:
        notify(f"judging the groups of {run}")
        recorded, processes = cases(source, model=request.model), request.processes or config.scorer.processes
        for number, judged in enumerate(rescore(recorded, config, steps=source.planned_steps, processes=processes)):
            comparison.add(judged)
            if new is not None:
                new.add(judged)
            if time.monotonic() - shown > PROGRESS_S:
                shown = time.monotonic()
                notify(f"{number + 1} groups judged, {comparison.rewards.changed} rewards changed")
        if new is not None:
            new.finish(notify=notify)
    return {"run": run, "reward": described, **comparison.table(), "gone": gone, "written": request.write}


def check(config: Config) -> None:
    """Raise `ConfigError` for a reward that is not here; a user's code is looked for and not run: that is done in child processes."""
    names = config.reward.functions
    try:
        if builtin := [name for name in names if ":" not in split_options(name)[0]]:
            rewards.resolve(builtin)
        rewards.digests(names)
    except PluginError as error:
        raise ConfigError(f"reward.functions: {error}") from error


def describe(config: Config, *, sources: dict[str, str] | None = None) -> dict[str, Any]:
    """The reward functions with their weights, and the SHA-256 of the source of each: the recorded ones, or those on this machine."""
    reward = config.reward
    with suppress(PluginError):  # those of an earlier run need not be here
        sources = sources or rewards.digests(reward.functions)
    return {"functions": reward.functions, "weights": reward.weights or [1.0] * len(reward.functions), "sources": sources}
