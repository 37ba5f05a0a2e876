"""Regenerates recorded samples with recorded weights and seeds, and compares them token by token. Reads the log only."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from penstock.infra.engines.base import Completion, Engine
from penstock.infra.errors import LogError, RunNotFound
from penstock.infra.log import Log
from penstock.pipeline.config.load import Config, ConfigError
from penstock.pipeline.inspect.recorded_run import RecordedRun, no_prompt, read_run
from penstock.pipeline.learner.ledger_history import LedgerHistory
from penstock.pipeline.replay.overrides import resampled
from penstock.pipeline.replay.rescored_groups import read_prompts
from penstock.pipeline.runtime.factories import make_engine
from penstock.pipeline.runtime.registration.run_registry import registration
from penstock.pipeline.runtime.registration.trust import NO_TRUST, Trust, keys_of, require_trusted, user_code
from penstock.pipeline.runtime.sampling import request_of
from penstock.pipeline.runtime.topic_reader import deleted
from penstock.pipeline.runtime.weights.read import fetch
from penstock.topics.prompts import Prompt
from penstock.topics.rollouts import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class ResampledCompletion:
    """A sample, recorded and regenerated."""

    group: int
    sample: int
    version: int
    """Policy version of the regenerated sample."""
    recorded_versions: tuple[int, ...]
    comparable: int
    """Number of leading recorded tokens that were generated under `version`."""
    recorded: tuple[int, ...]
    """Token ids."""
    resampled: tuple[int, ...]
    first_difference: int | None
    """Index of the first comparable token that differs; None if all are equal."""
    logprob_difference: float
    """[nats] largest difference of the behaviour logprobs before the first different token; 0 without a common token."""

    @property
    def same(self) -> bool:
        """True if every comparable token is the recorded one."""
        return self.first_difference is None


def compare(recorded: Rollout, regenerated: Completion, *, version: int) -> ResampledCompletion:
    """Compare a recorded with a regenerated sample.

    Recorded tokens are compared up to the first one of another version than `version`; all of them if the first one is of another
    version, as when the user chose one.
    """
    before, now = recorded.token_ids, regenerated.token_ids
    versions = recorded.token_versions
    other = np.flatnonzero(versions != version)
    comparable = int(other[0]) if len(other) and other[0] else len(before)
    common = min(comparable, len(now))
    differing = np.flatnonzero(before[:common] != now[:common])
    first = int(differing[0]) if len(differing) else None
    if first is None and len(now) != comparable and (len(now) < comparable or comparable == len(before)):
        first = common  # one of the two ended here, the other did not
    alike = common if first is None else first
    gaps = np.abs(recorded.behaviour_logprobs[:alike] - regenerated.logprobs[:alike])
    return ResampledCompletion(
        group=recorded.group, sample=recorded.sample, version=version, recorded_versions=tuple(map(int, recorded.span_versions)),
        comparable=comparable, recorded=tuple(before.tolist()), resampled=tuple(now.tolist()), first_difference=first,
        logprob_difference=float(np.nanmax(gaps)) if len(gaps) and not np.isnan(gaps).all() else 0.0,
    )  # fmt: skip


def summary(samples: Sequence[ResampledCompletion]) -> dict[str, float | int]:
    """Counts over all samples."""
    tokens = sum(sample.comparable for sample in samples)
    equal = sum(sample.comparable if sample.first_difference is None else sample.first_difference for sample in samples)
    return {
        "samples": len(samples),
        "same_samples": sum(sample.same for sample in samples),
        "tokens": tokens,
        "tokens_before_a_difference": equal,
        "samples_of_several_versions": sum(len(set(sample.recorded_versions)) > 1 for sample in samples),
        "logprob_difference_max": max((sample.logprob_difference for sample in samples), default=0.0),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ResampleRequest:
    """Step or group to generate again, and under which version."""

    step: int | None = None
    """All groups of the plan of this step; or `group`."""
    group: int | None = None
    version: int | None = None
    """Generate under this version instead of the one at the start of each sample."""
    overrides: Sequence[str] = ()
    trust: Trust = NO_TRUST
    """Permission to load environments and engine options of the run although no key here has signed it."""


def resample(log: Log, run: str, request: ResampleRequest, *, notify: Callable[[str], None]) -> Iterator[ResampledCompletion]:
    """Regenerate the requested samples, version by version, and yield each comparison as its sample ends.

    Raises `ConfigError` for an invalid request and for a step, group or version that is not recorded, `LogError` for deleted records,
    `EngineError`.
    """
    recorded = read_run(log, run)
    if recorded.record is None:
        raise RunNotFound(run)
    config, past = resampled(recorded.config, request.overrides), recorded.past
    code = user_code(config, sections=("environment", "rollout"), overridden=keys_of(request.overrides))
    require_trusted(registration(log, run), trust=request.trust, notify=notify, code=code)
    origin, numbers = json.loads(recorded.record.info).get("regraded_from"), groups_of(past, request)
    while origin:
        if foreign := [number for number in numbers if any(low <= number <= high for low, high in origin["groups"])]:
            parent = origin["run"]
            raise ConfigError(f"group {foreign[0]} was generated by {parent}: penstock replay rollout {parent} --group {foreign[0]}")
        origin = origin.get("before")
    prompts = prompts_of(recorded, numbers)
    samples = samples_of(recorded, prompts.keys())
    if (lost := "; ".join(deleted(log, f"{run}.rollouts"))) and samples:
        notify(f"deleted samples are not regenerated: {lost}")
    if lost and not samples:
        raise LogError(f"all requested samples were deleted: {lost}")
    if not samples:
        raise ValueError(
            f"group {min(prompts)} has no sample yet" if len(prompts) == 1 else f"no sample of groups {sorted(prompts)} is recorded"
        )
    stop_ids = json.loads(recorded.record.info)["digests"]["stop_ids"]
    by_version = by_start_version(samples, version=request.version)
    for version in by_version:
        if version not in past.ledger_state.manifests:
            raise ConfigError(f"version {version} is not among the run's: 0 to {past.ledger_state.newest_version}")
    notify(f"{sum(map(len, by_version.values()))} samples of {len(prompts)} groups under {len(by_version)} versions: loading the engine")
    engine = make_engine(config)
    try:
        for version, recorded_samples in sorted(by_version.items()):
            notify(f"version {version}: {len(recorded_samples)} samples")
            engine.load_weights(version, fetch(log, past.ledger_state.manifests, version, run=run))
            for completion in generate(engine, prompts, recorded_samples, config=config, stop_ids=stop_ids):
                yield compare(recorded_samples[completion.group, completion.sample], completion, version=version)
    finally:
        engine.close()


def groups_of(past: LedgerHistory, request: ResampleRequest) -> list[int]:
    """Numbers of the requested groups. Raises `ConfigError`."""
    if (request.step is None) == (request.group is None):
        raise ConfigError("give either --step or --group")
    if request.group is not None:
        return [request.group]
    steps = past.steps
    if request.step is None or request.step not in range(len(steps)):
        raise ConfigError(f"step {request.step} is not committed; the ledger has " + (f"0 to {len(steps) - 1}" if steps else "none"))
    return [planned.group for planned in steps[request.step].plan]


def by_start_version(samples: Mapping[tuple[int, int], Rollout], *, version: int | None) -> dict[int, dict[tuple[int, int], Rollout]]:
    """Version -> the samples to generate under it: the one at their start, or `version` for all."""
    by_version: dict[int, dict[tuple[int, int], Rollout]] = {}
    for key, sample in sorted(samples.items()):
        by_version.setdefault(int(sample.span_versions[0]) if version is None else version, {})[key] = sample
    return by_version


def generate(
    engine: Engine,
    prompts: Mapping[int, Prompt],
    recorded_samples: Mapping[tuple[int, int], Rollout],
    *,
    config: Config,
    stop_ids: Sequence[int],
) -> Iterator[Completion]:
    """Generate these samples, group by group as the engine has room; each group has its recorded rows."""
    waiting = sorted({group for group, _ in recorded_samples})
    while waiting or not engine.idle:
        while waiting and engine.has_room:
            group = waiting.pop(0)
            numbers = [sample for owner, sample in recorded_samples if owner == group]
            engine.submit(request_of(prompts[group], numbers, config=config, stop_ids=stop_ids))
        yield from engine.step()


def prompts_of(recorded: RecordedRun, numbers: Sequence[int]) -> dict[int, Prompt]:
    """The prompts of these groups. Raises `ConfigError` for one that was never admitted, `LogError` for a deleted one."""
    prompts = read_prompts(recorded, numbers=frozenset(numbers))
    if missing := [number for number in numbers if number not in prompts]:
        raise no_prompt(recorded, missing[0])
    return {number: prompts[number][0] for number in numbers}


def samples_of(recorded: RecordedRun, numbers: AbstractSet[int]) -> dict[tuple[int, int], Rollout]:
    """(group, sample) -> its first record, for these groups; aborted samples are skipped, as their end is not reproducible."""
    samples = (read.payload for read in recorded.reader.samples(only=numbers) if read.payload is not None)
    return {(sample.group, sample.sample): sample for sample in samples if sample.finish != "abort" and len(sample.token_ids)}
