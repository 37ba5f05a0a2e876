"""Traces one prompt group as plain data, from its records and with the run's own advantage function. An unknown figure is None."""

import contextlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.infra.errors import PenstockError
from penstock.infra.log import Log
from penstock.pipeline.algorithms.registry import LOSSES
from penstock.pipeline.config.load import Config
from penstock.pipeline.inspect.explain.group_history import GroupHistory, read_group, record_name, stages, stale_facts, why
from penstock.pipeline.inspect.recorded_run import read_run
from penstock.pipeline.inspect.report.formats import rebased_fields
from penstock.pipeline.learner import micro_batches
from penstock.pipeline.learner.ledger_history import read_planned
from penstock.pipeline.learner.micro_batches import TokenSequence
from penstock.pipeline.runtime.topic_reader import Read, between
from penstock.pipeline.scheduling import rules
from penstock.topics.catalogue import topic_name
from penstock.topics.dead_letters import DeadLetter
from penstock.topics.groups import Group, ScoredSample
from penstock.topics.ledger import Entry
from penstock.topics.rollouts import Rollout, generated
from penstock.topics.turns import calls, replies
from penstock.topics.turns.calls import TurnKey
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record

NS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleShare:
    """Share of one trained sample in the gradient of its step."""

    group: int
    sample: int
    advantage: float
    tokens: int
    micro_batch: int | None
    """Index of the micro-batch; None if the ledger's boundaries do not cover the sample."""
    token_weight: float
    """Coefficient of each trained token's log-probability in the step's descent direction, before any importance ratio."""

    @property
    def weight(self) -> float:
        """`token_weight` summed over the sample's trained tokens."""
        return self.token_weight * self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShares:
    """Shares of all trained samples in the gradient of a step."""

    samples: tuple[SampleShare, ...]
    denominator: float
    """Divisor of the step's loss sum."""
    tokens: int

    def of(self, group: int) -> dict[int, SampleShare]:
        """Return sample number -> share, for the trained samples of one group."""
        return {share.sample: share for share in self.samples if share.group == group}


def explain(
    log: Log, run: str, group: int, *, notify: Callable[[str], None], trust_code: bool = False, partition: int | None = None
) -> dict[str, Any]:
    """Return what `penstock explain --json` prints about one group. `partition` has the group's records; if None, it is searched.

    Raises `ConfigError` for an unknown run or group, `LogError` for a deleted prompt.
    """
    return life(read_group(read_run(log, run), group, notify=notify, partition=partition), notify=notify, trust_code=trust_code)


def life(history: GroupHistory, *, notify: Callable[[str], None], trust_code: bool = False) -> dict[str, Any]:
    """Convert the records of a group to what `penstock explain --json` prints. Raises `LogError` if topics cannot be read."""
    step, shares_of = _step(history, notify=notify, trust_code=trust_code) if history.step is not None else (None, {})
    return {
        "run": history.run.run,
        "group": history.number,
        "status": history.status,
        "why": why(history),
        "prompt": _prompt(history.prompt_read),
        "samples": _samples(history, shares_of),
        "rewards": _rewards(history.group),
        "outcome": _outcome(history.outcome),
        "stale": stale_facts(history),
        "step": step,
        "version": _version(history.version),
        "times": stages(history.timestamps),
        "moments": history.timestamps,
        "records": _records(history),
        "gone": list(history.gone),
        "dead_letters": [_dead_letter(*stored) for stored in history.dead_letters.items()],
    }


def _fields(holder: object, *names: str) -> dict[str, Any]:
    """Return name -> value for these attributes of an object."""
    return {name: getattr(holder, name) for name in names}


def _prompt(read: Read[Any] | None) -> dict[str, Any] | None:
    """Return the facts about the group's prompt; None if it is missing or cannot be decoded."""
    if read is None or (prompt := read.payload) is None:
        return None
    return {
        "place": record_name(read.record),
        "admitted_s": prompt.created_ns / NS,
        **_fields(prompt, "slot", "min_version", "samples_per_prompt", "epoch", "row"),
        "tokens": len(prompt.token_ids),
        **_fields(prompt, "prompt", "messages", "columns"),
    }


