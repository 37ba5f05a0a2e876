"""A recorded run as a workload: the times of its phases and the lengths of its completions, measured from its log.

The rule: every time is that of this run on its machines; a phase that the log does not tell apart from another is counted once.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median

import numpy as np
import numpy.typing as npt

from penstock.infra.log import Log
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.observe.recorded_run import read_run
from penstock.pipeline.planning.lengths import recorded
from penstock.pipeline.planning.workload import DecodeTimes, Workload, linear
from penstock.pipeline.runtime.topic_reader import RunReader
from penstock.topics import metrics
from penstock.topics.ledger import Entry
from penstock.topics.samples import generated
from penstock.topics.wire.errors import Unusable

LEAST_STEPS = 3
"""Steps that a run needs before its times mean anything."""
UNLIKE = 1.2
"""Ratio of the most to the fewest samples side by side from which on the time of a decode step is fitted to their number."""
WAITED = 0.2
"""Share of a step in which its trainer waited, from which on it takes a group as soon as it can."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One sample: who drew it when, its tokens and the version it began under."""

    worker: str
    group: int
    started_s: float
    ended_s: float
    tokens: int
    version: int
    whole: bool
    """False for an aborted one."""


@dataclass(slots=True, kw_only=True)
class Record:
    """What a run's log says of its times."""

    config: Config
    draws: list[Draw] = field(default_factory=list)
    scored_s: dict[int, float] = field(default_factory=dict)
    """Group -> when its outcome was known."""
    filtered: dict[int, bool] = field(default_factory=dict)
    steps: list[Entry] = field(default_factory=list)
    versions: dict[int, float] = field(default_factory=dict)
    """Version -> when its ledger entry was written."""
    load_s: dict[str, float] = field(default_factory=dict)
    """Rollout worker -> its time for loading versions, in all."""


def read(log: Log, run: str) -> Record:
    """Read a run, finished or not. Raises `ValueError` for a run without enough steps, `LogError`."""
    found = read_run(log, run)
    record = Record(config=found.config)
    for sample in found.reader.samples():
        if (rollout := sample.payload) is not None:
            span = rollout.started_ns / 1e9, rollout.ended_ns / 1e9
            record.draws.append(
                Draw(rollout.worker, rollout.group, *span, len(generated(rollout)), rollout.version_min, rollout.finish != "abort")
            )
    for group in found.reader.groups():
        if group.payload is not None:
            record.scored_s[group.payload.group] = group.payload.scored_ns / 1e9
            record.filtered[group.payload.group] = group.payload.outcome == "filtered"
    for entry in found.reader.entries():
        if entry.kind == "step":
            record.steps.append(entry)
        elif entry.kind == "version" and entry.version is not None:
            record.versions[entry.version] = entry.time_ns / 1e9
    record.load_s = _load_times(found.reader)
    if len(record.steps) < LEAST_STEPS:
        raise ValueError(f"run {run} has {len(record.steps)} steps: {LEAST_STEPS} are needed to take its times")
    return record


def _load_times(reader: RunReader) -> dict[str, float]:
    newest: dict[tuple[str, str], float] = {}
    for message in reader.records("metrics"):
        try:
            measured = metrics.read(message, run=reader.run)[1]
        except Unusable:
            continue
        if measured.role == "rollout" and "load_s" in measured.values:
            newest[measured.worker, measured.incarnation] = measured.values["load_s"]
    total: dict[str, float] = defaultdict(float)
    for (worker, _), seconds in newest.items():
        total[worker] += seconds
    return dict(total)


def wall_s(record: Record) -> float:
    """First sample begun to last step done."""
    begun = min(step.metrics["first_sample_at"] for step in record.steps if "first_sample_at" in step.metrics)
    return record.steps[-1].time_ns / 1e9 - begun


def workload(record: Record) -> Workload:
    """The run with its measured times: simulated, it takes about `wall_s`."""
    config, schedule = record.config, record.config.rules
    side_by_side = config.engine.continuous_batching
    concurrency = config.rollout.concurrency if side_by_side else schedule.samples_begun
    decode, begin_s, pace = _side_by_side(record.draws) if side_by_side else _by_group(record.draws, rows=concurrency)
    release_s, hold_s, step_s = _after_steps(record)
    deliver_s, take_s = _delivery(record)
    group_s, token_s, step_pace = _training(record)
    computed = fmean(step.metrics.get("compute_s", 0.0) for step in record.steps)
    update_s = _update(record, take_s=take_s, step_s=step_s, most_s=computed)
    share = 1.0 - update_s / computed if computed else 1.0
    loads = len({(draw.worker, draw.version) for draw in record.draws})
    load_s = sum(record.load_s.values()) / max(1, loads)
    return Workload(
        schedule=schedule,
        steps=len(record.steps),
        lengths=recorded(_lengths(record.draws, samples=schedule.samples_per_prompt), name="recorded"),
        engines=len({draw.worker for draw in record.draws}),
        concurrency=concurrency,
        decode=decode,
        side_by_side=side_by_side,
        slots=config.slots,
        begin_s=begin_s,
        load_s=load_s,
        deliver_s=deliver_s,
        take_s=take_s,
        train_group_s=group_s * share,
        train_token_s=token_s * share,
        step_s=step_s + update_s,
        hold_s=hold_s,
        release_s=release_s,
        publish_s=_arrival(record, load_s=load_s, begin_s=begin_s),
        filtered=fmean(record.filtered.values()) if record.filtered else 0.0,
        filtered_groups=record.filtered,
        group_pace=pace,
        step_pace=step_pace,
    )


