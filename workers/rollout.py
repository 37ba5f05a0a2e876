"""The rollout worker: `prompts` and `weights` become `rollouts`, one record a sample.

The rule: a prompt starts only under weights it allows, the lowest group number first, and only the samples that nobody has
published are drawn; a sample's random numbers follow from (run seed, group, sample). A worker publishes for partitions it owns: while
the group of workers rebalances it draws on and holds the samples back, and what turns out to be another's now is dropped.
"""

import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from infra.engines.requests import Completion, Engine, GroupRequest, Sampling
from infra.log import Assigned, Member, Pending, Records, Revoked
from pipeline import schedule as rules
from pipeline.control import Control
from pipeline.engines import make_engine
from pipeline.existing import ExistingSamples
from pipeline.presence import Presence
from pipeline.prompt_queue import PromptQueue, Work, rollouts_start
from pipeline.session import Session
from pipeline.weights import fetch
from topics import prompts, rollouts
from topics.errors import Unusable
from topics.record import Outgoing, Record
from topics.samples import Rollout

BUSY_LOOK_S = 0.5
"""How often a worker that is drawing looks whether the run is over; new weights are looked for before each group."""

IDLE_WAIT_S = 0.2
"""How long an idle worker waits for prompts, or for the weights its prompts need, before it looks around again."""

GATHER_S = 0.25
"""Samples wait this long for the rest of their group, which is of no use before; one request for all costs a fraction of many."""

COMMIT_EVERY_S = 0.5


def main(session: Session) -> None:
    """Draw samples until the run is closed."""
    session.check_model()
    session.doing("loading the model", now=True)
    engine = make_engine(session.config)
    control = Control(session.log, session.run)
    worker = Rollouts(session, engine, control, join_others(session), ExistingSamples(session.log, session.run))
    session.ready()
    try:
        while control.story.closed is None and not session.stop.is_set():
            worker.turn()
        worker.hand_back()
    finally:
        worker.close()
        control.close()
        engine.close()


def join_others(session: Session) -> Member:
    """Membership among the run's rollout workers."""
    return session.log.member(f"{session.run}.rollout", [session.topic("prompts")], max_records=64, max_bytes=64 * 2**20)


