"""All records of one group: which of them count, its final status, and the reason."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.pipeline.observe.explain.stage_times import GroupProgress, GroupTimestamps, timestamps_of, waits_for
from penstock.pipeline.observe.recorded_run import Letter, RecordedRun, no_prompt
from penstock.pipeline.runtime.topic_reader import POISON, Read, deleted
from penstock.pipeline.scheduling import rules
from penstock.pipeline.scheduling.fates import fate_of
from penstock.topics.dead_letters import DeadLetter, claimed_group
from penstock.topics.groups import Group, ScoredSample
from penstock.topics.ledger import Entry
from penstock.topics.prompts import Prompt
from penstock.topics.rollouts import Rollout
from penstock.topics.wire.record import Record

NS = 1e9


@dataclass(slots=True, kw_only=True)
class GroupHistory:
    """One group's records as they stand in the log, those that do not count among them, and the entries of the ledger about it."""

    run: RecordedRun
    number: int
    prompts: Sequence[Read[Prompt]]
    samples: Sequence[Read[Rollout]]
    outcomes: Sequence[Read[Group]]
    step: Entry | None
    stale: Entry | None
    version: Entry | None
    """The entry of the version that its step led to."""
    gone: Sequence[str] = ()
    """Which records were deleted, among which samples or the outcome of this group may have been."""

    @property
    def reads(self) -> list[Read[Any]]:
        """Every record about it."""
        return [*self.prompts, *self.samples, *self.outcomes]

    @property
    def unusable(self) -> list[Read[Any]]:
        """Records that cannot be used."""
        return [read for read in self.reads if read.problem is not None]

    @property
    def asked(self) -> Read[Prompt] | None:
        """The prompt that counts."""
        return next((read for read in self.prompts if read.payload is not None), None)

    @property
    def prompt(self) -> Prompt | None:
        """Its payload."""
        return self.asked.payload if self.asked else None

    @property
    def outcome(self) -> Read[Group] | None:
        """The outcome that counts: the first that can be read, or one that ended its readers, or else the last."""
        usable = [read for read in self.outcomes if read.headers is not None and not read.repeats]
        return usable[-1] if usable else None

    @property
    def group(self) -> Group | None:
        """The outcome's payload, where there is one that can be read."""
        return self.outcome.payload if self.outcome else None

    @property
    def policy_version_min(self) -> int | None:
        """Oldest policy version of its trained tokens."""
        return self.outcome.headers.policy_version_min if self.outcome and self.outcome.headers else None

    @property
    def scored(self) -> Mapping[int, ScoredSample]:
        """Sample -> what the reward functions gave it."""
        return {sample.rollout.sample: sample for sample in self.group.samples} if self.group else {}

    @property
    def drawn(self) -> dict[int, tuple[Record, Rollout]]:
        """Sample -> its first record, by number."""
        firsts = {read.payload.sample: (read.record, read.payload) for read in self.samples if read.payload and not read.repeats}
        return dict(sorted(firsts.items()))

    @property
    def partition(self) -> int:
        """Where all its records are."""
        return next((read.record.partition for read in self.reads), 0)

    @property
    def wanted(self) -> int:
        """Number of samples that the prompt requests."""
        return self.prompt.samples_per_prompt if self.prompt else self.run.config.rules.samples_per_prompt

    @property
    def counted(self) -> dict[int, Rollout]:
        """Sample -> the rollout that counts: those of the outcome, otherwise the first ones in the log."""
        if scored := self.scored:
            return {number: sample.rollout for number, sample in sorted(scored.items())}
        firsts = sorted(self.drawn.values(), key=lambda drawn: drawn[0].offset)[: self.wanted]
        return {rollout.sample: rollout for _, rollout in sorted(firsts, key=lambda drawn: drawn[1].sample)}

    @property
    def complete(self) -> bool:
        """True if the group has all requested samples."""
        return self.prompt is not None and len(self.counted) >= self.wanted

    @property
    def fate(self) -> str:
        """The group's fate, as the report counts it."""
        outcome = self.outcome.headers.outcome if self.outcome and self.outcome.headers else None
        return fate_of(outcome, trained=self.step is not None, stale=self.stale is not None, ended=self.run.ended)

    @property
    def letters(self) -> list[Letter]:
        """Dead letters about this group's records, or about records that claim to be."""
        record_ids = {record.id for read in self.reads for record in read.records}
        return [kept for kept in self.run.letters if kept.letter.record_id in record_ids or claimed_group(kept.letter) == self.number]

    @property
    def timestamps(self) -> GroupTimestamps:
        """When what happened to it."""
        group, step = self.group, self.step
        admitted = self.prompt or group
        begun = None if step is None else step.metrics.get("first_backward_at") or step.metrics.get("started_at")
        return timestamps_of(
            self.counted.values(),
            complete=self.complete,
            admitted=admitted.created_ns / NS if admitted else None,
            judged=(group.scored_ns - group.reward_ns) / NS if group and group.reward_ns is not None else None,
            scored=group.scored_ns / NS if group else None,
            taken=max(begun, group.scored_ns / NS) if begun and group else None,
            committed=step.time_ns / NS if step else None,
            published=self.version.time_ns / NS if self.version else None,
        )


