"""The rollout worker: `prompts` and `weights` become `rollouts`, one record a sample.

The rule: a prompt starts only under weights it allows, the lowest group number first, and only the samples that nobody has
published are drawn; a sample's random numbers follow from (run seed, group, sample).
"""

import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from infra.engines.requests import Completion, Engine, GroupRequest, Sampling
from infra.log import Assigned, Event, Member, Pending, Records, Revoked, Start
from pipeline import schedule as rules
from pipeline.control import Control
from pipeline.engines import make_engine
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
    member = session.log.member(f"{session.run}.rollout", [session.topic("prompts")], max_records=64, max_bytes=64 * 2**20)
    worker = Rollouts(session, engine, control, member)
    session.ready()
    try:
        while control.story.closed is None and not session.stop.is_set():
            worker.turn()
    finally:
        worker.hand_back()
        member.close(5.0)
        control.close()
        engine.close()


@dataclass(slots=True)
class Rollouts:
    """The worker's state between two turns of its loop."""

    session: Session
    engine: Engine
    control: Control
    member: Member
    queue: PromptQueue = field(default_factory=PromptQueue)
    _in_hand: dict[int, Work] = field(default_factory=dict)
    _left: dict[int, set[int]] = field(default_factory=dict)
    """Samples of the groups in hand that the engine has not returned."""
    _ended: list[Completion] = field(default_factory=list)
    """Samples that are not sent yet."""
    _flying: list[tuple[Pending, Work, int]] = field(default_factory=list)
    _looked: float = 0.0
    _gathered: float = 0.0
    _committed: float = 0.0

    def turn(self) -> None:
        """Take what arrived, start what may start, decode one step, publish what ended, commit what is done."""
        for event in self.member.take(0.0):
            self._on(event)
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
        """Commit what is acknowledged, so that the next owner draws only what is missing."""
        self.session.producer.flush(10.0)
        self._acknowledge()
        self._commit()
        self.session.labels["partitions"] = ""

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
            for event in self.member.take(0.01 if self._flying else IDLE_WAIT_S):
                self._on(event)

    def _draw(self) -> None:
        """One decode step; what ended in it is sent with its group, or soon."""
        started = time.monotonic()
        ended = self.engine.step()
        self.session.add("generate_s", time.monotonic() - started)
        if not self._ended:
            self._gathered = started
        self._ended += ended
        all_of_them = self.engine.idle or started - self._gathered > GATHER_S
        there = Counter(completion.group for completion in self._ended)
        ripe = [one for one in self._ended if all_of_them or there[one.group] == len(self._left[one.group])]
        if ripe:
            self._ended = [one for one in self._ended if not all_of_them and there[one.group] < len(self._left[one.group])]
            for completion in ripe:
                self._publish(completion)

    def _on(self, event: Event) -> None:
        match event:
            case Assigned():
                self._assigned(event)
            case Revoked():
                self.queue.revoke(partition for _, partition in event.partitions)
            case Records():
                for record in event.records:
                    self._received(record)

    def _assigned(self, event: Assigned) -> None:
        """Learn from `rollouts` which samples of the new partitions exist already."""
        offsets = {partition: committed.offset or 0 for (_, partition), committed in event.partitions.items()}
        topic = self.session.topic("rollouts")
        starts: dict[tuple[str, int], Start] = {
            (topic, partition): rollouts_start(committed.metadata) for (_, partition), committed in event.partitions.items()
        }
        samples: list[tuple[int, int, int, int]] = []
        ends: dict[int, int] = {partition: int(start) for (_, partition), start in starts.items()}
        if starts:
            tail = self.session.log.tail(starts)
            for record in tail.read_to_end(120.0):
                ends[record.partition] = record.offset + 1
                try:
                    headers = rollouts.check(record, run=self.session.run)
                except Unusable:
                    continue  # the scorer owns reading `rollouts`
                if headers.group is not None and headers.sample is not None:
                    samples.append((record.partition, headers.group, headers.sample, record.offset))
            tail.close()
        self.queue.assign(offsets, samples, ends)
        self.session.labels["partitions"] = ",".join(str(partition) for partition in sorted(self.queue.partitions))
        self.session.values["slots"] = self.session.config.rollout.slots
        self.session.status(force=True)

    def _received(self, record: Record) -> None:
        try:
            with self.session.costs.decoding():
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
            self._submit(work)

    def _load(self, version: int) -> None:
        started = time.monotonic()
        self.session.doing(f"loading version {version}")
        self.engine.load_weights(version, fetch(self.session.log, self.control.story.manifests[version], run=self.session.run))
        self.session.add("load_s", time.monotonic() - started)
        self.session.values["version"] = version

    def _submit(self, work: Work) -> None:
        config, work.started = self.session.config, True
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
                span_versions=np.array([completion.version], np.int32),
                span_starts=np.zeros(1, np.int32),
                finish=completion.finish,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                started_ns=completion.started_ns,
                ended_ns=completion.ended_ns,
                worker=session.worker,
            )
            headers = rollouts.headers(sample, run=session.run).encode()
            value = rollouts.encode(sample)
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
            self.queue.acknowledged(partition=work.partition, group=work.group, sample=sample, offset=pending.offset(0.0))
        still = {work.group for _, work, _ in self._flying} | {group for group, left in self._left.items() if left}
        for group in [group for group in self._in_hand if group not in still]:
            del self._in_hand[group], self._left[group]
            self.session.add("groups")

    def _commit(self) -> None:
        self._committed = time.monotonic()
        moved = {}
        for partition, queue in self.queue.partitions.items():
            watermark = queue.watermark()
            if watermark is not None:
                moved[self.session.topic("prompts"), partition] = watermark
        if moved:
            self.member.commit(moved)
