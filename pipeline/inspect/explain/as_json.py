"""Trace of one prompt group as plain data: prompt, samples, rewards, outcome, training, and the time of each stage.

Every figure is in a record or follows from records by the run's own functions; an unknown one is None.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from penstock.infra.errors import PenstockError
from penstock.infra.log import Log
from penstock.pipeline.inspect.explain.gradient_share import SampleShare, StepShares, clipped, left_out, shares
from penstock.pipeline.inspect.explain.group_history import GroupHistory, read_group, shown_place, stale_facts, why
from penstock.pipeline.inspect.explain.stage_times import stages
from penstock.pipeline.inspect.explain.turn_times import summed, turn_times
from penstock.pipeline.inspect.html.token_texts import TokenTexts
from penstock.pipeline.inspect.recorded_run import StoredDeadLetter, read_run
from penstock.pipeline.inspect.report.rebases import rebased_fields
from penstock.pipeline.learner.ledger_history import read_planned
from penstock.pipeline.runtime.topic_reader import Read
from penstock.pipeline.scheduling import rules
from penstock.topics.groups import Group, ScoredSample
from penstock.topics.ledger import Entry
from penstock.topics.rollouts import Rollout
from penstock.topics.samples import generated
from penstock.topics.wire.record import Record

NS = 1e9


def explain(log: Log, run: str, group: int, *, notify: Callable[[str], None], trust_code: bool = False) -> dict[str, Any]:
    """Read everything in the log about one group, as plain data for JSON.

    Raises `ValueError` for a run or group that does not exist, `LogError` for a group whose prompt the broker has deleted.
    """
    return life(read_group(read_run(log, run), group, notify=notify), notify=notify, trust_code=trust_code)


def life(history: GroupHistory, *, notify: Callable[[str], None], trust_code: bool = False) -> dict[str, Any]:
    """Trace of a group whose records were read, as plain data for JSON. Raises `LogError`."""
    step, shares_of = _step(history, notify=notify, trust_code=trust_code) if history.step is not None else (None, {})
    return {
        "run": history.run.run,
        "group": history.number,
        "fate": history.fate,
        "why": why(history),
        "prompt": _prompt(history.prompt_read),
        "samples": _samples(history, shares_of),
        "rewards": _rewards(history.group),
        "outcome": _outcome(history.outcome),
        "stale": stale_facts(history),
        "step": step,
        "version": _version(history.version),
        "times": [asdict(stage) for stage in stages(history.timestamps)],
        "moments": asdict(history.timestamps),
        "records": _records(history),
        "gone": list(history.gone),
        "dead_letters": [_dead_letter(dead_letter) for dead_letter in history.dead_letters],
    }


def _fields(holder: object, *names: str) -> dict[str, Any]:
    return {name: getattr(holder, name) for name in names}


def _prompt(read: Read[Any] | None) -> dict[str, Any] | None:
    if read is None or (prompt := read.payload) is None:
        return None
    return {
        "place": shown_place(read.record),
        "admitted_s": prompt.created_ns / NS,
        **_fields(prompt, "slot", "min_version", "samples_per_prompt", "epoch", "row"),
        "tokens": len(prompt.token_ids),
        **_fields(prompt, "prompt", "messages", "columns"),
    }


def _samples(history: GroupHistory, shares_of: Mapping[int, SampleShare]) -> list[dict[str, Any]]:
    """All samples of the group by number; `counts` is True for those among its K."""
    first_rollouts, counted, scored = history.first_rollouts, history.counted, history.scored
    rollouts = {number: rollout for number, (_, rollout) in first_rollouts.items()} | counted
    names, trained = history.group.reward_names if history.group else (), history.step is not None
    times_of = turn_times(history.run.reader.log, history.run.run, group=history.number, partition=history.partition)
    texts = TokenTexts(history.run.config.model.path, history.run.tokenizer_digest) if rollouts.keys() - scored.keys() else None
    rows = []
    for number, rollout in sorted(rollouts.items()):
        record, result, share = first_rollouts.get(number, (None,))[0], scored.get(number), shares_of.get(number)
        rows.append(
            {
                "sample": number,
                "place": record and shown_place(record),
                "worker": rollout.worker,
                "counts": number in counted,
                "versions": _spans(rollout),
                "started_s": rollout.started_ns / NS,
                "ended_s": rollout.ended_ns / NS,
                "written_s": record and record.timestamp_ms / 1000,
                "tokens": len(generated(rollout)),
                **_fields(rollout, "finish", "temperature", "environment", "environment_version", "environment_seed"),
                "turns": _turns(rollout),
                "turn_times": [asdict(time) for time in times_of.get(number, [])] or None,
                "time_spent": summed(times_of[number], rollout) if number in times_of else None,
                "completion": result.completion if result else texts and texts.completion(generated(rollout)),
                "reward": result and result.reward,
                "components": result and dict(zip(names, result.components, strict=False)),
                "reward_error": result and result.reward_error,
                "logged": json.loads(result.logged) if result and result.logged else None,
                "trained": _trained(rollout, share, result) if trained else None,
                "advantage": share and share.advantage,
                "trained_tokens": share and share.tokens,
                "micro_batch": share and share.micro_batch,
                "token_weight": share and share.token_weight,
                "weight": share and share.weight,
            }
        )
    return rows


def _turns(rollout: Rollout) -> list[dict[str, Any]] | None:
    """The turns of a trajectory; None for a single completion."""
    if rollout.turns is None:
        return None
    return [
        {"source": turn.source, "from": turn.start, "to": turn.end, "finish": turn.finish, "reward": turn.reward} for turn in rollout.turns
    ]


def _spans(rollout: Rollout) -> list[dict[str, int]]:
    starts = rollout.span_starts.tolist()
    spans = zip(rollout.span_versions.tolist(), starts, [*starts[1:], len(rollout.token_ids)], strict=True)
    return [{"version": version, "from": low, "to": high} for version, low, high in spans]


def _trained(rollout: Rollout, share: SampleShare | None, scored: ScoredSample | None) -> str:
    """`yes`, or the reason why a sample of a trained group is not trained."""
    if share is not None:
        return "yes" if share.tokens else "no token of it is in the loss mask"
    if scored is not None and scored.reward is None:
        return scored.reward_error or "no reward: every reward function returned None"
    if rollout.finish == "abort":
        return "aborted"
    return "out of tokens, algorithm.truncated = mask" if len(rollout.token_ids) else "empty"


def _rewards(group: Group | None) -> dict[str, Any] | None:
    if group is None or not group.samples:
        return None
    return {
        "names": list(group.reward_names),
        "weights": list(group.reward_weights),
        "mean": sum(group.rewards) / len(group.rewards) if group.rewards else None,
        "lowest": min(group.rewards, default=None),
        "highest": max(group.rewards, default=None),
        "metrics": json.loads(group.metrics) if group.metrics else None,
    }


def _outcome(read: Read[Group] | None) -> dict[str, Any] | None:
    if read is None or read.headers is None:
        return None
    return {
        "reason": read.payload and read.payload.reason,
        "place": shown_place(read.record),
        "scored_s": read.payload and read.payload.scored_ns / NS,
        **_fields(read.headers, "outcome", "parts", "worker", "policy_version_min", "policy_version_max"),
        **_fields(read.headers, "samples", "tokens", "reward_mean", "sha256"),
    }


def _step(history: GroupHistory, *, notify: Callable[[str], None], trust_code: bool) -> tuple[dict[str, Any], Mapping[int, SampleShare]]:
    entry, config, oldest = history.step, history.run.config, history.policy_version_min
    assert entry is not None
    notify(f"reading the {len(entry.plan)} groups of step {entry.step}")
    step_shares, problem = _shares(history, entry, trust_code=trust_code)
    mine = step_shares.of(history.number) if step_shares else {}
    plan = [planned.group for planned in entry.plan]
    return {
        "step": entry.step,
        "entry": entry.seq,
        "learner_version": entry.version,
        "lag": None if oldest is None else rules.lag(learner_version=entry.version or 0, policy_version_min=oldest),
        "committed_s": entry.time_ns / NS,
        "place": plan.index(history.number),
        "plan": plan,
        "boundaries": list(entry.boundaries),
        "micro_batches": sorted({share.micro_batch for share in mine.values() if share.micro_batch is not None}),
        **_fields(config, "aggregate", "advantage"),
        "loss_name": config.algorithm.loss,
        "denominator": step_shares and step_shares.denominator,
        "tokens": step_shares and step_shares.tokens,
        "group_weight": step_shares and sum(abs(share.weight) for share in mine.values()),
        "step_weight": step_shares and sum(abs(share.weight) for share in step_shares.samples),
        "clipped": clipped(entry, config),
        "left_out": [problem] if problem else left_out(config),
        "metrics": dict(entry.metrics),
        "rebased": [rebased_fields(other) for other in history.run.past.entries if other.kind == "rebased"],
    }, mine


def _shares(history: GroupHistory, entry: Entry, *, trust_code: bool) -> tuple[StepShares | None, str | None]:
    run = history.run
    try:
        plan = read_planned(run.reader.log, run.run, entry.plan)
        return shares(plan, config=run.config, boundaries=entry.boundaries, trust_code=trust_code), None
    except (PenstockError, ValueError) as error:  # deleted, or an own advantage that is not here: the rest of the trace is complete
        return None, f"advantages and gradient weights cannot be computed: {error}"


def _version(entry: Entry | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    return {
        "version": entry.version,
        "steps": entry.step,
        "digest": entry.digest,
        "published_s": entry.time_ns / NS,
        "publish_s": entry.metrics.get("publish_s"),
        "bytes": entry.metrics.get("bytes"),
    }


def _records(history: GroupHistory) -> list[dict[str, Any]]:
    """Every record about the group: it counts, is a duplicate, or is unusable."""

    def row(record: Record, text: str, *, counts: bool) -> dict[str, Any]:
        return {"place": shown_place(record), "time_s": record.timestamp_ms / 1000, "is": text, "counts": counts}

    rows = [row(read.record, "prompt", counts=not read.repeats) for read in history.prompts if read.payload is not None]
    counted = history.counted
    for sample in history.samples:
        if (rollout := sample.payload) is not None:
            is_counted = rollout.sample in counted
            rows.append(
                row(sample.record, f"sample {rollout.sample}" if is_counted else "surplus", counts=is_counted and not sample.repeats)
            )
    for outcome in history.outcomes:
        if outcome.headers is not None:
            text, counts = f"outcome {outcome.headers.outcome}", outcome is history.outcome
            rows += [row(record, text, counts=counts) for record in outcome.records]
    return rows + [row(read.records[-1], f"unusable: {read.problem}", counts=False) for read in history.unusable]


def _dead_letter(stored: StoredDeadLetter) -> dict[str, Any]:
    """A dead letter without the record in it."""
    dead_letter = stored.dead_letter
    return {
        "offset": stored.offset,
        "of": shown_place(dead_letter),
        **_fields(dead_letter, "kind", "reason", "worker"),
        "time_s": dead_letter.time_ns / NS,
    }
