"""Reads all records of one group, and derives its final status, the reason, and the time of each stage."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.pipeline.inspect.recorded_run import RecordedRun, no_prompt
from penstock.pipeline.runtime.topic_reader import POISON, Read, deleted
from penstock.pipeline.scheduling import rules
from penstock.pipeline.scheduling.rules import group_status
from penstock.topics.dead_letters import DeadLetter, claimed_group
from penstock.topics.groups import Group, ScoredSample
from penstock.topics.ledger import Entry
from penstock.topics.prompts import Prompt
from penstock.topics.rollouts import Rollout
from penstock.topics.wire.record import Record

STAGES: Sequence[tuple[str, str, str]] = (
    ("waited for a worker", "admitted", "begun"),
    ("generation", "begun", "last_ended"),
    ("of it waiting for the slowest sample", "first_ended", "last_ended"),
    ("scoring", "last_ended", "scored"),
    ("waited for the scorer", "last_ended", "scoring_started"),
    ("reward functions", "scoring_started", "scored"),
    ("waiting for the trainer", "scored", "taken"),
    ("training", "taken", "committed"),
    ("publishing", "committed", "published"),
)
"""(name of a stage, timestamp at its start, timestamp at its end). `scoring` is for records without the duration of reward functions."""


def stages(timestamps: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """Return the stages with a recorded start and end: `name`, `begins_s` after the group's admission, duration in `seconds`.

    A duration is negative if the clocks of two machines differ.
    """
    zero, rows = timestamps.get("admitted"), []
    shown = [stage for stage in STAGES if stage[0] != "scoring" or timestamps.get("scoring_started") is None]
    for name, first, last in shown:
        start, end = timestamps.get(first), timestamps.get(last)
        if zero is not None and start is not None and end is not None:
            rows.append({"name": name, "begins_s": start - zero, "seconds": end - start})
    return rows


NS = 1e9


@dataclass(slots=True, kw_only=True)
class GroupHistory:
    """All records of one group in the log, including duplicates and unusable ones, and its ledger entries."""

    run: RecordedRun
    number: int
    prompts: Sequence[Read[Prompt]]
    samples: Sequence[Read[Rollout]]
    outcomes: Sequence[Read[Group]]
    step: Entry | None
    stale: Entry | None
    version: Entry | None
    """Ledger entry of the policy version after the group's step."""
    gone: Sequence[str] = ()
    """Deleted offset ranges, as sentences, that may have included samples or the outcome of this group."""

    @property
    def reads(self) -> list[Read[Any]]:
        return [*self.prompts, *self.samples, *self.outcomes]

    @property
    def unusable(self) -> list[Read[Any]]:
        """Records about the group that cannot be decoded or do not belong to the run."""
        return [read for read in self.reads if read.problem is not None]

    @property
    def prompt_read(self) -> Read[Prompt] | None:
        """The first usable record of the prompt, which readers use."""
        return next((read for read in self.prompts if read.payload is not None), None)

    @property
    def prompt(self) -> Prompt | None:
        """Payload of `prompt_read`."""
        return self.prompt_read.payload if self.prompt_read else None

    @property
    def outcome(self) -> Read[Group] | None:
        """The outcome record that readers use: the last one with usable headers that is not a duplicate."""
        usable = [read for read in self.outcomes if read.headers is not None and not read.repeats]
        return usable[-1] if usable else None

    @property
    def group(self) -> Group | None:
        """Payload of `outcome`; None if there is none or it cannot be decoded."""
        return self.outcome.payload if self.outcome else None

    @property
    def policy_version_min(self) -> int | None:
        """Oldest policy version that generated a token of the group, from the headers of its outcome; None without an outcome."""
        return self.outcome.headers.policy_version_min if self.outcome and self.outcome.headers else None

    @property
    def scored(self) -> Mapping[int, ScoredSample]:
        """Sample number -> the sample in the outcome, with its rewards."""
        return {sample.rollout.sample: sample for sample in self.group.samples} if self.group else {}

    @property
    def first_rollouts(self) -> dict[int, tuple[Record, Rollout]]:
        """Sample number -> (record, decoded sample), from the first record of each sample."""
        firsts = {read.payload.sample: (read.record, read.payload) for read in self.samples if read.payload and not read.repeats}
        return dict(sorted(firsts.items()))

    @property
    def partition(self) -> int:
        """Partition that has all records of the group."""
        return next((read.record.partition for read in self.reads), 0)

    @property
    def samples_requested(self) -> int:
        return self.prompt.samples_per_prompt if self.prompt else self.run.config.rules.samples_per_prompt

    @property
    def counted(self) -> dict[int, Rollout]:
        """Sample number -> the sample that readers use: the one in the outcome or, without an outcome, the first one in the log."""
        if scored := self.scored:
            return {number: sample.rollout for number, sample in sorted(scored.items())}
        firsts = sorted(self.first_rollouts.values(), key=lambda recorded: recorded[0].offset)[: self.samples_requested]
        return {rollout.sample: rollout for _, rollout in sorted(firsts, key=lambda recorded: recorded[1].sample)}

    @property
    def status(self) -> str:
        outcome = self.outcome.headers.outcome if self.outcome and self.outcome.headers else None
        return group_status(outcome, trained=self.step is not None, stale=self.stale is not None, ended=self.run.ended)

    @property
    def dead_letters(self) -> dict[int, DeadLetter]:
        """Offset -> dead letter about a record of this group in the log, or about one that names it in its headers or key."""
        record_ids = {record.id for read in self.reads for record in read.records}
        return {
            offset: dead_letter
            for offset, dead_letter in self.run.dead_letters.items()
            if dead_letter.record_id in record_ids or claimed_group(dead_letter) == self.number
        }

    @property
    def timestamps(self) -> dict[str, float | None]:
        """Event of the group -> its Unix time; None for an event that has not happened or is not recorded."""
        group, step = self.group, self.step
        admitted = self.prompt or group
        begun = None if step is None else step.metrics.get("first_backward_at") or step.metrics.get("started_at")
        samples, complete = self.counted.values(), self.prompt is not None and len(self.counted) >= self.samples_requested
        return {
            "admitted": admitted.created_ns / NS if admitted else None,
            "begun": min(sample.started_ns for sample in samples) / NS if samples else None,
            "first_ended": min(sample.ended_ns for sample in samples) / NS if samples else None,
            "last_ended": max(sample.ended_ns for sample in samples) / NS if samples and complete else None,
            "scoring_started": (group.scored_ns - group.reward_ns) / NS if group and group.reward_ns is not None else None,
            "scored": group.scored_ns / NS if group else None,
            "taken": max(begun, group.scored_ns / NS) if begun and group else None,  # a group cannot be trained before it is scored
            "committed": step.time_ns / NS if step else None,
            "published": self.version.time_ns / NS if self.version else None,  # the policy version after the group's step
        }