def _lengths(draws: Iterable[Draw], *, samples: int) -> dict[int, npt.NDArray[np.int64]]:
    """Group -> lengths of its samples, of groups that were drawn whole."""
    lengths: dict[int, list[int]] = defaultdict(list)
    for draw in draws:
        if draw.whole:
            lengths[draw.group].append(draw.tokens)
    return {group: np.array(tokens) for group, tokens in lengths.items() if len(tokens) >= samples}


def _by_group(draws: Sequence[Draw], *, rows: int) -> tuple[DecodeTimes, float, dict[int, float]]:
    """(time of a decode step, time to begin a group, pace of each group) of an engine that draws one group at a time.

    What passes between two groups of one version counts as the beginning of the second.
    """
    spans = _group_spans(draws)
    lengths, times = [span.tokens for span in spans], [span.ended_s - span.started_s for span in spans]
    step_s, begin_s = _line(lengths, times)
    if not step_s:  # groups that are all as long do not tell one from the other
        step_s, begin_s = sum(times) / max(1, sum(lengths)), 0.0
    gaps = [
        later.started_s - earlier.ended_s
        for earlier, later in pairwise(spans)
        if (later.worker, later.version) == (earlier.worker, earlier.version) and later.started_s >= earlier.ended_s
    ]
    pace = {span.group: max(1e-6, span.ended_s - span.started_s - begin_s) / (span.tokens * step_s) for span in spans if step_s}
    return DecodeTimes((float(rows),), (step_s,)), begin_s + (median(gaps) if gaps else 0.0), pace


def _group_spans(draws: Sequence[Draw]) -> list[Draw]:
    """A span for each group, from its first sample's begin to its last one's end, by worker and time; tokens are those of the longest."""
    members: dict[tuple[str, int], list[Draw]] = defaultdict(list)
    for draw in draws:
        members[draw.worker, draw.group].append(draw)
    spans = [
        Draw(
            worker,
            group,
            min(draw.started_s for draw in drawn),
            max(draw.ended_s for draw in drawn),
            max(draw.tokens for draw in drawn),
            min(draw.version for draw in drawn),
            True,
        )
        for (worker, group), drawn in members.items()
    ]
    return sorted(spans, key=lambda span: (span.worker, span.started_s))


def _side_by_side(draws: Sequence[Draw]) -> tuple[DecodeTimes, float, dict[int, float]]:
    """(time of a decode step by the number of samples, 0, no pace) of an engine that draws samples of several groups together."""
    counts, per_token, weights = [], [], []
    by_worker: dict[str, list[Draw]] = defaultdict(list)
    for draw in draws:
        by_worker[draw.worker].append(draw)
    for drawn in by_worker.values():
        starts, ends = (np.sort([getattr(draw, name) for draw in drawn]) for name in ("started_s", "ended_s"))
        edges = np.unique(np.concatenate([starts, ends]))
        active = np.searchsorted(starts, edges, side="right") - np.searchsorted(ends, edges, side="right")
        area = np.concatenate([[0.0], np.cumsum(active[:-1] * np.diff(edges))])
        for draw in drawn:
            if draw.tokens and draw.ended_s > draw.started_s:
                took = draw.ended_s - draw.started_s
                counts.append((np.interp(draw.ended_s, edges, area) - np.interp(draw.started_s, edges, area)) / took)
                per_token.append(took / draw.tokens)
                weights.append(draw.tokens)
    mean = float(np.average(per_token, weights=weights))
    if max(counts) < UNLIKE * min(counts):
        return DecodeTimes((1.0,), (mean,)) if max(counts) < 1.5 else linear(mean, 0.0), 0.0, {}
    each, base = _line(counts, per_token, weights=weights)
    return linear(base, each), 0.0, {}


