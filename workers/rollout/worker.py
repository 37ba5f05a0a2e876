"""The rollout worker: `prompts` and `weights` become `rollouts`, one record a sample.

The rule: a prompt starts only under weights it allows, the lowest group number first, and only the samples that nobody has
published are drawn; a sample's random numbers follow from (run seed, group, sample). A worker publishes for partitions it owns: while
the group of workers rebalances it draws on and holds the samples back, and what turns out to be another's now is dropped.
"""

import time
from dataclasses import dataclass, field

from penstock.infra.engines.base import Completion, Engine
from penstock.infra.log import Assigned, Member, Pending, Records, Revoked
from penstock.pipeline.runtime.factories import make_engine
from penstock.pipeline.runtime.sampling import request_of, rollout_of
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.scheduling import schedule as rules
from penstock.pipeline.scheduling.staleness import lag_summary
from penstock.topics import prompts, rollouts
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Outgoing, Record
from penstock.workers.rollout.group_tasks import PromptQueue, Work, rollouts_start
from penstock.workers.rollout.groups_in_hand import GroupInHand
from penstock.workers.rollout.presence import Presence
from penstock.workers.rollout.published_samples import ExistingSamples
from penstock.workers.rollout.weight_prefetch import WeightsAhead

IDLE_WAIT_S = 0.2
"""How long an idle worker waits for prompts, or for the weights its prompts need, before it looks around again."""

GATHER_S = 0.25
"""Samples wait this long for the rest of their group, which is of no use before; one request for all costs a fraction of many."""

COMMIT_EVERY_S = 0.5

MEASURE_EVERY_S = 1.0


def main(session: Session) -> None:
    """Draw samples until the run is closed."""
    session.check_model()
    session.doing("loading the model", now=True)
    engine = make_engine(session.config)
    weights = WeightsAhead(session.log, session.run)
    queue = PromptQueue(session.rules.oversample)
    worker = Rollouts(session, engine, weights, join_others(session), ExistingSamples(session.log, session.run), queue)
    session.ready()
    try:
        while weights.story.closed is None and not session.stop.is_set():
            worker.turn()
        worker.hand_back()
    finally:
        worker.close()
        weights.close()
        engine.close()


def join_others(session: Session) -> Member:
    """Membership among the run's rollout workers."""
    return session.log.member(f"{session.run}.rollout", [session.topic("prompts")], max_records=64, max_bytes=64 * 2**20)


