"""Index of the page: one row of numbers per group, sample and interval."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.pipeline.config.plugins import short_name
from penstock.pipeline.inspect.run_status import group_statuses, has_ended
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.tables.timeline import Interval, SampleNumbers
from penstock.pipeline.inspect.web.chunks import LOGPROB_STEP, Column, smallest
from penstock.pipeline.inspect.web.groups import GroupPages, Row
from penstock.pipeline.inspect.web.timeline import (
    KINDS,
    MAX_TEXT,
    Clock,
    RunHistory,
    activity_columns,
    interval_columns,
    scoring_columns,
    timeline,
)
from penstock.pipeline.runtime.roles import order
from penstock.pipeline.scheduling.rules import OPEN, STATUSES
from penstock.topics.dead_letters import DeadLetter
from penstock.topics.rollouts import FINISHES

NONE = np.iinfo(np.uint16).max
"""No value, in a uint16 column."""
TRIMMED_FROM = 24
"""Shortest common prefix of all prompts that the list leaves out, in characters."""
SHOWN = 160


def index(groups: GroupPages, history: RunHistory) -> tuple[dict[str, Any], dict[str, Column]]:
    """Return (facts, columns) of a page. A column's prefix names its table: g groups, s samples, i intervals, a activities."""
    view = groups.view
    spans = timeline(groups.rows, history)
    names = _workers(groups, spans, history)
    workers = {name: number for number, name in enumerate(names)}
    clock = _clock(groups, spans, history)
    labels, activities = activity_columns(history, workers=workers, clock=clock)
    causes, waits = interval_columns(spans, workers=workers, clock=clock)
    prompts, prompt_numbers = _prompts(groups)
    columns = {
        **_columns(_group_specs(groups, workers), groups.rows),
        "g_prompt": prompt_numbers,
        "g_created": clock.ticks([row.created_ns for row in groups.rows]),
        **_samples(groups, workers=workers, clock=clock),
        **scoring_columns(groups.rows, spans, clock=clock),
        **waits,
        **activities,
    }
    facts = {
        "run": view.run,
        "live": not has_ended(view),
        "zero_ms": clock.zero_ns // 1_000_000,
        "tick_ms": clock.tick_ms,
        "pauses": [clock.ticks([round(moment_s * 1e9) for moment_s in pause]).tolist() for pause in view.worked.pauses()],
        "statuses": (*STATUSES, OPEN),
        "finishes": FINISHES,
        "kinds": KINDS,
        "workers": [{"name": name, "role": _role(view, name)} for name in names],
        "labels": labels,
        "causes": causes,
        "prompts": prompts,
        "reasons": {str(row.group): row.reason[:MAX_TEXT] for row in groups.rows if row.reason},
        "reward_names": [short_name(name) for name in groups.reward_names],
        "reward_weights": list(groups.reward_weights),
        "advantage": {"name": groups.advantages.name, "why_not": groups.advantages.why_not},
        "no_texts": groups.texts.why_not,
        "logprob_step": LOGPROB_STEP,
    }
    return facts, columns


def dead_letter(run: str, refused: DeadLetter) -> dict[str, Any]:
    """Return a line of the list of dead letters, the records that workers have refused."""
    record = f"{refused.topic.removeprefix(f'{run}.')}/{refused.partition}/{refused.offset}"
    return {"kind": refused.kind, "record": record, "worker": refused.worker, "reason": refused.reason}


def contents(groups: GroupPages) -> dict[str, Any]:
    """Return [in the page, in the run] for groups, samples, texts and tokens, and in `left_out` a note per incomplete part.

    Call this once the chunks of texts and tokens have their final size.
    """
    view, chunks, rows = groups.view, groups.chunks, groups.rows
    texts = [row for row in rows if row.chunk_slot is not None and row.chunk_slot.chunk in chunks.texts]
    detailed = [row for row in texts if row.chunk_slot and row.chunk_slot.chunk in chunks.tokens and row.group in groups.selection.tokens]
    samples, tokens = sum(map(len, view.samples.values())), sum(sum(counts.values()) for counts in view.samples.values())
    counts = {
        "groups": [len(rows), len(group_statuses(view))],
        "samples": [sum(len(row.rollouts) for row in rows), samples],
        "texts": [sum(len(row.rollouts) for row in texts), samples],
        "tokens": [sum(sample.tokens for row in detailed for sample in row.rollouts), tokens],
    }
    notes = {
        "groups": "{0} of {1} groups are listed, the newest; figures and curves are of the whole run.",
        "texts": "{0} of {1} samples have their texts here, the newest.",
        "tokens": "{0} of {1} tokens are here one by one, the newest.",
    }
    omitted = [text.format(*(f"{count:,}" for count in counts[name])) for name, text in notes.items() if counts[name][0] < counts[name][1]]
    return {**counts, "left_out": omitted}


def _workers(groups: GroupPages, spans: Sequence[Interval], history: RunHistory) -> list[str]:
    """Return the names of all workers in any record, in the order of the pipeline."""
    names = {*groups.view.workers, *(span.worker for span in spans), *(activity.worker for activity in history.activities)}
    names |= {sample.worker for row in groups.rows for sample in row.rollouts} | {row.scorer for row in groups.rows if row.scorer}
    return sorted(names, key=lambda name: (order(_role(groups.view, name)), len(name), name))


def _role(view: RunView, worker: str) -> str:
    """Return a worker's role; one that has reported nothing is named after it."""
    return view.workers[worker].role if worker in view.workers else worker.partition("-")[0]


