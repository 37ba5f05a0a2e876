"""A small run told record by record with the real codecs, for the tests of those who only read."""

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from penstock.pipeline.inspect.run_view import RunView
from penstock.topics import dead_letters, groups, ledger, metrics, prompts, rollouts, runs, weights
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.groups import Group, ScoredSample
from penstock.topics.ledger import Entry, Planned
from penstock.topics.metrics import Measurement
from penstock.topics.rollouts import Rollout
from penstock.topics.weights import Chunk
from penstock.topics.wire.record import Outgoing, Record
from tests.support.examples import group_of, prompt_of, sample_of

RUN = "demo-1"
CREATED_S = 1_700_000_000.0
CONFIG: dict[str, Any] = {
    "run": {"name": "demo", "steps": 10, "seed": 0},
    "model": {"path": "/models/tiny"},
    "data": {"source": "tiny:successor", "size": 64},
    "schedule": {"mode": "pipelined", "prompts_per_step": 2, "samples_per_prompt": 4, "steps_per_version": 1},
}


Kind = TypeVar("Kind", Record, Outgoing)


class RecordBuilder:
    """Makes the records of a run of U = 2, K = 4, S = 1 on one partition; rewards grow from 0 to 1."""

    def __init__(self, run: str = RUN, *, steps: int = 10, created_s: float = CREATED_S, config: dict[str, Any] | None = None) -> None:
        self.run, self.steps, self.now_s = run, steps, created_s
        self.config = {**CONFIG, "run": {**CONFIG["run"], "steps": steps}, **(config or {})}
        self.info = {"steps": steps, "rows": 64, "git": "abc123"}
        self.created_ns = int(created_s * 1e9)
        self.seq = 0
        self.measured: Counter[str] = Counter()
        self.next_group = 0

    def record(self, status: Any = "created") -> Outgoing:
        found = runs.RunRecord(
            run=self.run,
            status=status,
            config=json.dumps(self.config),
            info=json.dumps(self.info),
            created_ns=self.created_ns,
            updated_ns=self._ns,
        )
        value = runs.encode(found)
        return Outgoing(topic=RUNS_TOPIC, partition=0, key=self.run.encode(), headers=runs.headers(found).encode(value), value=value)

    def start(self) -> list[Outgoing]:
        """The first records of a run: it is registered and opened."""
        return [self.record(), self.opened()]

    def made(self) -> Outgoing:
        return replace(self.record(), topic=f"{self.run}.run")

    def entry(self, kind: Any, **fields: Any) -> Outgoing:
        entry = Entry(seq=self.seq, kind=kind, time_ns=self._ns, **fields)
        self.seq += 1
        return outgoing(ledger, entry, run=self.run, key=None)

    def opened(self) -> Outgoing:
        return self.entry("run-opened", details=json.dumps({"config": self.config, "info": self.info}))

    def version(self, version: int) -> Outgoing:
        return self.entry("version", version=version, step=version, digest=f"{version:064x}", metrics={"bytes": 1000.0, "publish_s": 0.1})

    def closed(self, status: str = "finished", *, steps: int | None = None, reason: str = "") -> Outgoing:
        done = self.steps if steps is None else steps
        details = json.dumps({"status": status, "reason": reason})
        return self.entry("run-closed", step=done, digest=f"{done:064x}", details=details)

    def measured_by(
        self, worker: str, kind: Any = "status", *, incarnation: str = "a", version: int | None = None, labels: Any = None, **values: float
    ) -> Outgoing:
        seq = self.measured[worker + incarnation]
        self.measured[worker + incarnation] += 1
        found = Measurement(
            worker=worker,
            role=worker.partition("-")[0],
            incarnation=incarnation,
            seq=seq,
            kind=kind,
            time_ns=self._ns,
            version=version,
            values=values,
            labels=labels or {"doing": "working"},
        )
        return outgoing(metrics, found, run=self.run, key=worker.encode())

    def group(self, rewards: Sequence[float | None], *, version: int, outcome: Any = "scored", tokens: int = 3) -> list[Outgoing]:
        """A prompt, its samples and its outcome; `tokens` for each sample."""
        number, self.next_group = self.next_group, self.next_group + 1
        prompt = prompt_of(
            number, min_version=version, samples_per_prompt=len(rewards), prompt="3 4", token_ids=np.array([1, 2], np.int32),
            created_ns=self._ns,
        )  # fmt: skip
        samples = [self._rollout(number, sample, version=version, tokens=tokens) for sample in range(len(rewards))]
        pairs = zip(samples, rewards, strict=True)
        scored = [ScoredSample(rollout=rollout, completion="5", reward=reward, components=(reward,)) for rollout, reward in pairs]
        reason = None if outcome == "scored" else "because"
        found = group_of(prompt, scored, outcome=outcome, reason=reason, scored_ns=self._ns)
        key = str(number).encode()
        first = outgoing(prompts, prompt, run=self.run, key=key)
        drawn = [outgoing(rollouts, rollout, run=self.run, key=key) for rollout in samples]
        return [first, *drawn, *with_group(replace(first, topic=f"{self.run}.groups"), found, run=self.run)]

    def step(self, step: int, members: list[int], *, begun_s: float, reward: float = 0.5) -> Outgoing:
        found = {
            "loss": 1.0 / (step + 1),
            "grad_norm": 0.5,
            "reward_trained": reward,
            "groups": float(len(members)),
            "samples": 4.0 * len(members),
            "tokens": 12.0 * len(members),
            "lag_mean": 0.0,
            "lag_max": 0.0,
            "ess": 1.0,
            "wait_s": 0.6,
            "compute_s": 0.4,
            "first_sample_at": begun_s,
            "last_sample_at": begun_s + 0.8,
            "first_backward_at": begun_s + 0.5,
        }
        plan = tuple(Planned(group=group, sha256="0" * 64, partition=0, offset=group) for group in members)
        return self.entry("step", step=step, version=step, plan=plan, metrics=found)

    def letter(self, *, offset: int = 0, kind: str = "undecodable", reason: str = "not Arrow") -> Outgoing:
        record = Record(topic=f"{self.run}.groups", partition=0, offset=offset, timestamp_ms=0, key=None, headers=(), value=b"?")
        found = dead_letters.from_record(record, kind=kind, reason=reason, worker="trainer", time_ns=self._ns)
        return outgoing(dead_letters, found, run=self.run, key=b"x")

    def whole(self) -> Iterator[Outgoing]:
        """A run of one second a step: one filtered group in it, one group unused at its end."""
        yield self.made()
        yield self.record()
        self.now_s += 2.0
        yield self.opened()
        yield self.version(0)
        yield from self.group([0.0] * 4, version=0, outcome="filtered")
        yield self.measured_by("evaluator", "eval", version=0, greedy_accuracy=0.0, sampled_accuracy=0.1, n=64.0)
        for step in range(self.steps):
            yield from self.round(step)
        yield from self.group([1.0] * 4, version=self.steps - 1, tokens=9)
        yield self.measured_by("evaluator", "eval", version=self.steps, greedy_accuracy=0.9, sampled_accuracy=0.8, n=64.0)
        yield self.closed()
        for worker in ("feeder", "rollout-0", "scorer-0", "trainer", "evaluator"):
            uses = {"time_busy_s": 4.0, "time_no_group_s": 6.0} if worker == "trainer" else {}
            yield self.measured_by(worker, "final", cpu_s=10.0, cost_send_s=0.05, cost_poll_s=0.05, **uses)

    def round(self, step: int) -> Iterator[Outgoing]:
        begun, reward = self.now_s, step / max(1, self.steps - 1)
        members = [self.next_group, self.next_group + 1]
        for _ in members:
            yield from self.group([reward] * 4, version=step)
        done = float(step + 1)
        counts: dict[str, Any] = {"samples": 8 * done, "tokens": 24 * done, "groups": 2 * done}
        yield self.measured_by("rollout-0", version=step, generate_s=0.7 * done, cpu_s=done, **counts)
        yield self.measured_by("trainer", step=done, cpu_s=0.4 * done)
        self.now_s += 1.0
        yield self.step(step, members, begun_s=begun, reward=reward)
        yield self.version(step + 1)

    @property
    def _ns(self) -> int:
        return int(self.now_s * 1e9)

    def _rollout(self, group: int, sample: int, *, version: int, tokens: int) -> Rollout:
        return sample_of(group, sample, range(tokens), version=version, started_ns=self._ns, ended_ns=self._ns)