def read_group(run: RecordedRun, number: int, *, notify: Callable[[str], None], partition: int | None = None) -> GroupHistory:
    """Read all records of one group. `partition` is the group's; if None, it is searched in all prompts.

    Raises `ConfigError` if the group was never admitted, `LogError` if its prompt was deleted.
    """
    numbers, reader = {number}, run.reader
    prompts = [] if partition is None else list(reader.prompts(only=numbers, partitions=[partition], repeats=True))
    if not prompts:
        notify(f"searching the prompts of {run.run} for group {number}")
        prompts = list(reader.prompts(only=numbers, repeats=True))
    if not prompts:
        raise no_prompt(run, number)
    partition = next((read for read in prompts if read.payload), prompts[0]).record.partition
    notify(f"reading partition {partition} of rollouts and groups")
    entries = run.past.entries
    step = next((entry for entry in entries if entry.kind == "step" and any(planned.group == number for planned in entry.plan)), None)
    committed = None if step is None else (step.step or 0) + 1
    history = GroupHistory(
        run=run,
        number=number,
        prompts=prompts,
        samples=list(reader.samples(only=numbers, partitions=[partition], repeats=True)),
        outcomes=list(reader.groups(only=numbers, partitions=[partition], repeats=True)),
        step=step,
        stale=next((entry for entry in entries if entry.kind == "stale" and number in entry.groups), None),
        version=next(
            (entry for entry in entries if committed is not None and entry.kind == "version" and (entry.step or 0) >= committed), None
        ),
    )
    absent = {"rollouts": len(history.first_rollouts) < history.samples_requested, "groups": history.outcome is None}
    names = [f"{run.run}.{topic}" for topic, is_absent in absent.items() if is_absent]
    history.gone = deleted(reader.log, *names, partition=partition)
    return history


