"""Measures a recorded run's phase times from its log as a workload, and predicts its time with other workers or another schedule."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.infra.log import Log
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.inspect.recorded_run import read_run
from penstock.pipeline.launch.planning.engine import Outcome
from penstock.pipeline.launch.planning.rendering import table
from penstock.pipeline.launch.planning.search import with_sizes
from penstock.pipeline.launch.planning.simulator import simulate
from penstock.pipeline.launch.planning.workload import DecodeTimes, Workload, linear, recorded
from penstock.pipeline.runtime.topic_reader import RunReader
from penstock.pipeline.scheduling.rules import MODES
from penstock.topics import metrics
from penstock.topics.ledger import Entry
from penstock.topics.rollouts import generated
from penstock.topics.wire.errors import Unusable

LEAST_STEPS = 3
"""Smallest number of steps of a run whose times are used."""
UNLIKE = 1.2
"""Ratio of the largest to the smallest batch from which the decode step time is fitted to the batch size."""
WAITED = 0.2
"""Share of waiting in a step from which the trainer is taken to process each group on arrival."""


@dataclass(frozen=True, slots=True)
class SampleSpan:
    """Origin of one sample: worker, times, tokens, version at its start."""

    worker: str
    group: int
    started_s: float
    ended_s: float
    tokens: int
    version: int
    complete: bool
    """False for an aborted sample."""


@dataclass(slots=True, kw_only=True)
class RunTimes:
    """Times measured from the log of a run."""

    config: Config
    sample_spans: list[SampleSpan] = field(default_factory=list)
    scored_s: dict[int, float] = field(default_factory=dict)
    """Group -> time of its outcome."""
    filtered: dict[int, bool] = field(default_factory=dict)
    steps: list[Entry] = field(default_factory=list)
    versions: dict[int, float] = field(default_factory=dict)
    """Version -> time of its ledger entry."""
    load_s: dict[str, float] = field(default_factory=dict)
    """Rollout worker -> its total time for loading versions."""


def read(log: Log, run: str) -> RunTimes:
    """Measure a run, finished or not. Raises `ValueError` for a run with too few steps, `LogError`."""
    recorded_run = read_run(log, run)
    record = RunTimes(config=recorded_run.config)
    for sample in recorded_run.reader.samples():
        if (rollout := sample.payload) is not None:
            times = rollout.started_ns / 1e9, rollout.ended_ns / 1e9
            record.sample_spans.append(
                SampleSpan(rollout.worker, rollout.group, *times, len(generated(rollout)), rollout.version_min, rollout.finish != "abort")
            )
    for group in recorded_run.reader.groups():
        if group.payload is not None:
            record.scored_s[group.payload.group] = group.payload.scored_ns / 1e9
            record.filtered[group.payload.group] = group.payload.outcome == "filtered"
    for entry in recorded_run.reader.entries():
        if entry.kind == "step":
            record.steps.append(entry)
        elif entry.kind == "version" and entry.version is not None:
            record.versions[entry.version] = entry.time_ns / 1e9
    record.load_s = _load_times(recorded_run.reader)
    if len(record.steps) < LEAST_STEPS:
        raise ValueError(f"run {run} has {len(record.steps)} steps; estimating its speed needs at least {LEAST_STEPS}")
    return record


def _load_times(reader: RunReader) -> dict[str, float]:
    """Rollout worker -> total seconds for loading versions, over its processes, each of which reports a growing number."""
    newest: dict[tuple[str, str], float] = {}
    for record in reader.records("metrics"):
        with suppress(Unusable):
            measured = metrics.read(record, run=reader.run)[1]
            if measured.role == "rollout" and "load_s" in measured.values:
                newest[measured.worker, measured.incarnation] = measured.values["load_s"]
    total: dict[str, float] = defaultdict(float)
    for (worker, _), seconds in newest.items():
        total[worker] += seconds
    return dict(total)


def wall_s(record: RunTimes) -> float:
    """Seconds from the start of the first sample to the end of the last step."""
    started = min(step.metrics["first_sample_at"] for step in record.steps if "first_sample_at" in step.metrics)
    return record.steps[-1].time_ns / 1e9 - started


def workload(record: RunTimes) -> Workload:
    """The run as a workload with the measured times; its simulation takes about `wall_s`."""
    config, schedule = record.config, record.config.rules
    continuous_batching = config.engine.continuous_batching
    concurrency = config.rollout.concurrency if continuous_batching else schedule.samples_begun
    decode, prefill_s, pace = _batched(record.sample_spans) if continuous_batching else _by_group(record.sample_spans, rows=concurrency)
    release_s, hold_s, step_s = _after_steps(record)
    deliver_s, take_s = _delivery(record)
    group_s, token_s, step_pace = _training(record)
    computed = fmean(step.metrics.get("compute_s", 0.0) for step in record.steps)
    update_s = _update(record, take_s=take_s, step_s=step_s, most_s=computed)
    share = 1.0 - update_s / computed if computed else 1.0
    loads = len({(span.worker, span.version) for span in record.sample_spans})
    load_s = sum(record.load_s.values()) / max(1, loads)
    return Workload(
        schedule=schedule, steps=len(record.steps),
        lengths=recorded(_lengths(record.sample_spans, samples=schedule.samples_per_prompt), name="recorded"),
        engines=len({span.worker for span in record.sample_spans}), concurrency=concurrency, decode=decode,
        continuous_batching=continuous_batching, slots=config.slots, prefill_s=prefill_s, load_s=load_s, deliver_s=deliver_s,
        take_s=take_s, train_group_s=group_s * share, train_token_s=token_s * share, step_s=step_s + update_s, hold_s=hold_s,
        release_s=release_s, publish_s=_arrival(record, load_s=load_s, prefill_s=prefill_s),
        filtered=fmean(record.filtered.values()) if record.filtered else 0.0, filtered_groups=record.filtered, group_pace=pace,
        step_pace=step_pace,
    )  # fmt: skip


def _lengths(sample_spans: Iterable[SampleSpan], *, samples: int) -> dict[int, npt.NDArray[np.int64]]:
    """Group -> token counts of its samples, for complete groups."""
    lengths: dict[int, list[int]] = defaultdict(list)
    for span in sample_spans:
        if span.complete:
            lengths[span.group].append(span.tokens)
    return {group: np.array(tokens) for group, tokens in lengths.items() if len(tokens) >= samples}


def _by_group(sample_spans: Sequence[SampleSpan], *, rows: int) -> tuple[DecodeTimes, float, dict[int, float]]:
    """(decode step time, prefill time of a group, pace of each group) of an engine that generates one group at a time.

    The time between two groups of one version counts as prefill of the second.
    """
    spans = _group_spans(sample_spans)
    lengths, times = [span.tokens for span in spans], [span.ended_s - span.started_s for span in spans]
    step_s, prefill_s = _line(lengths, times)
    if not step_s:  # groups of equal length do not distinguish the two
        step_s, prefill_s = sum(times) / max(1, sum(lengths)), 0.0
    gaps = [
        later.started_s - earlier.ended_s
        for earlier, later in pairwise(spans)
        if (later.worker, later.version) == (earlier.worker, earlier.version) and later.started_s >= earlier.ended_s
    ]
    pace = {span.group: max(1e-6, span.ended_s - span.started_s - prefill_s) / (span.tokens * step_s) for span in spans if step_s}
    return DecodeTimes((float(rows),), (step_s,)), prefill_s + (median(gaps) if gaps else 0.0), pace


def _group_spans(sample_spans: Sequence[SampleSpan]) -> list[SampleSpan]:
    """One span per group, from its first sample's start to its last one's end, by worker and time; tokens of the longest sample."""
    members: dict[tuple[str, int], list[SampleSpan]] = defaultdict(list)
    for span in sample_spans:
        members[span.worker, span.group].append(span)
    spans = [
        SampleSpan(
            worker, group, min(span.started_s for span in samples), max(span.ended_s for span in samples),
            max(span.tokens for span in samples), min(span.version for span in samples), True,
        )
        for (worker, group), samples in members.items()
    ]  # fmt: skip
    return sorted(spans, key=lambda span: (span.worker, span.started_s))


def _batched(sample_spans: Sequence[SampleSpan]) -> tuple[DecodeTimes, float, dict[int, float]]:
    """(decode step times by batch size, 0, no pace) of an engine with continuous batching."""
    counts, per_token, weights = [], [], []
    by_worker: dict[str, list[SampleSpan]] = defaultdict(list)
    for span in sample_spans:
        by_worker[span.worker].append(span)
    for worker_spans in by_worker.values():
        starts, ends = (np.sort([getattr(span, name) for span in worker_spans]) for name in ("started_s", "ended_s"))
        edges = np.unique(np.concatenate([starts, ends]))
        active = np.searchsorted(starts, edges, side="right") - np.searchsorted(ends, edges, side="right")
        area = np.concatenate([[0.0], np.cumsum(active[:-1] * np.diff(edges))])
        for span in worker_spans:
            if span.tokens and span.ended_s > span.started_s:
                seconds = span.ended_s - span.started_s
                counts.append((np.interp(span.ended_s, edges, area) - np.interp(span.started_s, edges, area)) / seconds)
                per_token.append(seconds / span.tokens)
                weights.append(span.tokens)
    mean = float(np.average(per_token, weights=weights))
    if max(counts) < UNLIKE * min(counts):
        return DecodeTimes((1.0,), (mean,)) if max(counts) < 1.5 else linear(mean, 0.0), 0.0, {}
    each, base = _line(counts, per_token, weights=weights)
    return linear(base, each), 0.0, {}


def _line(x: Sequence[float], y: Sequence[float], *, weights: Sequence[float] | None = None) -> tuple[float, float]:
    """(slope, intercept) of the least-squares line through the points, both at least 0."""
    share = np.ones(len(x)) if weights is None else np.asarray(weights, float)
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    x_mean, y_mean = np.average(xs, weights=share), np.average(ys, weights=share)
    variance = float((share * (xs - x_mean) ** 2).sum())
    slope = float((share * (xs - x_mean) * (ys - y_mean)).sum()) / variance if variance > 0 else 0.0
    slope = min(max(slope, 0.0), y_mean / x_mean if x_mean else 0.0)
    return float(slope), float(y_mean - slope * x_mean)


def _training(record: RunTimes) -> tuple[float, float, dict[int, float]]:
    """Seconds of the trainer per group and per completion token, and the pace of each step."""
    tokens: dict[int, int] = defaultdict(int)
    for span in record.sample_spans:
        tokens[span.group] += span.tokens
    sizes = [sum(tokens[planned.group] for planned in step.plan) for step in record.steps]
    computed = [step.metrics.get("compute_s", 0.0) for step in record.steps]
    token_s, step_s = _line(sizes, computed)
    usual = [step_s + token_s * size for size in sizes]
    pace = {number: seconds / expected for number, (seconds, expected) in enumerate(zip(computed, usual, strict=True)) if expected}
    return step_s / record.config.schedule.prompts_per_step, token_s, pace


def _after_steps(record: RunTimes) -> tuple[float, float, float]:
    """(time to publish a version, time between two steps, time of a step without waiting and compute)."""
    releases, between = [], []
    for step, after in pairwise(record.steps):
        between.append(after.metrics.get("started_at", after.time_ns / 1e9) - step.time_ns / 1e9)
        version, rest = divmod((step.step or 0) + 1, record.config.schedule.steps_per_version)
        if rest == 0 and version in record.versions:
            releases.append(record.versions[version] - step.time_ns / 1e9)
    own = [
        step.time_ns / 1e9 - step.metrics["started_at"] - step.metrics.get("wait_s", 0.0) - step.metrics.get("compute_s", 0.0)
        for step in record.steps
        if "started_at" in step.metrics
    ]
    return _positive(releases), _positive(between), _positive(own)


def _update(record: RunTimes, *, take_s: float, step_s: float, most_s: float) -> float:
    """The trainer's compute time after a step's last group: the remaining micro-batches and the optimizer.

    The time from that group's outcome to the step's entry beyond one group's share, in steps that waited for it; at most `most_s`, the
    mean compute time of a step.
    """
    prompts, tails, computed = record.config.schedule.prompts_per_step, [], []
    for step in record.steps:
        outcomes = [record.scored_s.get(planned.group) for planned in step.plan]
        times = [scored_s for scored_s in outcomes if scored_s is not None]
        compute_s = step.metrics.get("compute_s", 0.0)
        if len(times) == len(step.plan) and step.metrics.get("wait_s", 0.0) > WAITED * (step.metrics.get("wait_s", 0.0) + compute_s):
            tails.append(step.time_ns / 1e9 - max(times))
            computed.append(compute_s)
    if not tails or prompts == 1 or record.config.rules.starts_on == "round":
        return 0.0
    late = fmean(tails) - take_s - step_s
    return min(max(0.0, (late - fmean(computed) / prompts) / (1 - 1 / prompts)), fmean(computed), most_s)


def _delivery(record: RunTimes) -> tuple[float, float]:
    """(seconds from a group's last token to its outcome, seconds from there to the trainer's work on it if the trainer waits for it)."""
    ended: dict[int, float] = {}
    for span in record.sample_spans:
        ended[span.group] = max(ended.get(span.group, 0.0), span.ended_s)
    scoring = [record.scored_s[group] - ended[group] for group in _last_groups(record) if group in ended]
    outcomes = np.sort(np.array(list(record.scored_s.values())))
    taking = []
    for step in record.steps:
        backward, waited = step.metrics.get("first_backward_at"), step.metrics.get("wait_s", 0.0)
        if backward is not None and waited > WAITED * (waited + step.metrics.get("compute_s", 0.0)):
            before = outcomes[outcomes <= backward]
            if before.size:
                taking.append(backward - float(before[-1]))
    return _positive(scoring), median(taking) if taking else 0.0


def _last_groups(record: RunTimes) -> list[int]:
    """The last group to get its outcome among those that training waited for together: of each step, or of a round."""
    schedule, together = record.config.rules, defaultdict[int, list[int]](list)
    for step in record.steps:
        number = (step.step or 0) // (schedule.steps_per_version if schedule.starts_on == "round" else 1)
        together[number] += [planned.group for planned in step.plan if planned.group in record.scored_s]
    return [max(groups, key=record.scored_s.__getitem__) for groups in together.values() if groups]


def _arrival(record: RunTimes, *, load_s: float, prefill_s: float) -> float:
    """Seconds from a version's ledger entry to its use, without loading, by workers that were idle when it was published."""
    spans = _group_spans(record.sample_spans)
    return _positive(
        [
            later.started_s - record.versions[later.version] - load_s - prefill_s
            for earlier, later in pairwise(spans)
            if later.worker == earlier.worker
            and later.version > earlier.version
            and later.version in record.versions
            and earlier.ended_s <= record.versions[later.version] <= later.started_s
        ]
    )