def outgoing(codec: Any, *found: Any, run: str = RUN, partition: int = 0, key: bytes | None = b"0") -> Outgoing:
    """The record that a worker writes of these, with the topic and the headers of their codec."""
    value = codec.encode(*found)
    topic, headers = codec.SCHEMA.partition("/")[0], codec.headers(*found, run=run).encode(value)
    return Outgoing(topic=f"{run}.{topic}", partition=partition, key=key, headers=headers, value=value)


def stored(sent: Outgoing, offset: int = 0, *, timestamp_ms: int = 0) -> Record:
    """The record as a log delivers it."""
    return Record(
        topic=sent.topic, partition=sent.partition, offset=offset, timestamp_ms=timestamp_ms, key=sent.key, headers=sent.headers,
        value=bytes(sent.value),
    )  # fmt: skip


def with_chunk(record: Record, chunk: Chunk, *, run: str = RUN) -> Record:
    """The record with another chunk, under a right checksum."""
    value = weights.encode_chunk(chunk)
    return replace(record, value=value, headers=weights.chunk_headers(chunk, run=run).encode(value))


def with_group(record: Kind, group: Group, *, run: str = RUN, max_bytes: int = groups.MAX_PART_BYTES) -> list[Kind]:
    """The record with another group, as one for each of its parts; what a log holds stands at offsets that follow each other."""
    parts = groups.encode_parts(group, run=run, worker="scorer-0", max_bytes=max_bytes)
    made = [replace(record, headers=headers.encode(value), value=value) for headers, value in parts]
    return [replace(one, offset=one.offset + number) if isinstance(one, Record) else one for number, one in enumerate(made)]


def as_records(built: Iterable[Outgoing]) -> list[Record]:
    """The records as a log would deliver them: offsets by topic, a second between any two."""
    offsets: Counter[str] = Counter()
    found = []
    for place, sent in enumerate(built):
        found.append(stored(replace(sent, partition=0), offsets[sent.topic], timestamp_ms=int(CREATED_S * 1000) + 1000 * place))
        offsets[sent.topic] += 1
    return found


def folded(records: Iterable[Record]) -> RunView:
    """The state of the run after these records."""
    view = RunView(run=RUN)
    for record in records:
        view.fold(record)
    return view


def interleaved(records: Sequence[Record], seed: int) -> list[Record]:
    """The records with their topics mixed at random, each topic in its order."""
    waiting = {topic: [record for record in records if record.topic == topic] for topic in {record.topic for record in records}}
    draw, mixed = random.Random(seed), list[Record]()
    while waiting:
        topic = draw.choice(sorted(waiting))
        mixed.append(waiting[topic].pop(0))
        if not waiting[topic]:
            del waiting[topic]
    return mixed


def view_of(built: Iterable[Outgoing]) -> RunView:
    """The state of the run after these records, as a log would deliver them."""
    return folded(as_records(built))