def _clock(groups: GroupPages, spans: Sequence[Interval], history: RunHistory) -> Clock:
    """Return the clock that counts ticks from the run's creation and fits the last moment of the page."""
    moments = [span.ended for span in spans] + [activity.ended_ns for activity in history.activities]
    moments += [row.scored_ns for row in groups.rows]
    record, opened = groups.view.record, groups.view.opened
    zero = record.created_ns if record else opened.time_ns if opened else min((moment for moment in moments if moment), default=0)
    return Clock.of(zero_ns=zero, last_ns=max(moments, default=zero))


def _columns(specs: Mapping[str, tuple[type[np.generic], Callable[[Any], Any]]], items: Sequence[Any]) -> dict[str, Column]:
    """Return a column [N] per spec (type, function of an item), over N items."""
    return {name: np.array([value(item) for item in items], kind) for name, (kind, value) in specs.items()}


def _prompts(groups: GroupPages) -> tuple[list[str], Column]:
    """Return the prompts in the list, each once and without the common prefix, and the index of each group's prompt."""
    rows, common = groups.rows, len(groups.common or "")
    cut = common if common >= TRIMMED_FROM and len({row.prompt for row in rows}) > 1 else 0
    numbers: dict[str, int] = {}
    column = [numbers.setdefault(row.prompt[cut : cut + SHOWN], len(numbers)) for row in rows]
    return list(numbers), smallest(np.array(column, np.int64))


def _group_specs(groups: GroupPages, workers: Mapping[str, int]) -> dict[str, tuple[type[np.generic], Callable[[Row], Any]]]:
    """Return column -> (type, value of a group) of the groups' table."""
    step_of = _step_of(groups.view)
    status_of_group, number_of = group_statuses(groups.view), {status: number for number, status in enumerate((*STATUSES, OPEN))}
    return {
        "g_number": (np.uint32, lambda row: row.group),
        "g_status": (np.uint8, lambda row: number_of[status_of_group[row.group]]),
        "g_step": (np.int32, lambda row: step_of.get(row.group, -1)),
        "g_reward": (np.float32, lambda row: _mean(row.rewards)),
        "g_size": (np.uint16, lambda row: len(row.rollouts)),
        "g_chunk": (np.uint16, lambda row: row.chunk_slot.chunk if row.chunk_slot else NONE),
        "g_slot": (np.uint16, lambda row: row.chunk_slot.slot if row.chunk_slot else NONE),
        "g_scorer": (np.uint16, lambda row: workers.get(row.scorer, NONE)),
        "g_detail": (np.uint8, lambda row: row.group in groups.selection.tokens and row.chunk_slot is not None),
    }


def _mean(rewards: npt.NDArray[np.float64]) -> float:
    """Return the mean over the samples with a reward; NaN if none has one."""
    scored = rewards[~np.isnan(rewards)]
    return float(scored.mean()) if len(scored) else math.nan


def _step_of(view: RunView) -> dict[int, int]:
    return {group: step.step for step in view.steps.values() for group in step.groups}


def _samples(groups: GroupPages, *, workers: Mapping[str, int], clock: Clock) -> dict[str, Column]:
    """Return the columns of the samples' table, with a row per sample of the listed groups, group after group."""
    samples = [sample for row in groups.rows for sample in row.rollouts]
    specs: dict[str, tuple[type[np.generic], Callable[[SampleNumbers], Any]]] = {
        "s_number": (np.uint16, lambda sample: sample.sample),
        "s_tokens": (np.uint32, lambda sample: sample.tokens),
        "s_finish": (np.uint8, lambda sample: FINISHES.index(sample.finish)),
        "s_worker": (np.uint16, lambda sample: workers[sample.worker]),
        "s_min": (np.int32, lambda sample: sample.version_min),
        "s_max": (np.int32, lambda sample: sample.version_max),
    }
    nothing = np.zeros(0, np.float32)
    return {
        **_columns(specs, samples),
        "s_reward": np.concatenate([nothing, *(row.rewards for row in groups.rows)]).astype(np.float32),
        "s_advantage": np.concatenate([nothing, *(row.advantages for row in groups.rows)]),
        "s_start": clock.ticks([sample.started_ns for sample in samples]),
        "s_end": clock.ticks([sample.ended_ns for sample in samples]),
        **_components(groups),
    }


def _components(groups: GroupPages) -> dict[str, Column]:
    """Return a column per reward function; NaN for samples that it did not score."""
    components = [values for row in groups.rows for values in row.components]
    table = np.full((len(components), len(groups.reward_names)), np.nan, np.float32)
    for line, values in zip(table, components, strict=True):
        for number, value in enumerate(values[: len(line)]):
            line[number] = np.nan if value is None else value
    return {f"s_component{number}": column.copy() for number, column in enumerate(table.T)}


def component_means(groups: GroupPages) -> dict[str, list[tuple[int, float | None]]]:
    """Return reward function -> (step, mean over its samples, None if it applied to none); {} for a single function."""
    step_of, names = _step_of(groups.view), [short_name(name) for name in groups.reward_names]
    by_step: dict[int, list[tuple[float | None, ...]]] = {}
    for row in groups.rows:
        if row.group in step_of:
            by_step.setdefault(step_of[row.group], []).extend(row.components)
    curves: dict[str, list[tuple[int, float | None]]] = {name: [] for name in names}
    for step, components in sorted(by_step.items()):
        for number, curve in enumerate(curves.values()):
            values = [scores[number] for scores in components if number < len(scores)]
            applicable = [value for value in values if value is not None]
            curve.append((step, float(np.mean(applicable)) if applicable else None))
    return curves if len(curves) > 1 else {}
