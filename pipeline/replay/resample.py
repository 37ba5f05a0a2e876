"""`penstock replay rollout`: regenerates recorded samples with the recorded weights and seeds, and compares them token by token."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
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
from penstock.pipeline.runtime.registration.trust import Trust, keys_of, require_trusted, user_code
from penstock.pipeline.runtime.sampling import request_of
from penstock.pipeline.runtime.topic_reader import deleted
from penstock.pipeline.runtime.weights.read import fetch
from penstock.topics.prompts import Prompt
from penstock.topics.rollouts import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class ResampledCompletion:
    """A recorded sample and its regeneration."""

    group: int
    sample: int
    version: int
    """Policy version under which the sample was regenerated."""
    recorded_versions: tuple[int, ...]
    """Policy versions that generated the recorded tokens, in order."""
    comparable: int
    """Number of leading recorded tokens that were generated under `version`."""
    recorded: tuple[int, ...]
    resampled: tuple[int, ...]
    first_difference: int | None
    """Index of the first comparable token that differs; None if all are equal."""
    logprob_difference: float
    """[nats] largest absolute difference of the behaviour logprobs before `first_difference`; 0 if there is no common token."""

    @property
    def same(self) -> bool:
        """True if every comparable token is the recorded one."""
        return self.first_difference is None


def compare(recorded: Rollout, regenerated: Completion, *, version: int) -> ResampledCompletion:
    """Compare a recorded sample with its regeneration under `version`.

    Tokens are compared up to the first one that another version generated. If already the first token is from another version, because
    the user requested `version`, all tokens are compared.
    """
    before, now = recorded.token_ids, regenerated.token_ids
    versions = recorded.token_versions
    other = np.flatnonzero(versions != version)
    comparable = int(other[0]) if len(other) and other[0] else len(before)
    common = min(comparable, len(now))
    differing = np.flatnonzero(before[:common] != now[:common])
    first = int(differing[0]) if len(differing) else None
    if first is None and len(now) != comparable and (len(now) < comparable or comparable == len(before)):
        first = common  # only one of the two samples ended here
    alike = common if first is None else first
    gaps = np.abs(recorded.behaviour_logprobs[:alike] - regenerated.logprobs[:alike])
    return ResampledCompletion(
        group=recorded.group, sample=recorded.sample, version=version, recorded_versions=tuple(map(int, recorded.span_versions)),
        comparable=comparable, recorded=tuple(before.tolist()), resampled=tuple(now.tolist()), first_difference=first,
        logprob_difference=float(np.nanmax(gaps)) if len(gaps) and not np.isnan(gaps).all() else 0.0,
    )  # fmt: skip


def summary(samples: Sequence[ResampledCompletion]) -> dict[str, float | int]:
    """Return totals over all compared samples, for JSON."""
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


def resample(
    log: Log, run: str, *, step: int | None, group: int | None, version: int | None, overrides: Sequence[str], trust: Trust,
    notify: Callable[[str], None],
) -> Iterator[ResampledCompletion]:  # fmt: skip
    """Regenerate the samples of a step or of a group, version by version; yield a comparison as each sample ends.

    `version` is the policy version to use, that with which each recorded sample started if None. `trust` permits loading the run's
    environments and engine options if no key on this machine has signed the run.

    Raises `ConfigError` for an invalid request or a step, group or version that is not recorded, `LogError` if records were deleted, and
    `EngineError`.
    """
    recorded = read_run(log, run)
    if recorded.record is None:
        raise RunNotFound(run)
    config, past = resampled(recorded.config, overrides), recorded.past
    code = user_code(config, sections=("environment", "rollout"), overridden=keys_of(overrides))
    require_trusted(registration(log, run), trust=trust, notify=notify, code=code)
    origin, numbers = json.loads(recorded.record.info).get("regraded_from"), groups_of(past, step=step, group=group)
    while origin:
        if foreign := [number for number in numbers if any(low <= number <= high for low, high in origin["groups"])]:
            parent = origin["run"]
            command = f"penstock replay rollout {parent} --group {foreign[0]}"
            raise ConfigError(f"group {foreign[0]} was generated by the parent run {parent}; regenerate it there: {command}")
        origin = origin.get("before")
    prompts = prompts_of(recorded, numbers)
    samples = samples_of(recorded, prompts.keys())
    if (lost := "; ".join(deleted(log, f"{run}.rollouts"))) and samples:
        notify(f"some samples were deleted and are not regenerated: {lost}")
    if lost and not samples:
        raise LogError(f"all requested samples were deleted by retention: {lost}")
    if not samples:
        raise ValueError(
            f"group {min(prompts)} has no sample yet" if len(prompts) == 1 else f"no sample of groups {sorted(prompts)} is recorded"
        )
    stop_ids = json.loads(recorded.record.info)["digests"]["stop_ids"]
    by_version: dict[int, dict[tuple[int, int], Rollout]] = {}
    for key, sample in sorted(samples.items()):
        by_version.setdefault(int(sample.span_versions[0]) if version is None else version, {})[key] = sample
    for number in by_version:
        if number not in past.ledger_state.manifests:
            raise ConfigError(
                f"--policy-version {number}: {run} has published versions 0 to {past.ledger_state.newest_version}; choose one of these"
            )
    total = sum(map(len, by_version.values()))
    notify(f"regenerating {total} samples of {len(prompts)} groups under {len(by_version)} versions: loading the engine")
    with closing(make_engine(config)) as engine:
        for number, recorded_samples in sorted(by_version.items()):
            notify(f"version {number}: {len(recorded_samples)} samples")
            engine.load_weights(number, fetch(log, past.ledger_state.manifests, number, run=run))
            for completion in generate(engine, prompts, recorded_samples, config=config, stop_ids=stop_ids):
                yield compare(recorded_samples[completion.group, completion.sample], completion, version=number)


def groups_of(past: LedgerHistory, *, step: int | None, group: int | None) -> list[int]:
    """Return the numbers of the requested groups. Raises `ConfigError`."""
    if (step is None) == (group is None):
        raise ConfigError("give either --step or --group")
    if group is not None:
        return [group]
    steps = past.steps
    if step is None or step not in range(len(steps)):
        committed = f"steps 0 to {len(steps) - 1} are" if steps else "no step is"
        raise ConfigError(f"--step {step}: this step is not committed; {committed}")
    return [planned.group for planned in steps[step].plan]


def generate(
    engine: Engine,
    prompts: Mapping[int, Prompt],
    recorded_samples: Mapping[tuple[int, int], Rollout],
    *,
    config: Config,
    stop_ids: Sequence[int],
) -> Iterator[Completion]:
    """Generate these samples and yield the completions; groups are submitted in order as the engine has room."""
    waiting = sorted({group for group, _ in recorded_samples})
    while waiting or not engine.idle:
        while waiting and engine.has_room:
            group = waiting.pop(0)
            numbers = [sample for owner, sample in recorded_samples if owner == group]
            engine.submit(request_of(prompts[group], numbers, config=config, stop_ids=stop_ids))
        yield from engine.step()


def prompts_of(recorded: RecordedRun, numbers: Sequence[int]) -> dict[int, Prompt]:
    """Return group -> its prompt. Raises `ConfigError` for a group that was never admitted, `LogError` if its prompt was deleted."""
    prompts = read_prompts(recorded, numbers=frozenset(numbers))
    if missing := [number for number in numbers if number not in prompts]:
        raise no_prompt(recorded, missing[0])
    return {number: prompts[number][0] for number in numbers}


def samples_of(recorded: RecordedRun, numbers: AbstractSet[int]) -> dict[tuple[int, int], Rollout]:
    """Return (group, sample) -> the recorded sample. Aborted samples are skipped: where they end is not reproducible."""
    samples = (read.payload for read in recorded.reader.samples(only=numbers) if read.payload is not None)
    return {(sample.group, sample.sample): sample for sample in samples if sample.finish != "abort" and len(sample.token_ids)}