def _line(x: Sequence[float], y: Sequence[float], *, weights: Sequence[float] | None = None) -> tuple[float, float]:
    """(slope, begin) of the straight line through the points by least squares, neither below 0."""
    share = np.ones(len(x)) if weights is None else np.asarray(weights, float)
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    x_mean, y_mean = np.average(xs, weights=share), np.average(ys, weights=share)
    spread = float((share * (xs - x_mean) ** 2).sum())
    slope = float((share * (xs - x_mean) * (ys - y_mean)).sum()) / spread if spread > 0 else 0.0
    slope = min(max(slope, 0.0), y_mean / x_mean if x_mean else 0.0)
    return float(slope), float(y_mean - slope * x_mean)


def _training(record: Record) -> tuple[float, float, dict[int, float]]:
    """(seconds for a group, seconds for a token of its completions, pace of each step) of the trainer."""
    tokens: dict[int, int] = defaultdict(int)
    for draw in record.draws:
        tokens[draw.group] += draw.tokens
    sizes = [sum(tokens[planned.group] for planned in step.plan) for step in record.steps]
    computed = [step.metrics.get("compute_s", 0.0) for step in record.steps]
    token_s, step_s = _line(sizes, computed)
    usual = [step_s + token_s * size for size in sizes]
    pace = {number: took / expected for number, (took, expected) in enumerate(zip(computed, usual, strict=True)) if expected}
    return step_s / record.config.schedule.prompts_per_step, token_s, pace


def _after_steps(record: Record) -> tuple[float, float, float]:
    """(time to publish a version, time between two steps, time of a step beside waiting and computing)."""
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


def _update(record: Record, *, take_s: float, step_s: float, most_s: float) -> float:
    """The trainer's compute time that begins only with a step's last group: the rest of its micro-batches, and the optimizer.

    It is what passes from that group's outcome to the step's entry beyond a single group's share, in steps that waited for it,
    and at most `most_s`, what a step computes in the mean over all.
    """
    prompts, tails, computed = record.config.schedule.prompts_per_step, [], []
    for step in record.steps:
        outcomes = [record.scored_s.get(planned.group) for planned in step.plan]
        known = [moment for moment in outcomes if moment is not None]
        compute_s = step.metrics.get("compute_s", 0.0)
        if len(known) == len(step.plan) and step.metrics.get("wait_s", 0.0) > WAITED * (step.metrics.get("wait_s", 0.0) + compute_s):
            tails.append(step.time_ns / 1e9 - max(known))
            computed.append(compute_s)
    if not tails or prompts == 1 or record.config.rules.starts_on == "round":
        return 0.0
    late = fmean(tails) - take_s - step_s
    return min(max(0.0, (late - fmean(computed) / prompts) / (1 - 1 / prompts)), fmean(computed), most_s)


def _delivery(record: Record) -> tuple[float, float]:
    """(from a group's last token to its outcome, from there to the trainer's work on it where the trainer waits for it)."""
    ended: dict[int, float] = {}
    for draw in record.draws:
        ended[draw.group] = max(ended.get(draw.group, 0.0), draw.ended_s)
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


def _last_groups(record: Record) -> list[int]:
    """Of the groups that training waited for together, the one whose outcome came last: of each step, or of a whole round."""
    schedule, together = record.config.rules, defaultdict[int, list[int]](list)
    for step in record.steps:
        number = (step.step or 0) // (schedule.steps_per_version if schedule.starts_on == "round" else 1)
        together[number] += [planned.group for planned in step.plan if planned.group in record.scored_s]
    return [max(groups, key=record.scored_s.__getitem__) for groups in together.values() if groups]


def _arrival(record: Record, *, load_s: float, begin_s: float) -> float:
    """From a version's ledger entry to its use beside loading, where a worker had nothing to draw when it was published."""
    spans = _group_spans(record.draws)
    return _positive(
        [
            later.started_s - record.versions[later.version] - load_s - begin_s
            for earlier, later in pairwise(spans)
            if later.worker == earlier.worker
            and later.version > earlier.version
            and later.version in record.versions
            and earlier.ended_s <= record.versions[later.version] <= later.started_s
        ]
    )


def _positive(values: Sequence[float]) -> float:
    return max(0.0, fmean(values)) if values else 0.0


def as_json(work: Workload) -> Mapping[str, float]:
    """The measured times, in seconds."""
    return {
        "decode_step_s": work.decode(work.concurrency),
        "begin_group_s": work.begin_s,
        "load_version_s": work.load_s,
        "deliver_group_s": work.deliver_s,
        "take_group_s": work.take_s,
        "train_group_s": work.train_group_s,
        "train_token_s": work.train_token_s,
        "step_s": work.step_s,
        "between_steps_s": work.hold_s,
        "release_version_s": work.release_s,
        "publish_version_s": work.publish_s,
        "mean_length": work.lengths.mean,
        "filtered_share": work.filtered,
    }