def _samples(history: GroupHistory, shares_of: Mapping[int, SampleShare]) -> list[dict[str, Any]]:
    """Return a row per generated sample, by number; `counts` is True for the K samples that the group's outcome uses."""
    first_rollouts, counted, scored = history.first_rollouts, history.counted, history.scored
    rollouts = {number: rollout for number, (_, rollout) in first_rollouts.items()} | counted
    names, trained = history.group.reward_names if history.group else (), history.step is not None
    times_of = turn_times(history.run.reader.log, history.run.run, group=history.number, partition=history.partition)
    texts = None
    if rollouts.keys() - scored.keys():
        from penstock.pipeline.inspect.tables.token_texts import TokenTexts

        texts = TokenTexts(history.run.config.model.path, history.run.info.get("digests", {}).get("tokenizer"))
    rows = []
    for number, rollout in sorted(rollouts.items()):
        record, result, share = first_rollouts.get(number, (None,))[0], scored.get(number), shares_of.get(number)
        rows.append(
            {
                "sample": number,
                "place": record and record_name(record),
                "worker": rollout.worker,
                "counts": number in counted,
                "versions": _spans(rollout),
                "started_s": rollout.started_ns / NS,
                "ended_s": rollout.ended_ns / NS,
                "written_s": record and record.timestamp_ms / 1000,
                "tokens": len(generated(rollout)),
                **_fields(rollout, "finish", "temperature", "environment", "environment_version", "environment_seed"),
                "turns": _turns(rollout),
                "turn_times": times_of.get(number),
                "time_spent": summed(times_of[number], rollout) if number in times_of else None,
                "completion": result.completion if result else texts and texts.completion(generated(rollout)),
                "reward": result and result.reward,
                "components": result and dict(zip(names, result.components, strict=False)),
                "reward_error": result and result.reward_error,
                "logged": json.loads(result.logged) if result and result.logged else None,
                "trained": _trained(rollout, share, result) if trained else None,
                "trained_tokens": share and share.tokens,
                **{name: share and getattr(share, name) for name in ("advantage", "micro_batch", "token_weight", "weight")},
            }
        )
    return rows


def _turns(rollout: Rollout) -> list[dict[str, Any]] | None:
    """Return a row per turn of a trajectory, with its range of tokens; None for a single completion."""
    if rollout.turns is None:
        return None
    return [
        {"source": turn.source, "from": turn.start, "to": turn.end, "finish": turn.finish, "reward": turn.reward} for turn in rollout.turns
    ]


def _spans(rollout: Rollout) -> list[dict[str, int]]:
    """Return the policy version of each range of tokens: `version` generated the tokens `from` to before `to`."""
    starts = rollout.span_starts.tolist()
    spans = zip(rollout.span_versions.tolist(), starts, [*starts[1:], len(rollout.token_ids)], strict=True)
    return [{"version": version, "from": low, "to": high} for version, low, high in spans]


def _trained(rollout: Rollout, share: SampleShare | None, scored: ScoredSample | None) -> str:
    """Return `yes`, or the reason why a sample of a trained group is not trained."""
    if share is not None:
        return "yes" if share.tokens else "the loss mask excludes all tokens"
    if scored is not None and scored.reward is None:
        return scored.reward_error or "no reward: every reward function returned None"
    if rollout.finish == "abort":
        return "aborted"
    return "truncated, and algorithm.truncated = mask" if len(rollout.token_ids) else "empty"


