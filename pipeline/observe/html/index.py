"""What a page needs before anything is opened: the report, the curves, and a line of numbers for every group and sample.

The rule: a number a page computes with is a column; a text of the run is a JSON string, and never markup.
"""

import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from penstock.pipeline.observe.html.groups import Reader, short
from penstock.pipeline.observe.html.pack import LOGPROB_STEP, Column, smallest
from penstock.pipeline.observe.html.reading import MAX_TEXT, Story
from penstock.pipeline.observe.html.timeline import KINDS, Clock, activity_columns, interval_columns, scoring_columns, time_spent, timeline
from penstock.pipeline.observe.report.summary import fates
from penstock.pipeline.observe.run_view import RunView
from penstock.pipeline.observe.tables.timeline import Interval
from penstock.pipeline.runtime.roles import ROLES, order
from penstock.topics.samples import FINISHES

FATES = ("trained", "filtered", "stale", "failed", "abandoned", "unused", "open")
MARGIN_BYTES = 150_000
"""For the page's own code and for the notes of what was left out."""
TRIMMED_FROM = 24
"""Characters that all prompts have to begin with before the list leaves them out."""
SHOWN = 160
"""Characters of a prompt in the list."""


def index(reader: Reader, story: Story, *, report: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Column]]:
    """(facts, columns) of a page. Columns are named by what they are about: g groups, s samples, i intervals, a activities, m steps."""
    view = reader.view
    found = timeline(reader.rows, story)
    names = _workers(reader, found, story)
    workers = {name: place for place, name in enumerate(names)}
    clock = _clock(reader, found, story)
    labels, activities = activity_columns(story, workers=workers, clock=clock)
    causes, waits = interval_columns(found, workers=workers, clock=clock)
    prompts, groups = _groups(reader, workers=workers, clock=clock)
    columns = {
        **groups,
        **_samples(reader, workers=workers, clock=clock),
        **scoring_columns(reader.rows, found, clock=clock),
        **waits,
        **activities,
        **_steps(view, clock=clock),
    }
    facts = {
        "run": view.run,
        "report": report,
        "model": view.config.get("model", {}).get("path"),
        "algorithm": view.config.get("algorithm", {}),
        "data": view.config.get("data", {}).get("source"),
        "penstock": _version(),
        "made_ms": int(time.time() * 1000),
        "zero_ms": clock.zero_ns // 1_000_000,
        "tick_ms": clock.tick_ms,
        "fates": FATES,
        "finishes": FINISHES,
        "kinds": KINDS,
        "workers": [{"name": name, "role": view.workers[name].role if name in view.workers else name.partition("-")[0]} for name in names],
        "labels": labels,
        "causes": causes,
        "time_spent": time_spent(view, story),
        "roles": list(ROLES),
        "prompts": prompts,
        "reasons": {str(row.group): row.reason[:MAX_TEXT] for row in reader.rows if row.reason},
        "reward_names": [short(name) for name in reader.reward_names],
        "reward_weights": list(reader.reward_weights),
        "advantage": {"name": reader.advantages.name, "why_not": reader.advantages.why_not},
        "rewards": [[number * view.steps_per_version, number, tally.mean] for number, tally in sorted(view.rewards.items())],
        "evals": [
            [number * view.steps_per_version, number, found.values.get("greedy_accuracy"), found.values.get("sampled_accuracy")]
            for number, found in sorted(view.evals.items())
        ],
        "letters": [
            [one.kind, one.topic.removeprefix(f"{view.run}."), one.partition, one.offset, one.worker, one.time_ns // 1_000_000, one.reason]
            for one in story.letters
        ],
        "no_texts": reader.texts.why_not,
        "logprob_step": LOGPROB_STEP,
    }
    return facts, columns


def contents(reader: Reader) -> dict[str, Any]:
    """What of the run is in the page, once its pieces are final, and a note for everything that is not."""
    view, chunks = reader.view, reader.chunks
    texts = [row for row in reader.rows if row.place is not None and row.place.chunk in chunks.texts]
    detailed = [row for row in texts if row.place and row.place.chunk in chunks.tokens and row.group in reader.wanted.tokens]
    drawn = sum(sum(tokens.values()) for tokens in view.samples.values())
    counts = {
        "groups": [len(reader.rows), len(view.admitted | view.groups.keys())],
        "samples": [sum(len(row.rollouts) for row in reader.rows), sum(map(len, view.samples.values()))],
        "texts": [sum(len(row.rollouts) for row in texts), sum(map(len, view.samples.values()))],
        "tokens": [sum(one.tokens for row in detailed for one in row.rollouts), drawn],
    }
    said = [
        (counts["groups"], "{0} of {1} groups are listed, the newest; figures and curves are of the whole run."),
        (counts["texts"], "{0} of {1} samples have their texts here, the newest."),
        (counts["tokens"], "{0} of {1} tokens are here one by one, the newest."),
    ]
    notes = [text.format(*(f"{count:,}" for count in found)) for found, text in said if found[0] < found[1]]
    return {**counts, "left_out": notes}


def _workers(reader: Reader, found: list[Interval], story: Story) -> list[str]:
    """Everybody who is named anywhere, in the order of the pipeline."""
    names = set(reader.view.workers) | {one.worker for one in found} | {one.worker for one in story.activities}
    names |= {one.worker for row in reader.rows for one in row.rollouts} | {row.scorer for row in reader.rows if row.scorer}

    def place(name: str) -> tuple[int, int, str]:
        known = reader.view.workers.get(name)
        role = known.role if known else name.partition("-")[0]
        return order(role), len(name), name

    return sorted(names, key=place)


def _clock(reader: Reader, found: list[Interval], story: Story) -> Clock:
    """Time counts from when the run was registered."""
    moments = [one.ended for one in found] + [one.ended_ns for one in story.activities]
    moments += [row.scored_ns for row in reader.rows]
    record, opened = reader.view.record, reader.view.opened
    zero = record.created_ns if record else opened.time_ns if opened else min((one for one in moments if one), default=0)
    return Clock.of(zero_ns=zero, last_ns=max(moments, default=zero))


def _groups(reader: Reader, *, workers: Mapping[str, int], clock: Clock) -> tuple[list[str], dict[str, Column]]:
    """The texts of the list, each once, and a line for every group."""
    view, rows = reader.view, reader.rows
    step_of = {group: step.step for step in view.steps.values() for group in step.groups}
    fate_of = fates(view)
    cut = len(reader.common or "") if len(reader.common or "") >= TRIMMED_FROM and len({row.prompt for row in rows}) > 1 else 0
    texts: dict[str, int] = {}
    for row in rows:
        texts.setdefault(row.prompt[cut : cut + SHOWN], len(texts))
    none = np.iinfo(np.uint16).max
    columns: dict[str, Column] = {
        "g_number": np.array([row.group for row in rows], np.uint32),
        "g_fate": np.array([FATES.index(fate_of.get(row.group, "open")) for row in rows], np.uint8),
        "g_step": np.array([step_of.get(row.group, -1) for row in rows], np.int32),
        "g_reward": np.array([row.rewards.mean() if len(row.rewards) else np.nan for row in rows], np.float32),
        "g_size": np.array([len(row.rollouts) for row in rows], np.uint16),
        "g_chunk": np.array([row.place.chunk if row.place else none for row in rows], np.uint16),
        "g_slot": np.array([row.place.slot if row.place else none for row in rows], np.uint16),
        "g_prompt": smallest(np.array([texts[row.prompt[cut : cut + SHOWN]] for row in rows], np.int64)),
        "g_scorer": np.array([workers.get(row.scorer, none) for row in rows], np.uint16),
        "g_created": clock.ticks([row.created_ns for row in rows]),
        "g_detail": np.array([row.group in reader.wanted.tokens and row.place is not None for row in rows], np.uint8),
    }
    return list(texts), columns


def _samples(reader: Reader, *, workers: Mapping[str, int], clock: Clock) -> dict[str, Column]:
    """A line for every sample of the listed groups, group after group."""
    drawn = [one for row in reader.rows for one in row.rollouts]
    names = len(reader.reward_names)
    components = np.full((len(drawn), names), np.nan, np.float32)
    place = 0
    for row in reader.rows:
        for given in row.components:
            components[place, : len(given)] = [np.nan if value is None else value for value in given[:names]]
            place += 1
    rewards = [row.rewards for row in reader.rows]
    advantages = [row.advantages for row in reader.rows]
    return {
        "s_number": np.array([one.sample for one in drawn], np.uint16),
        "s_reward": np.concatenate(rewards).astype(np.float32) if rewards else np.zeros(0, np.float32),
        "s_advantage": np.concatenate(advantages) if advantages else np.zeros(0, np.float32),
        "s_tokens": np.array([one.tokens for one in drawn], np.uint32),
        "s_finish": np.array([FINISHES.index(one.finish) for one in drawn], np.uint8),  # type: ignore[arg-type]
        "s_worker": np.array([workers[one.worker] for one in drawn], np.uint16),
        "s_min": np.array([one.version_min for one in drawn], np.int32),
        "s_max": np.array([one.version_max for one in drawn], np.int32),
        "s_start": clock.ticks([one.started_ns for one in drawn]),
        "s_end": clock.ticks([one.ended_ns for one in drawn]),
        **{f"s_component{number}": components[:, number].copy() for number in range(names)},
    }


def _steps(view: RunView, *, clock: Clock) -> dict[str, Column]:
    """A line for every step, with all its metrics by name."""
    steps = [view.steps[number] for number in sorted(view.steps)]
    names = sorted({name for step in steps for name in step.metrics if not name.endswith("_at") and not name.startswith("tokens_at_lag_")})
    return {
        "m_step": np.array([step.step for step in steps], np.int32),
        "m_version": np.array([step.version for step in steps], np.int32),
        "m_time": clock.ticks([int(step.time_s * 1e9) for step in steps]),
        **{f"m_{name}": np.array([step.metrics.get(name, np.nan) for step in steps], np.float32) for name in names},
    }


def _version() -> str:
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "?"