@dataclass(slots=True)
class Rollouts:
    """The worker's state between two turns of its loop."""

    session: Session
    engine: Engine
    weights: WeightsAhead
    member: Member
    existing: ExistingSamples
    queue: PromptQueue
    presence: Presence = field(default_factory=Presence)
    _settled: bool = False
    """Whether this worker knows which partitions are its own: not while the group rebalances."""
    _in_hand: dict[int, GroupInHand] = field(default_factory=dict)
    _flying: list[tuple[Pending, Work, int]] = field(default_factory=list)
    _gathered: float = 0.0
    _committed: float = 0.0
    _measured: float = 0.0
    _judged: int = -1
    """The newest version when the groups in hand were last judged by their age."""

    def turn(self) -> None:
        """Take what arrived, publish what ended, load what is newer, start what may start, decode one step, commit what is done."""
        self.weights.check()
        self._absent()
        self._take(0.0)
        self._publish_ended()
        self._refresh()
        self._start()
        if self.engine.idle:
            self._wait()
        else:
            self._draw()
        self._acknowledge()
        if time.monotonic() - self._committed > COMMIT_EVERY_S:
            self._commit()
        if time.monotonic() - self._measured > MEASURE_EVERY_S:
            self._measure()
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

    def _refresh(self) -> None:
        """Between two decode steps: take the newest weights if the schedule says so, and end what can no longer be fresh."""
        if self.session.rules.loads_at != "step":
            return
        if self.weights.version > self.engine.version and self._in_hand:
            self._load()
        newest = self.weights.story.newest_version
        if self.session.rules.stale_in_hand == "abort" and (newest > self._judged or self._hopeless(self.engine.version)):
            self._judged = newest
            for group in self.engine.in_hand():
                if group.oldest_version is not None and self._hopeless(group.oldest_version):
                    self._ended(self.engine.abort(group.group))
                    self.session.add("aborted_groups")

    def _hopeless(self, version: int) -> bool:
        """Whether what is drawn under this version will be stale whatever happens; versions are known before their tensors are here."""
        newest, max_lag = self.weights.story.newest_version, self.session.rules.max_lag
        return rules.is_hopeless(newest_version=newest, policy_version_min=version, max_lag=max_lag)

    def _wait(self) -> None:
        """Nothing can be drawn: wait for what is missing, weights or prompts."""
        if self.queue.waiting():
            self.weights.wait(IDLE_WAIT_S)
        elif self.weights.version > self.engine.version:
            self._load()  # its prompts are on their way
        else:
            self._take(0.01 if self._flying else IDLE_WAIT_S)

    def _draw(self) -> None:
        """One decode step."""
        started = time.monotonic()
        ended = self.engine.step()
        self.session.add("generate_s", time.monotonic() - started)
        self._ended(ended)

    def _ended(self, completions: list[Completion]) -> None:
        """Keep samples that the engine returned, as far as their groups need them."""
        for completion in completions:
            group = self._in_hand.get(completion.group)
            if group is None:
                self.engine.abort(completion.group)  # others have drawn what it needed
                continue
            if not any(one.ended for one in self._in_hand.values()):
                self._gathered = time.monotonic()
            group.take(completion)
            if group.complete and len(group.left) > group.wanted:
                self.engine.abort(completion.group)  # enough of its samples have ended

    def _publish_ended(self, *, all_of_them: bool = False) -> None:
        """Send what ended, with its group or soon, as long as it is certain whose partition it is."""
        ended = [group for group in self._in_hand.values() if group.ended]
        if not ended or not self._settled or self._absent():
            return
        # Under `continue` the loss masks of a group are cut at one version: its samples are published together.
        together = self.session.rules.stale_in_hand == "continue"
        soon = not together and (self.engine.idle or time.monotonic() - self._gathered > GATHER_S)
        for group in ended:
            if all_of_them or soon or group.complete:
                for completion in group.give():
                    self._publish(group.work, completion)

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
        for group in list(self._in_hand.values()):
            place = owned.get(group.work.partition)
            if place is None or group.work.offset < (place.offset or 0):  # another's, or done by another
                self._drop(group)
        ends = self.session.log.end_offsets(event.partitions)
        found = self.existing.follow({partition: rollouts_start(committed.metadata) for partition, committed in owned.items()})
        for partition, committed in owned.items():
            inherited_end, rollouts_end = ends[self.session.topic("prompts"), partition], self.existing.position(partition)
            self.queue.assign(partition, offset=committed.offset or 0, inherited_end=inherited_end, rollouts_end=rollouts_end)
        for sample in found:
            self.queue.exists(*sample)
        for group in self._in_hand.values():
            group.known(self.queue.known(group.work.partition, group.work.group))
            if group.complete:
                self.engine.abort(group.work.group)
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

    def _drop(self, group: GroupInHand) -> None:
        self.engine.abort(group.work.group)
        del self._in_hand[group.work.group]
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
        schedule, newest = self.session.rules, self.weights.version
        while self.engine.has_room:
            waiting = self.queue.waiting()
            loaded = self.engine.version
            index = rules.next_in_line([(w.group, w.min_version) for w in waiting], loaded_version=loaded, newest_version=newest)
            if index is None or self._hopeless(max(loaded, newest)):
                oldest = min((w.min_version for w in waiting), default=None)
                if self.engine.idle:
                    self.session.doing("waiting for prompts" if oldest is None else f"waiting for version {oldest}")
                return
            work = waiting[index]
            wanted = rules.version_to_load(schedule, min_version=work.min_version, newest_version=newest, loaded_version=loaded)
            if wanted is not None:
                if not self.engine.idle and schedule.loads_at != "step":
                    return  # the weights change between groups
                self._load()
            if self._absent():
                return
            self._submit(work)

    def _load(self) -> None:
        """Put the newest weights that are here into the engine."""
        version, tensors = self.weights.take()
        started = time.monotonic()
        if self.engine.idle:
            self.session.doing(f"loading version {version}")
        self.engine.load_weights(version, tensors)
        self.session.add("load_s", time.monotonic() - started)
        self.session.values["version"] = version

    def _submit(self, work: Work) -> None:
        work.started = True
        if work.inherited:  # its earlier owner may have published samples after the partition was assigned
            self._look_again()
        missing = self.queue.missing(work)
        if not missing or work.group in self._in_hand:
            work.done = not missing
            return
        self._in_hand[work.group] = GroupInHand(work, self.queue.wanted(work), set(missing))
        self.session.doing("generating")
        stop_ids = self.session.info["digests"]["stop_ids"]
        self.engine.submit(request_of(work.prompt, missing, config=self.session.config, stop_ids=stop_ids))

    def _publish(self, work: Work, completion: Completion) -> None:
        session, schedule = self.session, self.session.rules
        fresh = self.weights.story.newest_version - schedule.max_lag if schedule.stale_in_hand == "continue" else 0
        with session.costs.encoding():
            sample = rollout_of(completion, sampling=session.config.sampling, worker=session.worker, oldest_trained=fresh)
            value = rollouts.encode(sample)
            headers = rollouts.headers(sample, run=session.run).encode(value)
        outgoing = Outgoing(
            topic=session.topic("rollouts"), partition=work.partition, key=str(work.group).encode(), headers=headers, value=value
        )
        self._flying.append((session.producer.send(outgoing), work, completion.sample))
        session.add("samples")
        session.add("tokens", len(completion.token_ids))
        session.add("spans", len(completion.spans))

    def _acknowledge(self) -> None:
        flying, self._flying = self._flying, []
        for pending, work, sample in flying:
            if not pending.done():
                self._flying.append((pending, work, sample))
                continue
            self.queue.acknowledged(work.partition, work.group, sample, pending.offset(0.0))
        flown = {work.group for _, work, _ in self._flying}
        for number in [number for number, group in self._in_hand.items() if not group.wanted and number not in flown]:
            del self._in_hand[number]
            self.session.add("groups")

    def _measure(self) -> None:
        """What only this worker can say of its engine and of the groups in flight."""
        self._measured = time.monotonic()
        newest = self.weights.story.newest_version
        begun = [newest - group.oldest_version for group in self.engine.in_hand() if group.oldest_version is not None]
        values = {name: value for name, value in self.session.values.items() if not name.startswith("in_flight_")}
        values["in_flight_groups"] = float(len(begun))
        values |= {f"in_flight_{name}": value for name, value in lag_summary(begun).items()}
        self.session.values = values | {f"engine_{name}": value for name, value in self.engine.stats().items()}

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
