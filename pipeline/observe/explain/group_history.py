"""A group's records sorted out: which of them count, how it ended, and why.

The rule: fates are those of the report; the reason is what the scorer, the ledger or the schedule's integers say.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.pipeline.observe.explain.group_records import GroupRecords, Letter, Outcome, Run, claims
from penstock.pipeline.observe.explain.stage_times import Moments, Standing, moments_of, waits_for
from penstock.pipeline.scheduling import rules
from penstock.topics.groups import Group, ScoredSample
from penstock.topics.ledger import Entry
from penstock.topics.prompts import Prompt
from penstock.topics.rollouts import Rollout
from penstock.topics.wire.record import Record

NS = 1e9
OF_GROUPS = ("prompts", "rollouts", "groups")
"""Topics whose records are about a group; the key of others is something else."""


@dataclass(slots=True, kw_only=True)
class Told:
    """A group's records, sorted out: which of them count."""

    run: Run
    records: GroupRecords
    prompt: Prompt | None
    prompt_record: Record | None
    outcome: Outcome | None
    step: Entry | None
    stale: Entry | None
    version: Entry | None
    """The entry of the version that its step led to."""

    @property
    def group(self) -> Group | None:
        """The outcome's payload, where there is one that can be read."""
        return self.outcome.group if self.outcome else None

    @property
    def scored(self) -> Mapping[int, ScoredSample]:
        """Sample -> what the reward functions gave it."""
        return {one.rollout.sample: one for one in self.group.samples} if self.group else {}

    @property
    def counted(self) -> dict[int, Rollout]:
        """Sample -> the draw that counts: those of the outcome, else the first ones in the log."""
        if self.scored:
            return {number: one.rollout for number, one in sorted(self.scored.items())}
        wanted = self.prompt.samples_per_prompt if self.prompt else self.run.config.rules.samples_per_prompt
        first = sorted(self.records.drawn.values(), key=lambda drawn: drawn[0].offset)[:wanted]
        return {rollout.sample: rollout for _, rollout in sorted(first, key=lambda drawn: drawn[1].sample)}

    @property
    def complete(self) -> bool:
        """Whether as many samples are there as the prompt asks for."""
        return self.prompt is not None and len(self.counted) >= self.prompt.samples_per_prompt

    @property
    def fate(self) -> str:
        """As in the report: trained, stale, filtered, failed, abandoned; unused or, while the run goes on, open."""
        if self.step is not None:
            return "trained"
        if self.stale is not None:
            return "stale"
        if self.outcome is not None and self.outcome.headers.outcome in rules.DROPPED:
            return str(self.outcome.headers.outcome)
        return "unused" if self.run.ended else "open"

    @property
    def letters(self) -> list[Letter]:
        """Dead letters about this group's records, or about records that say they are."""
        mine = {(record.topic, record.partition, record.offset) for record in everything(self.records)}
        return [one for one in self.run.letters if one.place in mine or self._claimed(one)]

    @property
    def moments(self) -> Moments:
        """When what happened to it."""
        group, step = self.group, self.step
        admitted = self.prompt or group
        begun = None if step is None else step.metrics.get("first_backward_at") or step.metrics.get("started_at")
        return moments_of(
            self.counted.values(),
            complete=self.complete,
            admitted=admitted.created_ns / NS if admitted else None,
            scored=group.scored_ns / NS if group else None,
            taken=max(begun, group.scored_ns / NS) if begun and group else None,
            committed=step.time_ns / NS if step else None,
            published=self.version.time_ns / NS if self.version else None,
        )

    def _claimed(self, one: Letter) -> bool:
        return one.letter.topic.rpartition(".")[2] in OF_GROUPS and claims(as_record(one), self.records.group)


