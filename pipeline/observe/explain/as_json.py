"""The life of one prompt as plain data: admitted, drawn, judged, and why it was trained, dropped or is still waited for.

The rule: every number is one that stands in a record, or follows from records by the run's own functions; an unknown one is None.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from penstock.infra.errors import PenstockError
from penstock.infra.log import Log
from penstock.pipeline.learner.ledger_history import read_planned
from penstock.pipeline.observe.explain.gradient_share import SampleShare, StepShares, clipped, left_out, shares
from penstock.pipeline.observe.explain.group_history import Told, sort_out, stale_facts, why
from penstock.pipeline.observe.explain.group_records import GroupRecords, Letter, Run, place_of, read_group, read_run
from penstock.pipeline.observe.explain.stage_times import stages
from penstock.pipeline.scheduling import rules
from penstock.topics.groups import Group
from penstock.topics.ledger import Entry
from penstock.topics.rollouts import Rollout
from penstock.topics.wire.record import Record

NS = 1e9


def explain(log: Log, run: str, group: int, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything the log knows of one group, ready for JSON.

    Raises `ValueError` for a run or group that does not exist, `LogError` for a group whose prompt the broker has deleted.
    """
    found = read_run(log, run)
    return tell(log, found, read_group(log, found, group, say=say), say=say)


def tell(log: Log, found: Run, records: GroupRecords, *, say: Callable[[str], None]) -> dict[str, Any]:
    """The life of a group whose records were read. Raises `LogError`."""
    told = sort_out(found, records)
    step, of_mine = _step(log, told, say=say) if told.step is not None else (None, {})
    return {
        "run": found.run,
        "group": records.group,
        "fate": told.fate,
        "why": why(told),
        "prompt": _prompt(told),
        "samples": _samples(told, of_mine),
        "rewards": _rewards(told.group),
        "outcome": _outcome(told),
        "stale": stale_facts(told),
        "step": step,
        "version": _version(told.version),
        "times": [asdict(stage) for stage in stages(told.moments)],
        "moments": asdict(told.moments),
        "records": _records(told),
        "dead_letters": [letter_facts(one) for one in told.letters],
    }


def _prompt(told: Told) -> dict[str, Any] | None:
    prompt, record = told.prompt, told.prompt_record
    if prompt is None or record is None:
        return None
    return {
        "place": place_of(record),
        "admitted_s": prompt.created_ns / NS,
        "slot": prompt.slot,
        "min_version": prompt.min_version,
        "samples_per_prompt": prompt.samples_per_prompt,
        "epoch": prompt.epoch,
        "row": prompt.row,
        "tokens": len(prompt.token_ids),
        "prompt": prompt.prompt,
        "messages": prompt.messages,
        "columns": prompt.columns,
    }


def _samples(told: Told, mine: Mapping[int, SampleShare]) -> list[dict[str, Any]]:
    """Every sample that was drawn, by number; `counts` says whether it is one of the group's K."""
    counted, scored = told.counted, told.scored
    places = {number: record for number, (record, _) in told.records.drawn.items()}
    drawn = {number: rollout for number, (_, rollout) in told.records.drawn.items()} | counted
    names = told.group.reward_names if told.group else ()
    rows = []
    for number, rollout in sorted(drawn.items()):
        ends = [*rollout.span_starts.tolist()[1:], len(rollout.token_ids)]
        spans = zip(rollout.span_versions.tolist(), rollout.span_starts.tolist(), ends, strict=True)
        judged, share = scored.get(number), mine.get(number)
        rows.append(
            {
                "sample": number,
                "place": place_of(places[number]) if number in places else None,
                "worker": rollout.worker,
                "counts": number in counted,
                "versions": [{"version": version, "from": low, "to": high} for version, low, high in spans],
                "started_s": rollout.started_ns / NS,
                "ended_s": rollout.ended_ns / NS,
                "written_s": places[number].timestamp_ms / 1000 if number in places else None,
                "tokens": len(rollout.token_ids),
                "finish": rollout.finish,
                "temperature": rollout.temperature,
                "completion": judged.completion if judged else None,
                "reward": judged.reward if judged else None,
                "components": dict(zip(names, judged.components, strict=False)) if judged else None,
                "trained": _trained(rollout, share) if told.step else None,
                "advantage": share.advantage if share else None,
                "trained_tokens": share.tokens if share else None,
                "micro_batch": share.micro_batch if share else None,
                "token_weight": share.token_weight if share else None,
                "weight": share.weight if share else None,
            }
        )
    return rows