@dataclass(slots=True)
class Rollouts:
    """The worker's state between two turns of its loop."""

    session: Session
    engine: Engine
    control: Control
    member: Member
    existing: ExistingSamples
    queue: PromptQueue = field(default_factory=PromptQueue)
    presence: Presence = field(default_factory=Presence)
    _settled: bool = False
    """Whether this worker knows which partitions are its own: not while the group rebalances."""
    _in_hand: dict[int, Work] = field(default_factory=dict)
    _left: dict[int, set[int]] = field(default_factory=dict)
    """Samples of the groups in hand that are not sent yet."""
    _ended: list[Completion] = field(default_factory=list)
    """Those of them that the engine has returned."""
    _flying: list[tuple[Pending, Work, int]] = field(default_factory=list)
    _looked: float = 0.0
    _gathered: float = 0.0
    _committed: float = 0.0

    def turn(self) -> None:
        """Take what arrived, publish what ended, start what may start, decode one step, commit what is done."""
        self._absent()
        self._take(0.0)
        self._publish_ended()
        if self.engine.idle or time.monotonic() - self._looked > BUSY_LOOK_S:
            self._look(wait_s=0.0)
        self._start()
        if self.engine.idle:
            self._wait()
        else:
            self._draw()
        self._acknowledge()
        if time.monotonic() - self._committed > COMMIT_EVERY_S:
            self._commit()
        self.session.status()

    def hand_back(self) -> None:
        """Publish what ended and commit what is acknowledged, so that the next owner draws only what is missing."""
        self._take(0.0)
        self._publish_ended(all_of_them=True)
        self.session.producer.flush(10.0)
        self._acknowledge()
        self._commit()
        self.session.labels["partitions"] = ""

    def close(self) -> None:
        """Leave the other rollout workers."""
        self.member.close(5.0)
        self.existing.close()
        self.presence.close()

    def _absent(self) -> bool:
        """Whether this process was stopped for a while: then its partitions may be others' by now, and it joins them again."""
        if not self.presence.was_away():
            return False
        self.session.say("this process was stopped for a while: joining the other rollout workers again")
        self.member.close(5.0)
        self._revoked()
        self.member = join_others(self.session)
        return True

    def _look(self, *, wait_s: float) -> None:
        self.control.poll(wait_s)
        self._looked = time.monotonic()

    def _wait(self) -> None:
        """Nothing can be drawn: wait for what is missing, weights or prompts."""
        if self.queue.waiting():
            self._look(wait_s=IDLE_WAIT_S)
        elif self.control.story.newest_version > self.engine.version:
            self._load(self.control.story.newest_version)  # its prompts are on their way
        else:
            self._take(0.01 if self._flying else IDLE_WAIT_S)

    def _draw(self) -> None:
        """One decode step."""
        started = time.monotonic()
        ended = self.engine.step()
        self.session.add("generate_s", time.monotonic() - started)
        if not self._ended:
            self._gathered = started
        self._ended += [one for one in ended if one.sample in self._left.get(one.group, ())]

    def _publish_ended(self, *, all_of_them: bool = False) -> None:
        """Send what ended, with its group or soon, as long as it is certain whose partition it is."""
        if not self._ended or not self._settled or self._absent():
            return
        all_of_them = all_of_them or self.engine.idle or time.monotonic() - self._gathered > GATHER_S
        there = Counter(completion.group for completion in self._ended)
        ripe = [one for one in self._ended if all_of_them or there[one.group] == len(self._left[one.group])]
        if ripe:
            self._ended = [one for one in self._ended if not all_of_them and there[one.group] < len(self._left[one.group])]
            for completion in ripe:
                self._publish(completion)

    def _take(self, wait_s: float) -> None:
        for event in self.member.take(wait_s):
            match event:
                case Assigned():
                    self._assigned(event)
                case Revoked():
                    self._revoked()
                case Records():
                    for record in event.records:
                        self._received(record)

    def _revoked(self) -> None:
        self.queue.revoke()
        self._settled = False

    def _assigned(self, event: Assigned) -> None:
        """Drop what others own now, and learn from `rollouts` which samples of the own partitions exist already."""
        owned = {partition: committed for (_, partition), committed in event.partitions.items()}
        for group, work in list(self._in_hand.items()):
            if work.partition not in owned or work.offset < (owned[work.partition].offset or 0):  # another's, or done by another
                self._drop(group)
        ends = self.session.log.end_offsets(event.partitions)
        found = self.existing.follow({partition: rollouts_start(committed.metadata) for partition, committed in owned.items()})
        for partition, committed in owned.items():
            inherited_end, rollouts_end = ends[self.session.topic("prompts"), partition], self.existing.position(partition)
            self.queue.assign(partition, offset=committed.offset or 0, inherited_end=inherited_end, rollouts_end=rollouts_end)
        for sample in found:
            self.queue.exists(*sample)
        for group, work in list(self._in_hand.items()):
            self._keep(group, self._left[group].difference(self.queue.known(work.partition, group)))
        self._settled = True
        self.session.labels["partitions"] = ",".join(str(partition) for partition in sorted(owned))
        self.session.values["slots"] = self.session.config.slots
        self.session.status(force=True)

    def _look_again(self) -> None:
        """Learn which samples others have published since the partitions were assigned."""
        for partition, queue in self.queue.partitions.items():
            self.existing.skip(partition, queue.rollouts_end)
        for sample in self.existing.news():
            self.queue.exists(*sample)
        for partition in self.queue.partitions:
            self.queue.looked(partition, self.existing.position(partition))

    def _keep(self, group: int, samples: set[int]) -> None:
        """Want only these samples of a group in hand."""
        self._left[group] = samples
        self._ended = [one for one in self._ended if one.group != group or one.sample in samples]
        if not samples:
            self.engine.abort(group)

    def _drop(self, group: int) -> None:
        self._keep(group, set())
        del self._in_hand[group], self._left[group]
        self.session.add("dropped_groups")

    def _received(self, record: Record) -> None:
        try:
            with self.session.decoding(record):
                prompt = prompts.read(record, run=self.session.run)[1]
        except Unusable as error:
            self.queue.skip(record)
            self.session.dead_letter(record, error)
            return
        if not self.queue.add(record, prompt):
            self.session.duplicate(f"prompt of group {prompt.group} at {record.topic}/{record.partition}/{record.offset}")

    def _start(self) -> None:
        """Give the engine the prompts it has room for, the lowest group number first."""
        schedule, story = self.session.rules, self.control.story
        while self.engine.pending < self.engine.capacity:
            waiting = self.queue.waiting()
            loaded = self.engine.version
            index = rules.next_in_line(
                [(w.group, w.min_version) for w in waiting], loaded_version=loaded, newest_version=story.newest_version
            )
            if index is None:
                oldest = min((w.min_version for w in waiting), default=None)
                if self.engine.idle:
                    self.session.doing("waiting for prompts" if oldest is None else f"waiting for version {oldest}")
                return
            work = waiting[index]
            wanted = rules.version_to_load(
                schedule, min_version=work.min_version, newest_version=story.newest_version, loaded_version=loaded
            )
            if wanted is not None:
                if not self.engine.idle:
                    return  # the weights change between groups
                self._load(wanted)
            if self._absent():
                return
            self._submit(work)

    def _load(self, version: int) -> None:
        started = time.monotonic()
        self.session.doing(f"loading version {version}")
        self.engine.load_weights(version, fetch(self.session.log, self.control.story.manifests[version], run=self.session.run))
        self.session.add("load_s", time.monotonic() - started)
        self.session.values["version"] = version

    def _submit(self, work: Work) -> None:
        config, work.started = self.session.config, True
        if work.inherited:  # its earlier owner may have published samples after the partition was assigned
            self._look_again()
        missing = self.queue.missing(work)
        if not missing or work.group in self._in_hand:
            work.done = not missing
            return
        self._in_hand[work.group] = work
        self._left[work.group] = set(missing)
        self.session.doing("generating")
        sampling = Sampling(
            temperature=config.sampling.temperature,
            top_p=config.sampling.top_p,
            top_k=config.sampling.top_k,
            max_new_tokens=config.sampling.max_new_tokens,
            stop_ids=tuple(self.session.info["digests"]["stop_ids"]),
        )
        self.engine.submit(
            GroupRequest(
                group=work.group,
                prompt_ids=work.prompt.token_ids,
                samples=tuple(missing),
                rows=work.prompt.samples_per_prompt,
                seed=config.run.seed,
                sampling=sampling,
            )
        )

    def _publish(self, completion: Completion) -> None:
        work, session = self._in_hand[completion.group], self.session
        sampling = session.config.sampling
        with session.costs.encoding():
            tokens = len(completion.token_ids)
            sample = Rollout(
                group=completion.group,
                sample=completion.sample,
                token_ids=completion.token_ids,
                behaviour_logprobs=completion.logprobs,
                loss_mask=np.ones(tokens, np.bool_),
                span_versions=np.array([span.version for span in completion.spans], np.int32),
                span_starts=np.array([span.start for span in completion.spans], np.int32),
                finish=completion.finish,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                started_ns=completion.started_ns,
                ended_ns=completion.ended_ns,
                worker=session.worker,
            )
            value = rollouts.encode(sample)
            headers = rollouts.headers(sample, run=session.run).encode(value)
        outgoing = Outgoing(
            topic=session.topic("rollouts"), partition=work.partition, key=str(work.group).encode(), headers=headers, value=value
        )
        self._flying.append((session.producer.send(outgoing), work, completion.sample))
        session.add("samples")
        session.add("tokens", tokens)
        self._left[work.group].discard(completion.sample)

    def _acknowledge(self) -> None:
        flying, self._flying = self._flying, []
        for pending, work, sample in flying:
            if not pending.done():
                self._flying.append((pending, work, sample))
                continue
            self.queue.acknowledged(work.partition, work.group, sample, pending.offset(0.0))
        still = {work.group for _, work, _ in self._flying} | {group for group, left in self._left.items() if left}
        for group in [group for group in self._in_hand if group not in still]:
            del self._in_hand[group], self._left[group]
            self.session.add("groups")

    def _commit(self) -> None:
        self._committed = time.monotonic()
        if any(queue.gap for queue in self.queue.partitions.values()):
            self._look_again()
        moved = {}
        for partition, queue in self.queue.partitions.items():
            watermark = queue.watermark()
            if watermark is not None:
                moved[self.session.topic("prompts"), partition] = watermark
        if moved:
            self.member.commit(moved)
