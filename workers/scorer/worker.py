"""The scorer: `prompts` p and `rollouts` p become `groups` p, in Kafka transactions.

Only the scorer that owns a partition decides how a group ends. A broken reward makes the group `failed` and a dead letter, never a zero.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from penstock.infra.log import Assigned, Member, Records, Revoked, Transactions, read_to_current_end
from penstock.infra.sandbox.timed_pool import Done, Failed
from penstock.pipeline.data.tokenization import Decoder
from penstock.pipeline.rewards.functions import Score
from penstock.pipeline.rewards.scoring import FaultCount, MissingRewards, RewardPool, group_of, payload_of, reward_pool, scored_group
from penstock.pipeline.runtime.ledger_follower import LedgerFollower
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.topic_reader import POISON
from penstock.topics import groups, prompts, rollouts
from penstock.topics.groups import Group
from penstock.topics.metrics import Activity
from penstock.topics.rollouts import generated
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import Record
from penstock.workers.scorer.group_buffer import OpenGroup, OutcomeWriter, PartitionGroups, RolloutReports, reject_orphans

NEXT_RESULT_S, GATHERED_S = 0.003, 0.02
"""Rewards that follow within the first time are written in one transaction, gathered for the second at most.

A transaction takes tens of ms, during which no child gets the next group: one for each group would slow down quick rewards.
"""
LEDGER_EVERY_S = 0.5
"""How often the scorer checks whether the run is closed."""

Job = tuple[int, int, int]
"""Partition, generation of the consumer group, group: after a rebalance the same group may be scored again."""


def main(session: Session) -> None:
    """Score groups until the run is closed."""
    config = session.config
    session.check_model()
    follower = LedgerFollower(session.log, session.run)
    transactions = session.transactions()
    pool: RewardPool[Job] = reward_pool(
        config.reward,
        size=config.scorer.processes,
        max_steps=session.info["steps"],
        max_completion_length=config.max_completion_tokens,
        by_source=config.data.rewards,
    )
    member = session.member("prompts", "rollouts", max_records=2048, max_bytes=128 << 20)
    scorer = Scorer(session, member, transactions, pool, Decoder(config.model.path))
    polled = 0.0
    session.reporter.values.update((f"outcome_{outcome}", 0.0) for outcome in groups.OUTCOMES)
    session.ready(
        finishing=lambda: f"leaves {sum(len(p.open) for p in scorer.owned.values())} open groups to the next owner (about 1 s)",
        outage=lambda: member.outage_s,
    )
    try:
        while follower.state.closed is None and not session.stop.is_set():
            scorer.turn()
            if time.monotonic() - polled > LEDGER_EVERY_S:
                polled = time.monotonic()
                follower.poll(0.0)
    finally:
        pool.close()
        scorer.reports.close()
        member.close(5.0)
        transactions.close()
        follower.close()


@dataclass(slots=True)
class Scorer:
    """Collects groups, scores them and writes their outcomes."""

    session: Session
    member: Member
    transactions: Transactions
    pool: RewardPool[Job]
    decoder: Decoder
    owned: dict[int, PartitionGroups] = field(default_factory=dict)
    reports: RolloutReports = field(init=False)
    outcomes: OutcomeWriter = field(init=False)
    _scoring: dict[Job, tuple[OpenGroup, list[str]]] = field(default_factory=dict)
    """Complete groups whose rewards are being computed, each with the decoded text of its samples by number."""
    _generation: int = 0
    _unscored: list[Group] = field(default_factory=list)
    """Outcomes without rewards: a poison prompt, an aborted sample, or a broken environment."""
    _faults: FaultCount = field(init=False)
    _missing: MissingRewards = field(default_factory=MissingRewards)

    def __post_init__(self) -> None:
        self._faults = FaultCount(self.session.config.reward.on_error)
        self.reports = RolloutReports(self.session)
        self.outcomes = OutcomeWriter(self.session, self.transactions, self.member, self.owned, self._read_finished)

    def turn(self) -> None:
        """Read new records, submit complete groups to the reward functions, write the outcomes."""
        for event in self.member.take(0.001 if self._scoring else 0.1):
            match event:
                case Assigned():
                    self.session.dead_letters.on_rebalance()
                    self._assigned(event)
                case Revoked():
                    self._revoked({partition for _, partition in event.partitions})
                case Records():
                    for record in event.records:
                        self._received(record)
        self.reports.pass_time(self.owned.values(), working=self.member.outage_s == 0)
        scored = [self._scored(result) for result in self._results()]
        self.outcomes.write([group for group in (*scored, *self._overdue(), *self._unscored) if group is not None])
        self._unscored = []
        self._faults.check()  # the groups that show the fault are written
        for state in self.owned.values():
            reject_orphans(self.session, state, now_s=self.reports.now_s)
        reporter = self.session.reporter
        reporter.values["reward_busy_s"] = self.pool.busy_s
        reporter.values["open_groups"] = sum(len(partition.open) for partition in self.owned.values())
        reporter.values["oldest_open_s"] = self._oldest_open_s()
        reporter.labels["partitions"] = ",".join(map(str, sorted(self.owned)))
        if self._scoring:
            reporter.doing(Activity.BUSY, "scoring")
        else:
            reporter.doing(Activity.NO_SAMPLES, "waiting for samples")
        reporter.status()

    def _results(self) -> list[Done[Job] | Failed[Job]]:
        """The rewards that are ready, with those that follow shortly, so that one transaction writes them."""
        results = self.pool.poll(0.002 if self._scoring else 0.0)
        until = time.monotonic() + GATHERED_S
        while results and time.monotonic() < until and (more := self.pool.poll(NEXT_RESULT_S)):
            results += more
        return results

    def _oldest_open_s(self) -> float:
        """Age [s] of the oldest prompt whose group has no outcome, 0 if there is none; prompts of a partition are ordered by age."""
        created = (next((group.prompt.created_ns for group in state.open.values() if group.prompt), None) for state in self.owned.values())
        oldest_ns = min((at for at in created if at is not None), default=None)
        return 0.0 if oldest_ns is None else max(0.0, time.time() - oldest_ns / 1e9)

    def _revoked(self, partitions: set[int]) -> None:
        """Forget partitions and cancel their reward calls: the next owner scores their groups again."""
        for partition in partitions:
            self.owned.pop(partition, None)
        void = {job for job in self._scoring if job[0] in partitions}
        for job in void:
            del self._scoring[job]
        self.pool.cancel(void)

    def _assigned(self, event: Assigned) -> None:
        """Continue the assigned partitions from their committed offsets, and read which of their groups have ended."""
        self._generation = event.membership.generation
        for (topic, partition), committed in event.partitions.items():
            state = self.owned.setdefault(partition, PartitionGroups(partition))
            if topic == self.session.topic("prompts"):
                state.start(prompts=committed.offset or 0, metadata=committed.metadata)
            else:
                state.rollouts_position = committed.offset or 0
        prompts = self.session.topic("prompts")
        unknown = [at for at, committed in event.partitions.items() if at[0] == prompts and committed.offset is None]
        for (_, partition), start in self.session.log.beginning_offsets(unknown).items():
            self.owned[partition].cut = start > 0
        self._read_finished(sorted({partition for _, partition in event.partitions}))

    def _read_finished(self, partitions: list[int]) -> None:
        """Read from `groups` which groups of these partitions have ended since the last read."""
        if not partitions:
            return
        topic, log = self.session.topic("groups"), self.session.log
        # Groups before the first retained offset were deleted, so they had ended.
        first_offsets = log.beginning_offsets([(topic, partition) for partition in partitions])
        tail = log.tail({at: max(start, self.owned[at[1]].groups_position) for at, start in first_offsets.items()})
        for record in read_to_current_end(log, tail, include_open=True):  # what a predecessor has committed may not be readable yet
            try:
                headers = groups.check(record, run=self.session.run)
            except Unusable:
                continue  # the trainer owns reading `groups`
            if headers.group is not None and record.partition in self.owned:
                self.owned[record.partition].finish(headers.group, offset=record.offset)
        for partition in partitions:
            self.owned[partition].groups_position = tail.position((topic, partition))
        tail.close()

    def _received(self, record: Record) -> None:
        """Apply a record of `prompts` or `rollouts`; one of a partition that was revoked is ignored."""
        state = self.owned.get(record.partition)
        if state is None:
            return
        if record.topic == self.session.topic("prompts"):
            self._prompt(state, record)
        else:
            self._samples(state, record)

    def _prompt(self, state: PartitionGroups, record: Record) -> None:
        """Add the prompt in a record, and submit its group if all samples have arrived; a poison record ends the group as failed."""
        state.prompts_position = record.offset + 1
        try:
            with self.session.dead_letters.decoding(record):
                prompt = prompts.read(record, run=self.session.run)[1]
        except Unusable as error:  # the rollout workers own reading `prompts`
            if error.kind == POISON:
                self._fail_unread(state, record, str(error))
            return
        if state.out_of_order(prompt.group):  # a foreign record: the feeder's numbers rise
            self.session.reporter.notify(f"group {prompt.group}'s prompt at {record.id} follows a later group's: reading all groups again")
            state.distrust()
            self._read_finished([state.partition])
        if state.add_prompt(record, prompt, now_s=self.reports.now_s):
            self._submit(state, prompt.group)

    def _fail_unread(self, state: PartitionGroups, record: Record, reason: str) -> None:
        """End the group of a poison prompt, which its checked headers identify, as failed."""
        headers = prompts.check(record, run=self.session.run)
        unread = prompts.unread(headers, samples=self.session.schedule.samples_per_prompt, created_ns=record.timestamp_ms * 1_000_000)
        if state.add_prompt(record, unread, now_s=self.reports.now_s):
            group = state.open[unread.group]
            group.submitted = True
            self._unscored.append(self._group(group, "failed", f"its prompt cannot be read: {reason}"))

    def _samples(self, state: PartitionGroups, record: Record) -> None:
        """Add the samples in a record; submit their group if it is complete. An unusable record becomes a dead letter."""
        state.rollouts_position = record.offset + 1
        try:
            with self.session.reporter.decoding:
                headers = rollouts.check(record, run=self.session.run)
            counted = self._new_samples(state, record, headers)
            if not counted:
                return
            with self.session.dead_letters.decoding(record):
                samples = rollouts.read_all(record, run=self.session.run, checked=headers)[1]
        except Unusable as error:
            self.session.dead_letters.write(record, error)
            return
        for rollout in samples:
            if rollout.sample in counted:
                state.add_sample(record, rollout, now_s=self.reports.now_s)
        self._submit(state, samples[0].group)

    def _new_samples(self, state: PartitionGroups, record: Record, headers: Headers) -> list[int]:
        """Numbers of the samples in a record that are new and that their group still needs; others are reported as duplicates or surplus.

        Raises `Unusable` if a number is outside its group.
        """
        schedule, group = self.session.schedule, headers.group
        assert group is not None
        new = []
        for sample in rollouts.tokens_of(headers):
            if not state.has(group, sample):
                new.append(sample)
            elif group not in state.finished or group in state.open:
                self.session.reporter.duplicate(f"sample {sample} of group {group} at {record.id}")
        if new and new[-1] >= schedule.samples_begun:
            raise Unusable(f"sample {new[-1]} of group {group} is outside 0 to {schedule.samples_begun - 1}", kind="mismatch")
        counted = new[: state.missing(group, samples=schedule.samples_per_prompt)]
        if surplus := len(new) - len(counted):
            self.session.reporter.add("surplus_samples", surplus)
        return counted

    def _submit(self, state: PartitionGroups, number: int) -> None:
        """Pass a complete group to the reward functions; one with aborted or broken samples gets its outcome at once."""
        group = state.open[number]
        if not group.complete or group.submitted:
            return
        assert group.prompt is not None and group.prompt_record is not None
        group.submitted = True
        if broken := next((sample.broken for sample in group.ordered() if sample.broken), None):  # a reward of zero would be wrong
            self.session.dead_letters.write(group.prompt_record, Unusable(f"group {group.group}: {broken}", kind="environment-failed"))
            self._unscored.append(self._group(group, "failed", broken))
            return
        if group.aborted:
            why = f"{group.aborted} of {len(group.samples)} samples were aborted, because the group would be stale"
            self._unscored.append(self._group(group, "abandoned", why))
            return
        samples, prompt = group.ordered(), group.prompt
        completions = [self.decoder.decode(generated(sample)) for sample in samples]
        job = (state.partition, self._generation, number)
        self._scoring[job] = group, completions
        per_version = self.session.schedule.steps_per_version
        self.pool.submit(job, payload_of(prompt, samples, completions, messages=prompt.messages, steps_per_version=per_version))

    def _scored(self, result: Done[Job] | Failed[Job]) -> Group | None:
        """Return the outcome of a group from its rewards, "failed" if scoring failed; None if its partition was revoked or it has ended."""
        if result.key not in self._scoring:
            return None
        state, (group, completions) = self.owned.get(result.key[0]), self._scoring.pop(result.key)
        if state is None or state.open.get(group.group) is not group:
            return None
        if isinstance(result, Failed):
            assert group.prompt_record is not None
            error = Unusable(f"scoring group {group.group} failed: {result.reason}", kind="reward-failed")
            self.session.dead_letters.write(group.prompt_record, error)
            self._faults.failed(result.reason)
            self._count_missing(group, [result.reason] * len(group.samples))
            return self._group(group, "failed", result.reason)
        score, samples = Score.of(result.result), group.ordered()
        self._faults.partly(score.broken.values(), len(score.rewards))
        self._count_missing(group, [score.broken.get(n) for n, reward in enumerate(score.rewards) if reward is None])
        reporter = self.session.reporter
        reporter.add("groups")
        reporter.add("reward_s", result.seconds)
        for name, value in score.load.items():
            reporter.add(name, value)
        reporter.add("no_reward", len(score.rewards) - len(score.scored))
        record = replace(self._group(group, "scored", None), reward_ns=round(1e9 * result.seconds))
        return scored_group(record, samples, completions, score, algorithm=self.session.config.algorithm)

    def _count_missing(self, group: OpenGroup, reasons: Sequence[str | None]) -> None:
        """Count samples without a reward for the report, and print a warning at the first of each cause."""
        reporter = self.session.reporter
        for reason in self._missing.add(group.group, reasons):
            reporter.notify(f"samples of group {group.group} have no reward and are not trained: {reason}", level="warning")
        if reasons:
            reporter.labels["missing_rewards"] = json.dumps(self._missing.causes)

    def _overdue(self) -> list[Group]:
        """Return an outcome "abandoned" for each incomplete group that is past `scorer.group_deadline_s`."""
        deadline, abandoned = self.session.config.scorer.group_deadline_s, []
        for state in self.owned.values():
            for group in state.overdue(deadline_s=deadline):
                assert group.prompt is not None
                reason = f"only {len(group.samples)} of {group.prompt.samples_per_prompt} samples arrived within {deadline:g} s"
                abandoned.append(self._group(group, "abandoned", reason))
        return abandoned

    def _group(self, group: OpenGroup, outcome: groups.Outcome, reason: str | None) -> Group:
        """The record of a group's outcome, without samples; `reason` explains one that is not "scored"."""
        assert group.prompt is not None
        return group_of(group.prompt, outcome, reason=reason, reward=self.session.config.reward, scored_ns=time.time_ns())
