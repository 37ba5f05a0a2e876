"""The scorer: `prompts` p and `rollouts` p become `groups` p, in Kafka transactions.

The rule: until its record stands in `groups`, only the scorer that owns the partition decides how a group ends; a broken reward is
`failed` and a dead letter, never a zero.
"""

import json
import time
from dataclasses import dataclass, field

import numpy as np

from penstock.infra.errors import LostPartition, OutcomeUnknown
from penstock.infra.log import Assigned, Event, Member, Records, Revoked, Transactions
from penstock.infra.sandbox.pool import ChildPool, Done, Failed
from penstock.pipeline.envs.group_outcome import group_of, verdict
from penstock.pipeline.envs.rewards import CHILD, Score, payload, spec
from penstock.pipeline.envs.tokenization import Decoder
from penstock.pipeline.runtime.ledger_follower import Control
from penstock.pipeline.runtime.session import Session
from penstock.topics import groups, prompts, rollouts
from penstock.topics.groups import Group, ScoredSample
from penstock.topics.prompts import Prompt
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Outgoing, Record
from penstock.workers.scorer.group_buffer import OpenGroup, PartitionGroups, WorkingTime

CONTROL_EVERY_S = 0.5


def main(session: Session) -> None:
    """Score groups until the run is closed."""
    config = session.config
    session.check_model()
    topics = [session.topic("prompts"), session.topic("rollouts")]
    control = Control(session.log, session.run)
    transactions = session.log.transactions(f"{session.run}.{session.worker}")
    reward = config.reward
    pool: ChildPool[int] = ChildPool(
        CHILD, init=spec(reward.functions, reward.weights), size=config.scorer.processes, timeout_s=reward.timeout_s
    )
    member = session.log.member(f"{session.run}.scorer", topics, max_records=2048, max_bytes=128 * 2**20)
    scorer = Scorer(session, member, transactions, pool, Decoder(config.model.path))
    looked = 0.0
    session.ready()
    try:
        while control.story.closed is None and not session.stop.is_set():
            scorer.turn()
            if time.monotonic() - looked > CONTROL_EVERY_S:
                looked = time.monotonic()
                control.poll(0.0)
    finally:
        pool.close()
        member.close(5.0)
        transactions.close()
        control.close()