def sort_out(found: Run, records: GroupRecords) -> Told:
    """Which records of a group count, and which entries of the ledger speak of it."""
    entries = found.past.entries
    step = next((one for one in entries if one.kind == "step" and any(p.group == records.group for p in one.plan)), None)
    done = None if step is None else (step.step or 0) + 1
    first, prompt = records.prompts[0] if records.prompts else (None, None)
    return Told(
        run=found,
        records=records,
        prompt=prompt,
        prompt_record=first,
        outcome=records.outcomes[0] if records.outcomes else None,
        step=step,
        stale=next((one for one in entries if one.kind == "stale" and records.group in one.groups), None),
        version=next((one for one in entries if done is not None and one.kind == "version" and (one.step or 0) >= done), None),
    )


def why(told: Told) -> str:
    """The fate's reason, in one clause."""
    reason = told.group.reason if told.group else None
    match told.fate:
        case "trained":
            assert told.step is not None
            place = 1 + [planned.group for planned in told.step.plan].index(told.records.group)
            return f"step {told.step.step}, place {place} of {len(told.step.plan)} in its plan, under learner version {told.step.version}"
        case "stale":
            return _why_stale(told)
        case "open":
            return f"waits for {waits_for(_standing(told), told.run.config.rules)}"
        case "unused" if (origin := told.run.rescored_from) is not None:
            return f"this is a re-scoring of {origin}, without a trainer: `penstock replay train {told.run.run}` trains from it"
        case "unused":
            closed = told.run.past.story.closed
            reason = json.loads((closed and closed.details) or "{}").get("reason")
            ended = f"the run ended first ({reason})" if reason else "the run ended first"
            return f"{ended}; it waited for {waits_for(_standing(told), told.run.config.rules)}"
        case fate:
            return reason or f"its record says {fate} and no more"


def _why_stale(told: Told) -> str:
    assert told.stale is not None
    found = stale_facts(told)
    assert found is not None
    if unread := next((one for one in told.letters if one.letter.kind == "killer" and one.letter.topic.endswith(".groups")), None):
        return f"its record could not be read ({unread.letter.reason}): it was set aside like one that is too old"
    if found["lag"] is None:
        return f"the ledger says so (entry {told.stale.seq}); the record it judged is not here"
    return (
        f"its oldest trained token is of version {found['policy_version_min']}, the learner was at version {found['learner_version']}: "
        f"{found['lag']} behind, max_lag is {found['max_lag']} (ledger entry {found['entry']})"
    )


def _standing(told: Told) -> Standing:
    prompt = told.prompt
    return Standing(
        samples=len(told.counted),
        wanted=prompt.samples_per_prompt if prompt else told.run.config.rules.samples_per_prompt,
        scored=told.outcome is not None,
        readable=prompt is not None,
        min_version=prompt.min_version if prompt else 0,
        policy_version_min=told.outcome.headers.policy_version_min if told.outcome else None,
        newest_version=max((one.version or 0 for one in told.run.past.entries if one.kind == "version"), default=-1),
        steps=len(told.run.past.steps),
    )


def stale_facts(told: Told) -> dict[str, Any] | None:
    """What the ledger and the schedule say of a group that was too old; None for any other."""
    if told.stale is None:
        return None
    schedule = told.run.config.rules
    learner = rules.version_after(told.stale.step or 0, steps_per_version=schedule.steps_per_version)
    oldest = told.outcome.headers.policy_version_min if told.outcome else None
    behind = None if oldest is None else rules.lag(learner_version=learner, policy_version_min=oldest)
    return {
        "entry": told.stale.seq,
        "at_s": told.stale.time_ns / NS,
        "before_step": told.stale.step,
        "learner_version": learner,
        "policy_version_min": oldest,
        "lag": behind,
        "max_lag": schedule.max_lag,
    }


def everything(records: GroupRecords) -> list[Record]:
    """Every record about a group, usable or not."""
    found = [record for record, _ in records.prompts] + [record for record, _ in records.samples]
    found += [record for outcome in records.outcomes for record in outcome.records]
    return found + [record for record, _ in records.unusable]


def as_record(found: Letter) -> Record:
    """The refused record as it was."""
    letter = found.letter
    return Record(
        topic=letter.topic,
        partition=letter.partition,
        offset=letter.offset,
        timestamp_ms=letter.timestamp_ms,
        key=letter.key,
        headers=letter.headers,
        value=letter.value,
    )