def read_group(run: RecordedRun, number: int, *, notify: Callable[[str], None]) -> GroupHistory:
    """Everything about one group. Raises `ConfigError` for one that was never admitted, `LogError` for one whose prompt is gone."""
    wanted, reader = {number}, run.reader
    notify(f"reading the prompts of {run.run}")
    prompts = list(reader.prompts(only=wanted, repeats=True))
    if not prompts:
        raise no_prompt(run, number)
    partition = next((read for read in prompts if read.payload), prompts[0]).record.partition
    notify(f"reading partition {partition} of rollouts and groups")
    entries = run.past.entries
    step = next((entry for entry in entries if entry.kind == "step" and any(planned.group == number for planned in entry.plan)), None)
    done = None if step is None else (step.step or 0) + 1
    history = GroupHistory(
        run=run,
        number=number,
        prompts=prompts,
        samples=list(reader.samples(only=wanted, partitions=[partition], repeats=True)),
        outcomes=list(reader.groups(only=wanted, partitions=[partition], repeats=True)),
        step=step,
        stale=next((entry for entry in entries if entry.kind == "stale" and number in entry.groups), None),
        version=next((entry for entry in entries if done is not None and entry.kind == "version" and (entry.step or 0) >= done), None),
    )
    absent = {"rollouts": len(history.drawn) < history.wanted, "groups": history.outcome is None}
    names = [f"{run.run}.{topic}" for topic, is_absent in absent.items() if is_absent]
    history.gone = deleted(reader.log, *names, partition=partition)
    return history


def why(history: GroupHistory) -> str:
    """The fate's reason, in one clause, and what would make it another."""
    include_open = history.fate in ("open", "unused") and history.outcome is None
    return f"{_why(history)}, unless more is gone: {'; '.join(history.gone)}" if include_open and history.gone else _why(history)


def _why(history: GroupHistory) -> str:
    run, step = history.run, history.step
    match history.fate:
        case "trained" if step is not None:
            place = 1 + [planned.group for planned in step.plan].index(history.number)
            return f"step {step.step}, place {place} of {len(step.plan)} in its plan, under learner version {step.version}"
        case "stale":
            return _why_stale(history)
        case "open":
            return f"waits for {waits_for(_standing(history), run.config.rules)}"
        case "unused" if run.rescored_from is not None:
            return f"this is a re-scoring of {run.rescored_from}, without a trainer: `penstock replay train {run.run}` trains from it"
        case "unused":
            closed = run.past.ledger_state.closed
            reason = json.loads((closed and closed.details) or "{}").get("reason")
            ended = f"the run ended first ({reason})" if reason else "the run ended first"
            return f"{ended}; it waited for {waits_for(_standing(history), run.config.rules)}"
        case fate:
            return (history.group.reason if history.group else None) or f"its record says {fate} and no more"


def stale_facts(history: GroupHistory) -> dict[str, Any] | None:
    """Facts of the ledger and the schedule about a stale group; None for any other."""
    entry, schedule, oldest = history.stale, history.run.config.rules, history.policy_version_min
    if entry is None:
        return None
    learner = rules.version_after(entry.step or 0, steps_per_version=schedule.steps_per_version)
    return {
        "entry": entry.seq,
        "at_s": entry.time_ns / NS,
        "before_step": entry.step,
        "learner_version": learner,
        "policy_version_min": oldest,
        "lag": None if oldest is None else rules.lag(learner_version=learner, policy_version_min=oldest),
        "max_lag": schedule.max_lag,
    }


def _why_stale(history: GroupHistory) -> str:
    facts = stale_facts(history) or {}
    for letter in (kept.letter for kept in history.letters):
        if letter.kind == POISON and letter.topic.endswith(".groups"):
            return f"its record could not be read ({letter.reason}): it was set aside like one that is too old"
    if facts["lag"] is None:
        return f"the ledger says so (entry {facts['entry']}); the record it judged is not here"
    return (
        f"its oldest trained token is of version {facts['policy_version_min']}, the learner was at version {facts['learner_version']}: "
        f"{facts['lag']} behind, max_lag is {facts['max_lag']} (ledger entry {facts['entry']})"
    )


def _standing(history: GroupHistory) -> GroupProgress:
    prompt, past = history.prompt, history.run.past
    return GroupProgress(
        samples=len(history.counted),
        wanted=history.wanted,
        scored=history.outcome is not None,
        readable=prompt is not None,
        min_version=prompt.min_version if prompt else 0,
        policy_version_min=history.policy_version_min,
        newest_version=max((entry.version or 0 for entry in past.entries if entry.kind == "version"), default=-1),
        steps=len(past.steps),
    )


def shown_place(record: Record | DeadLetter) -> str:
    """Topic, partition and offset of a record as text.

    Example:
        shown_place(record)  # -> "rollouts/3/17"
    """
    return f"{record.topic.rpartition('.')[2]}/{record.partition}/{record.offset}"