@dataclass(slots=True)
class Scorer:
    """The scorer's state between two turns of its loop."""

    session: Session
    member: Member
    transactions: Transactions
    pool: ChildPool[int]
    decoder: Decoder
    owned: dict[int, PartitionGroups] = field(default_factory=dict)
    clock: WorkingTime = field(default_factory=WorkingTime)
    _scoring: dict[int, tuple[int, OpenGroup]] = field(default_factory=dict)
    _unscored: list[Group] = field(default_factory=list)
    """Outcomes of groups without rewards: their prompt must not be decoded, or they were aborted."""

    def turn(self) -> None:
        """Take what arrived, have complete groups scored, write what was scored."""
        for event in self.member.take(0.001 if self._scoring else 0.1):
            self._on(event)
        self.clock.tick(working=self.member.outage_s == 0)
        ended = [self._ended(result) for result in self.pool.poll(0.002 if self._scoring else 0.0)]
        ended += self._abandoned()
        ended += self._unscored
        self._unscored = []
        self._write([group for group in ended if group is not None])
        self.session.values["open_groups"] = sum(len(partition.open) for partition in self.owned.values())
        self.session.labels["partitions"] = ",".join(map(str, sorted(self.owned)))
        self.session.doing("scoring" if self._scoring else "waiting for samples")
        self.session.status()

    def _on(self, event: Event) -> None:
        match event:
            case Assigned():
                self._assigned(event)
            case Revoked():
                for _, partition in event.partitions:
                    self.owned.pop(partition, None)
            case Records():
                for record in event.records:
                    self._received(record)

    def _assigned(self, event: Assigned) -> None:
        for (topic, partition), committed in event.partitions.items():
            state = self.owned.setdefault(partition, PartitionGroups(partition))
            if topic == self.session.topic("prompts"):
                state.begin(prompts=committed.offset or 0, metadata=committed.metadata)
            else:
                state.rollouts_position = committed.offset or 0
        self._read_finished(sorted({partition for _, partition in event.partitions}))

    def _read_finished(self, partitions: list[int]) -> None:
        """Learn from `groups` which groups of these partitions have ended since what is known."""
        if not partitions:
            return
        topic = self.session.topic("groups")
        tail = self.session.log.tail({(topic, partition): self.owned[partition].groups_position for partition in partitions})
        for record in tail.read_to_end(120.0):
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
        state = self.owned.get(record.partition)
        if state is None:
            return
        if record.topic == self.session.topic("prompts"):
            self._prompt(state, record)
        else:
            self._sample(state, record)

    def _prompt(self, state: PartitionGroups, record: Record) -> None:
        state.prompts_position = record.offset + 1
        try:
            with self.session.decoding(record):
                prompt = prompts.read(record, run=self.session.run)[1]
        except Unusable as error:  # the rollout workers own reading `prompts`
            if error.kind == "killer":
                self._fail_unread(state, record, str(error))
            return
        if state.out_of_order(prompt.group):  # nothing of ours: the feeder's numbers rise
            self.session.say(
                f"prompt {prompt.group} at {record.topic}/{record.partition}/{record.offset} is out of order: reading all groups"
            )
            state.distrust()
            self._read_finished([state.partition])
        if state.add_prompt(record, prompt, now_s=self.clock.now_s):
            self._submit(state, prompt.group)

    def _fail_unread(self, state: PartitionGroups, record: Record, reason: str) -> None:
        """End the group of a prompt that must not be decoded: its headers, which are beyond doubt, say which group it is."""
        headers = prompts.check(record, run=self.session.run)
        assert headers.group is not None and headers.policy_version_min is not None
        unread = Prompt(
            group=headers.group,
            slot=0,
            min_version=headers.policy_version_min,
            samples_per_prompt=self.session.rules.samples_per_prompt,
            epoch=0,
            row=0,
            prompt="",
            messages=None,
            token_ids=np.empty(0, np.int32),
            columns="{}",
            created_ns=record.timestamp_ms * 1_000_000,
        )
        if state.add_prompt(record, unread, now_s=self.clock.now_s):
            group = state.open[headers.group]
            group.submitted = True
            self._unscored.append(self._group(group, "failed", f"its prompt cannot be read: {reason}", ()))

    def _sample(self, state: PartitionGroups, record: Record) -> None:
        state.rollouts_position = record.offset + 1
        try:
            with self.session.costs.decoding():
                headers = rollouts.check(record, run=self.session.run)
            assert headers.group is not None and headers.sample is not None
            if state.has(headers.group, headers.sample):
                if headers.group not in state.finished or headers.group in state.open:
                    self.session.duplicate(
                        f"sample {headers.sample} of group {headers.group} at {record.topic}/{record.partition}/{record.offset}"
                    )
                return
            schedule = self.session.rules
            if headers.sample >= schedule.samples_begun:
                raise Unusable(f"sample {headers.sample} of group {headers.group}: a group has {schedule.samples_begun}", kind="mismatch")
            if state.enough(headers.group, samples=schedule.samples_per_prompt):
                self.session.add("surplus_samples")
                return
            with self.session.decoding(record):
                rollout = rollouts.read(record, run=self.session.run, checked=headers)[1]
        except Unusable as error:
            self.session.dead_letter(record, error)
            return
        state.add_sample(record, rollout, now_s=self.clock.now_s)
        self._submit(state, rollout.group)

    def _submit(self, state: PartitionGroups, number: int) -> None:
        """Have a group scored once all its samples are there."""
        group = state.open[number]
        if not group.complete or group.submitted:
            return
        assert group.prompt is not None
        group.submitted = True
        if group.aborted:
            why = f"{group.aborted} of {len(group.samples)} samples were aborted: the group could no longer be fresh"
            self._unscored.append(self._group(group, "abandoned", why, ()))
            return
        self._scoring[number] = (state.partition, group)
        completions = [self.decoder.decode(sample.token_ids.tolist()) for sample in group.ordered()]
        messages = json.loads(group.prompt.messages) if group.prompt.messages else None
        columns = json.loads(group.prompt.columns)
        self.pool.submit(number, payload(completions, prompt=group.prompt.prompt, messages=messages, columns=columns))

    def _ended(self, result: Done[int] | Failed[int]) -> Group | None:
        """A scored, filtered or failed group, from what its rewards say."""
        partition, group = self._scoring.pop(result.key)
        state = self.owned.get(partition)
        if state is None or state.open.get(group.group) is not group:
            return None  # the partition went to another owner meanwhile
        samples = group.ordered()
        completions = [self.decoder.decode(sample.token_ids.tolist()) for sample in samples]
        if isinstance(result, Failed):
            return self._failed(group, result.reason)
        self.session.add("groups")
        found = verdict(samples, completions, Score.of(result.result), algorithm=self.session.config.algorithm)
        return self._group(group, found.outcome, found.reason, found.samples)

    def _failed(self, group: OpenGroup, reason: str) -> Group:
        assert group.prompt_record is not None
        self.session.dead_letter(group.prompt_record, Unusable(f"reward of group {group.group}: {reason}", kind="reward-failed"))
        return self._group(group, "failed", reason, ())

    def _abandoned(self) -> list[Group]:
        """Incomplete groups past their deadline, in working time; and samples that belong to no prompt."""
        ended = []
        deadline = self.session.config.scorer.group_deadline_s
        for state in self.owned.values():
            for group in state.overdue(now_s=self.clock.now_s, deadline_s=deadline):
                assert group.prompt is not None
                there = f"{len(group.samples)} of {group.prompt.samples_per_prompt} samples after {deadline:g} s"
                ended.append(self._group(group, "abandoned", there, ()))
            for group in state.orphans(now_s=self.clock.now_s):
                del state.open[group.group]
                if group.group < state.below:
                    continue  # it had ended long before its samples were read once more
                for record in group.records.values():
                    self.session.dead_letter(
                        record, Unusable(f"no prompt of group {group.group} stands in partition {state.partition}", kind="orphan")
                    )
        return ended

    def _group(self, group: OpenGroup, outcome: groups.Outcome, reason: str | None, samples: tuple[ScoredSample, ...]) -> Group:
        assert group.prompt is not None
        reward = self.session.config.reward
        return group_of(group.prompt, outcome, reason=reason, samples=samples, reward=reward, scored_ns=time.time_ns())

    def _write(self, ended: list[Group]) -> None:
        """Commit outcomes and offsets together; when their fate is unknown, the log is asked."""
        where = {group.group: p for p, state in self.owned.items() for group in ended if group.group in state.open}
        ended = [group for group in ended if group.group in where]
        if not ended:
            return None
        records: list[Outgoing] = []
        numbers: list[int] = []
        with self.session.costs.encoding():
            for group in ended:
                for headers, value in groups.encode_parts(group, run=self.session.run, worker=self.session.worker):
                    topic, key, partition = self.session.topic("groups"), str(group.group).encode(), where[group.group]
                    numbers.append(group.group)
                    records.append(Outgoing(topic=topic, partition=partition, key=key, headers=headers.encode(value), value=value))
        kept = {group.group: self.owned[where[group.group]].open.pop(group.group) for group in ended}
        offsets = self._offsets({where[group.group] for group in ended})
        for number, held in kept.items():
            self.owned[where[number]].open[number] = held
        try:
            written = self.transactions.commit(records, offsets=offsets, member=self.member.membership())
        except LostPartition:
            return None  # Revoked and Assigned follow: the new owner, maybe this worker, reads the groups again
        except OutcomeUnknown:
            self._read_finished(sorted({where[group.group] for group in ended}))
            return self._write([group for group in ended if group.group in self.owned[where[group.group]].open])
        for number, offset in zip(numbers, written, strict=True):
            self.owned[where[number]].finish(number, offset=offset)
        return None

    def _offsets(self, partitions: set[int]) -> dict[tuple[str, int], tuple[int, str]]:
        found: dict[tuple[str, int], tuple[int, str]] = {}
        for partition in partitions:
            at_prompts, at_rollouts = self.owned[partition].offsets()
            found[self.session.topic("prompts"), partition] = (at_prompts, self.owned[partition].noted())
            found[self.session.topic("rollouts"), partition] = (at_rollouts, "")
        return found