def why(history: GroupHistory) -> str:
    """Return the reason of the group's status as a clause, with the deleted records because of which it may be wrong."""
    may_have_ended = history.gone and history.status in ("open", "unused") and history.outcome is None
    return _why(history) + (f", unless deleted records say otherwise: {'; '.join(history.gone)}" if may_have_ended else "")


def _why(history: GroupHistory) -> str:
    """Return the reason of the group's status as a clause, without regard to deleted records."""
    run, step = history.run, history.step
    match history.status:
        case "trained" if step is not None:
            position = 1 + [planned.group for planned in step.plan].index(history.number)
            return f"step {step.step}, position {position} of {len(step.plan)} in its plan, under learner version {step.version}"
        case "stale":
            return _why_stale(history)
        case "open":
            return f"waits for {_waits_for(history)}"
        case "unused" if origin := run.info.get("rescored_from"):
            return f"this run re-scores {origin['run']} and was never trained; train from it: penstock replay train {run.run}"
        case "unused":
            closed = run.past.ledger_state.closed
            reason = json.loads((closed and closed.details) or "{}").get("reason")
            ended = f"the run ended first ({reason})" if reason else "the run ended first"
            return f"{ended}; the group was waiting for {_waits_for(history)}"
        case status:
            return (history.group.reason if history.group else None) or f"the outcome is {status}, without a reason"


def stale_facts(history: GroupHistory) -> dict[str, Any] | None:
    """Return by how many versions a stale group exceeded `max_lag`, and at which ledger entry; None for any other group."""
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
    """Return why the ledger lists the group as stale (too many versions old), as a clause."""
    facts = stale_facts(history) or {}
    for dead_letter in history.dead_letters.values():
        if dead_letter.kind == POISON and dead_letter.topic.endswith(".groups"):
            return f"the outcome could not be read ({dead_letter.reason}), so it was dead-lettered and the group dropped"
    if facts["lag"] is None:
        return f"ledger entry {facts['entry']} lists the group as stale; its outcome is not in the log"
    return (
        f"the oldest trained token was generated under version {facts['policy_version_min']}, {facts['lag']} versions before the learner's "
        f"{facts['learner_version']}; max_lag is {facts['max_lag']} (ledger entry {facts['entry']})"
    )


def _waits_for(history: GroupHistory) -> str:
    """Describe what a group without a final status waits for, as the object of "waits for"."""
    prompt, past, schedule = history.prompt, history.run.past, history.run.config.rules
    newest = max((entry.version or 0 for entry in past.entries if entry.kind == "version"), default=-1)
    samples, requested = len(history.counted), history.samples_requested
    if prompt is None:
        return "the scorer or the group's deadline to end it, because its prompt cannot be read"
    if history.outcome is not None:
        old = rules.lag(learner_version=newest, policy_version_min=history.policy_version_min or 0)
        first = "takes groups by number" if schedule.order == "submission" else "takes groups in the order of scoring"
        return (
            f"the trainer, which {first} and has done {len(past.steps)} steps; the group is {old} version{'' if old == 1 else 's'} behind "
            f"the newest one, max_lag is {schedule.max_lag}"
        )
    if samples >= requested:
        return "the scorer of its partition; all its samples are in the log"
    if samples:
        return f"samples: {samples} of {requested} are there"
    if prompt.min_version > newest:
        published = f"the newest is {newest}" if newest >= 0 else "none is published"
        return f"policy version {prompt.min_version}, under which it may be generated at the earliest; {published}"
    return "a rollout worker; none of its samples is in the log"


def record_name(record: Record | DeadLetter) -> str:
    """Return the topic without the run id, the partition and the offset of a record: "groups/0/17"."""
    return f"{record.topic.rpartition('.')[2]}/{record.partition}/{record.offset}"