def _rewards(group: Group | None) -> dict[str, Any] | None:
    """Return the reward functions, and mean and range of the rewards; None without a scored sample."""
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
    """Return the facts about the scorer's record of the group; None without one."""
    if read is None or read.headers is None:
        return None
    return {
        "reason": read.payload and read.payload.reason,
        "place": record_name(read.record),
        "scored_s": read.payload and read.payload.scored_ns / NS,
        **_fields(read.headers, "outcome", "parts", "worker", "policy_version_min", "policy_version_max"),
        **_fields(read.headers, "samples", "tokens", "reward_mean", "sha256"),
    }


def _step(history: GroupHistory, *, notify: Callable[[str], None], trust_code: bool) -> tuple[dict[str, Any], Mapping[int, SampleShare]]:
    """Return the facts about the step that was trained on the group, and sample number -> the sample's share in its gradient."""
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
    """Return the gradient shares of the step in a ledger entry, or None and the reason why they cannot be computed."""
    run = history.run
    try:
        plan = read_planned(run.reader.log, run.run, entry.plan)
        return shares(plan, config=run.config, boundaries=entry.boundaries, trust_code=trust_code), None
    except (PenstockError, ValueError) as error:  # e.g. deleted groups or a missing advantage function; the rest can be shown
        return None, f"advantages and gradient weights cannot be computed: {error}"


def _version(entry: Entry | None) -> dict[str, Any] | None:
    """Return the facts about the policy version after the group's step; None before it is published."""
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
    """Return a row per record of the group, with what it `is`; `counts` is False for duplicates and unusable records."""

    def row(record: Record, text: str, *, counts: bool) -> dict[str, Any]:
        return {"place": record_name(record), "time_s": record.timestamp_ms / 1000, "is": text, "counts": counts}

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


def _dead_letter(offset: int, dead_letter: DeadLetter) -> dict[str, Any]:
    return {
        "offset": offset,
        "of": record_name(dead_letter),
        **_fields(dead_letter, "kind", "reason", "worker"),
        "time_s": dead_letter.time_ns / NS,
    }


def shares(plan: Sequence[Group], *, config: Config, boundaries: Sequence[int] = (), trust_code: bool = False) -> StepShares:
    """Compute the share of each sample in a step's gradient. `plan` has the groups in order, `boundaries` the ends of the micro-batches.

    The weight of a trained token is A · c / D with the sample's advantage A, the token's weight c (`token_share`) and the step's
    denominator D. It equals -dL/dlogprob for every built-in loss without KL term if current, proximal and behaviour policy are equal.
    Raises `PluginError` if the user's advantage function is missing, `ValueError` if executing it requires `trust_code`.
    """
    function = micro_batches.advantage_function(config.advantage, trust_code=trust_code)
    advantages = micro_batches.combined_advantages(function, combine=config.algorithm.combine)
    rows = [row for group in plan for row in micro_batches.sequences(group, advantages=advantages, truncated=config.algorithm.truncated)]
    masks = [row.loss_mask[None] for row in rows]
    total = micro_batches.denominator(masks, plan, aggregate=config.aggregate, counts_untrained=config.counts_untrained)
    longest = config.max_completion_tokens

    def share(number: int, row: TokenSequence) -> SampleShare:
        tokens = int(row.loss_mask.sum())
        counts = micro_batches.token_share(tokens, aggregate=config.aggregate, max_tokens=longest) if tokens else 0.0
        batch = bisect_right(boundaries, number)
        return SampleShare(
            group=row.group,
            sample=row.sample,
            advantage=row.advantage,
            tokens=tokens,
            micro_batch=batch if batch < len(boundaries) else None,
            token_weight=row.advantage * counts / total if total else 0.0,
        )

    parts = tuple(share(number, row) for number, row in enumerate(rows))
    return StepShares(samples=parts, denominator=total, tokens=sum(part.tokens for part in parts))


