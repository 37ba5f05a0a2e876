"""The feeder: the data set becomes `prompts`, as fast as the rules admit them.

The rule: group n's prompt is a function of (seed, n); admission follows the newest weights and the dropped groups, so that a
slow trainer holds the whole pipeline back by itself.
"""

import json
import time
from dataclasses import dataclass, field
from typing import Any

from infra.log import Start
from pipeline import schedule as rules
from pipeline.control import Story
from pipeline.data import order
from pipeline.rendering import Renderer
from pipeline.runs import open_data
from pipeline.session import Session
from topics import groups, metrics, prompts
from topics.errors import Unusable
from topics.prompts import Prompt
from topics.record import Outgoing, Record

POLL_S = 0.5


@dataclass(slots=True)
class Admission:
    """What the feeder knows: who was admitted where, what ended how, and who has room."""

    run: str
    partitions: int
    story: Story
    admitted: int = 0
    partition_of: dict[int, int] = field(default_factory=dict)
    unfinished: list[int] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    slots: list[int] = field(default_factory=list)
    owners: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unfinished = [0] * self.partitions
        self.slots = [0] * self.partitions
        self.owners = [None] * self.partitions

    def fold(self, record: Record) -> None:
        """Take note of a record of any of the topics the feeder follows. Raises `Unusable`."""
        topic = record.topic.removeprefix(f"{self.run}.")
        if topic == "prompts":
            self.admit(prompts.read(record, run=self.run)[1].group, record.partition)
        elif topic == "groups":
            headers = groups.check(record, run=self.run)
            assert headers.group is not None
            self._end(headers.group, dropped=headers.outcome in rules.DROPPED)
        elif topic == "metrics":
            self._advertised(metrics.read(record, run=self.run)[1])
        else:
            self.story.fold(record)
            self.dropped |= self.story.stale

    def admit(self, group: int, partition: int) -> None:
        """Note that a group's prompt stands in a partition."""
        if group not in self.partition_of:
            self.partition_of[group] = partition
            while self.admitted in self.partition_of:  # groups are admitted in order: a number beyond a gap is not ours
                self.admitted += 1
            self.unfinished[partition] += group not in self.ended

    def _end(self, group: int, *, dropped: bool) -> None:
        if group not in self.ended:
            self.ended.add(group)
            if group in self.partition_of:
                self.unfinished[self.partition_of[group]] -= 1
            if dropped:
                self.dropped.add(group)

    def _advertised(self, measurement: metrics.Measurement) -> None:
        if measurement.role != "rollout" or "partitions" not in measurement.labels:
            return
        owned = [] if measurement.kind == "final" else [int(text) for text in measurement.labels["partitions"].split(",") if text]
        share = max(1, -(-int(measurement.values.get("slots", 1)) // max(1, len(owned))))
        for partition in range(self.partitions):
            if partition in owned:
                self.owners[partition], self.slots[partition] = measurement.worker, share
            elif self.owners[partition] == measurement.worker:
                self.owners[partition] = None


def main(session: Session) -> None:
    """Admit prompts until the run is closed."""
    session.check_model()
    dataset = open_data(session.config)
    data = session.config.data
    renderer = Renderer(session.config.model.path, chat_template=data.chat_template, max_prompt_tokens=data.max_prompt_tokens)
    # Fence first, read afterwards: nothing an earlier feeder still had in hand can follow what is read now.
    transactions = session.log.transactions(f"{session.run}.feeder")
    count = session.config.partitions
    state = Admission(session.run, count, Story(session.run))
    past = session.log.tail({(session.topic("prompts"), p): "earliest" for p in range(count)})
    for record in past.read_to_end(120.0):
        _fold(state, record)
    past.close()
    follow: dict[tuple[str, int], Start] = {(session.topic("groups"), p): "earliest" for p in range(count)}
    follow |= {(session.topic("ledger"), 0): "earliest", (session.topic("weights"), 0): "earliest", (session.topic("metrics"), 0): "latest"}
    tail = session.log.tail(follow)
    for record in tail.read_to_end(120.0):
        _fold(state, record)
    session.ready()
    while state.story.closed is None and not session.stop.is_set():
        batch = _admissible(state, session, dataset, renderer)
        if batch:
            transactions.commit(batch)
        session.values.update(admitted=state.admitted, dropped=len(state.dropped))
        session.status()
        for record in tail.poll(POLL_S):
            _fold(state, record)
    session.doing("done")
    tail.close()
    transactions.close()


def _fold(state: Admission, record: Record) -> None:
    """Take note of a record; one that cannot be used is put aside by the role that owns reading its topic."""
    try:
        state.fold(record)
    except Unusable:
        return


def _admissible(state: Admission, session: Session, dataset: Any, renderer: Renderer) -> list[Outgoing]:
    """The prompts that the rules and the owners' free slots allow now."""
    batch: list[Outgoing] = []
    schedule = session.rules
    limit = rules.admission_limit(schedule, newest_version=state.story.newest_version, dropped=len(state.dropped), steps=session.steps)
    while state.admitted < limit:
        partition = rules.choose_partition(unfinished=state.unfinished, slots=state.slots, owners=state.owners)
        if partition is None:
            session.doing(
                f"group {state.admitted} waits for a rollout worker with room" if any(state.owners) else "waiting for a rollout worker"
            )
            return batch
        number = state.admitted
        slot = rules.slot_of(admitted=number, dropped=len(state.dropped))
        oldest = rules.min_version(schedule, slot=slot)
        prompt = _prompt(session, dataset, renderer, number=number, slot=slot, oldest=oldest)
        with session.costs.encoding():
            headers = prompts.headers(prompt, run=session.run).encode()
            value = prompts.encode(prompt)
        batch.append(Outgoing(topic=session.topic("prompts"), partition=partition, key=str(number).encode(), headers=headers, value=value))
        state.admit(number, partition)
    waiting = (
        "all prompts of the run are out"
        if limit - len(state.dropped) >= session.steps * schedule.prompts_per_step
        else "waiting for new weights"
    )
    session.doing(waiting)
    return batch


def _prompt(session: Session, dataset: Any, renderer: Renderer, *, number: int, slot: int, oldest: int) -> Prompt:
    """Group `number`'s prompt, rendered and tokenised once."""
    config = session.config
    epoch, index = order(config.run.seed, number, len(dataset), shuffle=config.data.shuffle)
    row = dataset[index]
    text, token_ids = renderer.render(row)
    return Prompt(
        group=number,
        slot=slot,
        min_version=oldest,
        samples_per_prompt=config.schedule.samples_per_prompt,
        epoch=epoch,
        row=row.index,
        prompt=text,
        messages=None if row.messages is None else json.dumps(row.messages),
        token_ids=token_ids,
        columns=json.dumps(row.columns),
        created_ns=time.time_ns(),
    )