def _trained(rollout: Rollout, share: SampleShare | None) -> str:
    """yes, or why a sample of a trained group is not trained."""
    if share is not None:
        return "yes" if share.tokens else "no token of it is in the loss mask"
    if rollout.finish == "abort":
        return "aborted"
    return "out of tokens, algorithm.truncated = mask" if len(rollout.token_ids) else "empty"


def _rewards(group: Group | None) -> dict[str, Any] | None:
    if group is None or not group.samples:
        return None
    return {
        "names": list(group.reward_names),
        "weights": list(group.reward_weights),
        "mean": sum(group.rewards) / len(group.rewards),
        "lowest": min(group.rewards),
        "highest": max(group.rewards),
    }


def _outcome(told: Told) -> dict[str, Any] | None:
    if told.outcome is None:
        return None
    headers, group = told.outcome.headers, told.group
    return {
        "outcome": headers.outcome,
        "reason": group.reason if group else None,
        "place": place_of(told.outcome.records[0]),
        "parts": headers.parts,
        "worker": headers.worker,
        "scored_s": group.scored_ns / NS if group else None,
        "policy_version_min": headers.policy_version_min,
        "policy_version_max": headers.policy_version_max,
        "samples": headers.samples,
        "tokens": headers.tokens,
        "reward_mean": headers.reward_mean,
        "sha256": headers.sha256,
    }


def _step(log: Log, told: Told, *, say: Callable[[str], None]) -> tuple[dict[str, Any], Mapping[int, SampleShare]]:
    entry, config = told.step, told.run.config
    assert entry is not None
    say(f"reading the {len(entry.plan)} groups of step {entry.step}")
    found, problem = _shares(log, told, entry)
    mine = found.of(told.records.group) if found else {}
    place = [planned.group for planned in entry.plan].index(told.records.group)
    oldest = told.outcome.headers.policy_version_min if told.outcome else None
    return {
        "step": entry.step,
        "entry": entry.seq,
        "learner_version": entry.version,
        "lag": None if oldest is None else rules.lag(learner_version=entry.version or 0, policy_version_min=oldest),
        "committed_s": entry.time_ns / NS,
        "place": place,
        "plan": [planned.group for planned in entry.plan],
        "boundaries": list(entry.boundaries),
        "micro_batches": sorted({share.micro_batch for share in mine.values() if share.micro_batch is not None}),
        "aggregate": config.aggregate,
        "advantage": config.advantage,
        "loss_name": config.algorithm.loss,
        "denominator": found.denominator if found else None,
        "tokens": found.tokens if found else None,
        "group_weight": sum(abs(share.weight) for share in mine.values()) if found else None,
        "step_weight": sum(abs(share.weight) for share in found.samples) if found else None,
        "clipped": clipped(entry, config),
        "left_out": [problem] if problem else left_out(config),
        "metrics": dict(entry.metrics),
    }, mine


def _shares(log: Log, told: Told, entry: Entry) -> tuple[StepShares | None, str | None]:
    try:
        plan = read_planned(log, told.run.run, entry.plan)
        return shares(plan, config=told.run.config, boundaries=entry.boundaries), None
    except (PenstockError, ValueError) as error:  # gone, or an own advantage that is not here: the rest of the story stands
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


def _records(told: Told) -> list[dict[str, Any]]:
    """Every record about the group, and whether it counts, says the same again, or cannot be used."""
    records, rows, seen = told.records, [], set[tuple[str, int]]()

    def row(record: Record, kind: str, number: int, says: str) -> dict[str, Any]:
        repeats = (kind, number) in seen
        seen.add((kind, number))
        return {"place": place_of(record), "time_s": record.timestamp_ms / 1000, "is": says, "counts": not repeats and says != "surplus"}

    for record, _ in records.prompts:
        rows.append(row(record, "prompt", 0, "prompt"))
    for record, rollout in records.samples:
        says = f"sample {rollout.sample}" if rollout.sample in told.counted else "surplus"
        rows.append(row(record, "sample", rollout.sample, says))
    for number, outcome in enumerate(records.outcomes):
        repeats = number > 0
        for record in outcome.records:
            rows.append({**row(record, f"outcome {number}", record.offset, f"outcome {outcome.headers.outcome}"), "counts": not repeats})
    for record, error in records.unusable:
        rows.append({"place": place_of(record), "time_s": record.timestamp_ms / 1000, "is": f"unusable: {error}", "counts": False})
    return rows


def letter_facts(found: Letter) -> dict[str, Any]:
    """A dead letter without the record in it."""
    letter = found.letter
    return {
        "offset": found.offset,
        "of": place_of(letter),
        "kind": letter.kind,
        "reason": letter.reason,
        "worker": letter.worker,
        "time_s": letter.time_ns / NS,
    }
