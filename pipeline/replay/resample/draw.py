"""Recorded prompts drawn again under recorded weights, with the seeds they had.

The rule: from the log alone: prompts, samples, weights and seeds are read from the run's topics, and nothing is written to them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from penstock.infra.engines.base import Completion, Engine
from penstock.infra.errors import LogError, RunNotFound
from penstock.infra.log import Log
from penstock.pipeline.config.load import Config, ConfigError, override
from penstock.pipeline.learner.ledger_history import LedgerHistory
from penstock.pipeline.observe.recorded_run import RecordedRun, no_prompt, read_run
from penstock.pipeline.replay.resample.compare import ResampledCompletion, compare
from penstock.pipeline.replay.rescore.cases import read_prompts
from penstock.pipeline.runtime.factories import make_engine
from penstock.pipeline.runtime.generation.sampling import request_of
from penstock.pipeline.runtime.registration.run_registry import registration
from penstock.pipeline.runtime.registration.trust import NO_TRUST, Trust, require_trusted
from penstock.pipeline.runtime.registration.user_code import keys_of, user_code
from penstock.pipeline.runtime.topic_reader import deleted
from penstock.pipeline.runtime.weights.read import fetch
from penstock.topics.prompts import Prompt
from penstock.topics.rollouts import Rollout

CHANGEABLE = ("rollout", "sampling", "run.seed", "model.path")
"""Sections and keys that decide how a prompt is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResampleRequest:
    """What is to be drawn again."""

    step: int | None = None
    """All groups of the plan of this step; or `group`."""
    group: int | None = None
    version: int | None = None
    """Draw under this one instead of the one that each sample began under."""
    overrides: Sequence[str] = ()
    trust: Trust = NO_TRUST
    """Whether environments and options of the engine that the run names may be loaded although no key here has signed it."""


def redraw(log: Log, run: str, request: ResampleRequest, *, notify: Callable[[str], None]) -> Iterator[ResampledCompletion]:
    """Draw what is wished for, version by version, and compare sample by sample as they end.

    Raises `ConfigError` for a wish that makes no sense and for a step, group or version that is not recorded, `LogError` for records
    that are gone, `EngineError`.
    """
    recorded = read_run(log, run)
    if recorded.record is None:
        raise RunNotFound(run)
    config, past = changed(recorded.config, request.overrides), recorded.past
    code = user_code(config, sections=("environment", "rollout"), overridden=keys_of(request.overrides))
    require_trusted(registration(log, run), trust=request.trust, notify=notify, code=code)
    wanted = groups_of(past, request)
    asked = prompts_of(recorded, wanted)
    samples = samples_of(recorded, asked.keys())
    if (lost := "; ".join(deleted(log, f"{run}.rollouts"))) and samples:
        notify(f"samples that are gone are not drawn again: {lost}")
    if lost and not samples:
        raise LogError(f"no sample of what is asked for is kept: {lost}")
    if not samples:
        raise ValueError(f"group {min(asked)} has no sample yet" if len(asked) == 1 else f"no sample of groups {sorted(asked)} is recorded")
    stop_ids = json.loads(recorded.record.info)["digests"]["stop_ids"]
    by_version = begun_under(samples, version=request.version)
    for version in by_version:
        if version not in past.ledger_state.manifests:
            raise ConfigError(f"version {version} is not among the run's: 0 to {past.ledger_state.newest_version}")
    notify(f"{sum(map(len, by_version.values()))} samples of {len(asked)} groups under {len(by_version)} versions: loading the engine")
    engine = make_engine(config)
    try:
        for version, mine in sorted(by_version.items()):
            notify(f"version {version}: {len(mine)} samples")
            engine.load_weights(version, fetch(log, past.ledger_state.manifests, version, run=run))
            for completion in draw(engine, asked, mine, config=config, stop_ids=stop_ids):
                yield compare(mine[completion.group, completion.sample], completion, version=version)
    finally:
        engine.close()


def changed(config: Config, overrides: Sequence[str]) -> Config:
    """The run's configuration with these overrides. Raises `ConfigError` for a key that has no part in drawing."""
    for text in overrides:
        key = text.partition("=")[0].strip()
        if key not in CHANGEABLE and key.partition(".")[0] not in CHANGEABLE:
            raise ConfigError(f"--set {text}: {key} has no part in drawing; what can be changed are {', '.join(CHANGEABLE)}")
    return override(config, overrides) if overrides else config


def groups_of(past: LedgerHistory, request: ResampleRequest) -> list[int]:
    """The numbers of the wished groups. Raises `ConfigError`."""
    if (request.step is None) == (request.group is None):
        raise ConfigError("give either --step or --group")
    if request.group is not None:
        return [request.group]
    steps = past.steps
    if request.step is None or request.step not in range(len(steps)):
        raise ConfigError(f"step {request.step} is not committed; the ledger has " + (f"0 to {len(steps) - 1}" if steps else "none"))
    return [planned.group for planned in steps[request.step].plan]


def begun_under(samples: Mapping[tuple[int, int], Rollout], *, version: int | None) -> dict[int, dict[tuple[int, int], Rollout]]:
    """Version -> the samples to draw under it: the one they began under, or `version` for all."""
    by_version: dict[int, dict[tuple[int, int], Rollout]] = {}
    for place, sample in sorted(samples.items()):
        by_version.setdefault(int(sample.span_versions[0]) if version is None else version, {})[place] = sample
    return by_version


def draw(
    engine: Engine, asked: Mapping[int, Prompt], mine: Mapping[tuple[int, int], Rollout], *, config: Config, stop_ids: Sequence[int]
) -> Iterator[Completion]:
    """These samples, group by group as the engine has room; each group has the rows it had."""
    waiting = sorted({group for group, _ in mine})
    while waiting or not engine.idle:
        while waiting and engine.has_room:
            group = waiting.pop(0)
            numbers = [sample for owner, sample in mine if owner == group]
            engine.submit(request_of(asked[group], numbers, config=config, stop_ids=stop_ids))
        yield from engine.step()


def prompts_of(recorded: RecordedRun, wanted: Sequence[int]) -> dict[int, Prompt]:
    """The prompts of these groups. Raises `ConfigError` for one that was never admitted, `LogError` for one that is gone."""
    asked = read_prompts(recorded, wanted=frozenset(wanted))
    if absent := [number for number in wanted if number not in asked]:
        raise no_prompt(recorded, absent[0])
    return {number: asked[number][0] for number in wanted}


def samples_of(recorded: RecordedRun, wanted: AbstractSet[int]) -> dict[tuple[int, int], Rollout]:
    """(group, sample) -> its first record, for these groups; aborted ones are left out, as when they ended was chance."""
    samples = (read.payload for read in recorded.reader.samples(only=wanted) if read.payload is not None)
    return {(sample.group, sample.sample): sample for sample in samples if sample.finish != "abort" and len(sample.token_ids)}