def left_out(config: Config) -> list[str]:
    """Return sentences about effects that the gradient weights do not include because the log lacks the data."""
    algorithm, lines = config.algorithm, []
    if algorithm.loss not in LOSSES:
        lines.append(f"the custom loss {algorithm.loss} may use advantage and denominator in another way")
    if config.proximal != "current":
        ratio = "current / behaviour" if config.proximal == "behaviour" else "current / snapshot"
        lines.append(
            f"each token's ratio {ratio}, clipped at -{config.clip_low:g}/+{config.clip_high:g}, is not included: it depends on the "
            "learner's logprobs at that step, which are not in the log; `penstock replay train` recomputes them"
        )
    if config.correction != "none":
        lines.append(
            f"the correction weight {config.correction} (proximal / behaviour, bounded) is not included: it depends on the learner's "
            "logprobs; its mean over the step is the metric correction_weight"
        )
    if algorithm.reject_kl is not None:
        lines.append(
            f"sequences with a mean KL above reject_kl = {algorithm.reject_kl:g} have no gradient; this depends on the learner's logprobs"
        )
    if algorithm.value_lr is not None:
        lines.append("the value of each token, which is subtracted from the advantage, is not in the log (value_lr)")
    if algorithm.entropy_coef:
        lines.append(f"the entropy bonus (entropy_coef {algorithm.entropy_coef:g}) is not included; it depends on the learner's entropies")
    if algorithm.kl_coef and algorithm.kl_in == "reward":
        lines.append(
            f"rewards are shown as scored: the step subtracted kl_coef = {algorithm.kl_coef:g} times each sample's KL to the reference "
            "policy, whose logprobs are not in the log"
        )
    elif algorithm.kl_coef:
        lines.append(f"the KL term (kl_coef {algorithm.kl_coef:g}) is not included; it depends on the logprobs of the reference policy")
    return lines


def clipped(entry: Entry, config: Config) -> float | None:
    """Return the factor by which clipping to `trainer.max_grad_norm` scaled the step's gradient; None if its norm is unknown."""
    norm, limit = entry.metrics.get("grad_norm"), config.trainer.max_grad_norm
    if norm is None:
        return None
    return min(1.0, limit / (norm + 1e-6)) if norm else 1.0  # the 1e-6 is torch's (clip_grads_with_norm_)


def turn_times(log: Log, run: str, *, group: int, partition: int) -> Mapping[int, list[dict[str, Any]]]:
    """Return sample number -> a row with the times of each turn that has a reply; {} if turns do not pass through the log."""
    if log.partitions(topic_name(run, "calls")) is None:
        return {}
    requested: dict[TurnKey, int] = {}
    for record in _records_of(log, topic_name(run, "calls"), group, partition):
        with contextlib.suppress(Unusable):
            call = calls.read(record, run=run)[1]
            requested.setdefault(call.key, call.asked_ns)
    times: dict[int, list[dict[str, Any]]] = {}
    for record in _records_of(log, topic_name(run, "replies"), group, partition):
        with contextlib.suppress(Unusable):
            reply = replies.read(record, run=run)[1]
            if (requested_ns := requested.pop(reply.key, None)) is not None:
                seconds = {"asked_s": requested_ns / NS, "started_s": reply.started_ns / NS, "ended_s": reply.ended_ns / NS}
                times.setdefault(reply.sample, []).append({**_fields(reply, "turn", "attempt", "worker"), **seconds})
    return times


def summed(times: list[dict[str, Any]], rollout: Rollout) -> dict[str, float]:
    """Return a trajectory's seconds of waiting, generation and, unless it reuses turns of an earlier attempt, environment."""
    waited = sum(time["started_s"] - time["asked_s"] for time in times)
    generated = sum(time["ended_s"] - time["started_s"] for time in times)
    whole = (rollout.ended_ns - rollout.started_ns) / NS
    rest = {"environment_s": whole - waited - generated} if whole >= waited + generated else {}
    return {"waited_s": waited, "generating_s": generated, **rest}


def _records_of(log: Log, topic: str, group: int, partition: int) -> Iterator[Record]:
    tp = (topic, partition)
    records = between(log, tp, log.beginning_offsets([tp])[tp], log.end_offsets([tp])[tp])
    return (record for record in records if record.key == b"%d" % group)