def _positive(values: Sequence[float]) -> float:
    """Mean of the values, at least 0; 0 without any."""
    return max(0.0, fmean(values)) if values else 0.0


def times_as_json(work: Workload) -> Mapping[str, float]:
    """The measured times of a workload, by the names in which `penstock plan` reports them."""
    return {
        "decode_step_s": work.decode(work.concurrency), "begin_group_s": work.prefill_s, "load_version_s": work.load_s,
        "deliver_group_s": work.deliver_s, "take_group_s": work.take_s, "train_group_s": work.train_group_s,
        "train_token_s": work.train_token_s, "step_s": work.step_s, "between_steps_s": work.hold_s, "release_version_s": work.release_s,
        "publish_version_s": work.publish_s, "mean_length": work.lengths.mean, "filtered_share": work.filtered,
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The run's prompts under another schedule or with another number of rollout workers."""

    mode: str
    workers: int
    max_lag: int
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A recorded run, its simulation, and simulated variants."""

    run: str
    measured_s: float
    work: Workload
    outcome: Outcome
    variants: tuple[Variant, ...]

    @property
    def deviation(self) -> float:
        """Relative deviation of the simulated from the measured wall time."""
        return self.outcome.wall_s / self.measured_s - 1.0

    @property
    def best(self) -> Variant:
        """The fastest variant with as many rollout workers as the run had."""
        variants = [variant for variant in self.variants if variant.workers == self.work.engines]
        return min(variants, key=lambda variant: variant.outcome.wall_s)


def compare(record: RunTimes, *, run: str) -> WhatIf:
    """Simulate a recorded run as it was, and with every mode and several numbers of rollout workers.

    Raises `ValueError` if a simulation deadlocks.
    """
    work = workload(record)
    engines, swaps, own = work.engines, record.config.engine.swaps_in_flight, work.schedule
    variants = []
    for mode, preset in MODES.items():
        if preset.loads_at == "step" and not swaps:
            continue
        schedule = own if mode == own.mode else with_sizes(preset, own)
        for workers in sorted({max(1, engines // 2), engines, engines + 1, 2 * engines}):
            outcome = simulate(replace(work, schedule=schedule, engines=workers))
            variants.append(Variant(mode=mode, workers=workers, max_lag=schedule.max_lag, outcome=outcome))
    return WhatIf(run=run, measured_s=wall_s(record), work=work, outcome=simulate(work), variants=tuple(variants))


def as_json(comparison: WhatIf) -> dict[str, Any]:
    """The comparison as plain data."""
    return {
        "run": comparison.run,
        "mode": comparison.work.schedule.mode,
        "workers": comparison.work.engines,
        "measured_wall_s": comparison.measured_s,
        "simulated_wall_s": comparison.outcome.wall_s,
        "deviation": comparison.deviation,
        "times": dict(times_as_json(comparison.work)),
        "simulated": comparison.outcome.as_json(),
        "variants": [
            {
                "mode": variant.mode,
                "workers": variant.workers,
                "max_lag": variant.max_lag,
                "speedup": _speedup(comparison, variant),
                **variant.outcome.as_json(),
            }
            for variant in comparison.variants
        ],
    }


def as_text(comparison: WhatIf) -> str:
    """The run's measured times, the deviation of its simulation, and the variants."""
    work, best = comparison.work, comparison.best
    times: Mapping[str, float] = times_as_json(work)
    lines = [
        f"run {comparison.run}: {work.schedule.mode}, {work.engines} rollout workers, {work.steps} steps; first sample to last step took "
        f"{comparison.measured_s:.1f} s, simulated {comparison.outcome.wall_s:.1f} s ({comparison.deviation:+.1%})",
        "measured: " + ", ".join(f"{name.removesuffix('_s').replace('_', ' ')} {_time(name, value)}" for name, value in times.items()),
        f"with the same workers {best.mode} would be the fastest: {best.outcome.wall_s:.1f} s, {_speedup(comparison, best):.2f}x; "
        "more workers count as more machines, each as fast as one of this run",
        "",
    ]
    columns = ("mode", "rollout workers", "wall s", "speed-up", "trainer waits", "engines busy", "lag", "max lag")
    rows = [
        (
            variant.mode,
            str(variant.workers),
            f"{outcome.wall_s:,.1f}",
            f"{_speedup(comparison, variant):.2f}",
            f"{outcome.trainer_waiting_ratio:.0%}",
            f"{outcome.rollout_busy_share:.0%}",
            f"{outcome.lag_mean:.1f}",
            str(outcome.lag_max),
        )
        for variant in comparison.variants
        for outcome in [variant.outcome]
    ]
    return "\n".join(lines) + "\n" + table(columns, rows)


def _speedup(comparison: WhatIf, variant: Variant) -> float:
    return comparison.outcome.wall_s / variant.outcome.wall_s


def _time(name: str, value: float) -> str:
    """A measured time, share or length as text, by the ending of its name."""
    if not name.endswith("_s"):
        return f"{value:.0%}" if name.endswith("share") else f"{value:.1f}"
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"
