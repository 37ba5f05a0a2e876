"""Reads recorded groups as input of reward functions, scores them again, and writes them as a new run.

Completion texts are read from the recorded outcome or, without one, decoded from token ids with the run's tokenizer. As in a live scorer,
reward functions run in child processes with time limits: one that fails yields a failed group with a reason, not a reward of zero.
A new run is registered last, so that an interruption leaves no run.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Self

from penstock.infra.errors import LogError
from penstock.infra.log import Log, Producer, Transactions
from penstock.infra.paths import run_directory
from penstock.infra.sandbox.timed_pool import Done, Failed
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.config.load import Config, ConfigError, to_json
from penstock.pipeline.data.tokenization import Decoder, digests
from penstock.pipeline.inspect.recorded_run import RecordedRun
from penstock.pipeline.rewards.functions import Score
from penstock.pipeline.rewards.scoring import group_of, payload_of, reward_pool, scored_group
from penstock.pipeline.runtime.registration.run_registry import find, make_key, usable, write
from penstock.pipeline.runtime.topic_reader import Read
from penstock.pipeline.runtime.weights.publish import chunk_partitions, manifest_record, send_version
from penstock.pipeline.runtime.weights.read import fetch
from penstock.topics import groups, ledger, prompts, rollouts
from penstock.topics.catalogue import topics_of
from penstock.topics.groups import Group
from penstock.topics.ledger import Entry
from penstock.topics.prompts import Prompt
from penstock.topics.rollouts import Rollout, generated
from penstock.topics.runs import RunRecord, Status
from penstock.topics.weights import Manifest
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import Outgoing, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A recorded group that can be scored again."""

    group: Group
    """The recorded group; without rewards if it has no outcome."""
    partition: int
    before: str | None
    """Recorded outcome: scored, filtered or failed; None if the group was never scored."""
    messages: str | None
    """The prompt as chat messages in JSON; None for a plain prompt."""
    completions: tuple[str, ...]
    samples: tuple[Rollout, ...]
    """Samples by number, in the order of `completions`."""

    @property
    def number(self) -> int:
        return self.group.group


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedGroup:
    """A group that could not be scored again, and the reason."""

    number: int
    partition: int
    before: str | None
    reason: str
    group: Group | None
    """The recorded group with its outcome; None if it was never scored."""


def cases(recorded: RecordedRun, *, model: str | None = None, only: AbstractSet[int] | None = None) -> Iterator[Case | SkippedGroup]:
    """Yield every admitted group, or those in `only`: first the groups with an outcome in log order, then the others by number.

    `model` is the directory of the run's tokenizer; the configured one if None. Raises `LogError`.
    """
    prompts = read_prompts(recorded, numbers=only)
    unscored: dict[int, Group | None] = dict.fromkeys(prompts)
    for outcome in recorded.reader.groups(only=only):
        if (group := outcome.payload) is None:
            continue
        number, partition = group.group, outcome.record.partition
        if number not in prompts:
            yield SkippedGroup(number=number, partition=partition, before=group.outcome, reason="the prompt cannot be read", group=group)
            continue
        if not group.samples:
            unscored[number] = group
            continue
        del unscored[number]
        yield Case(
            group=group, partition=partition, before=group.outcome, messages=prompts[number][0].messages,
            completions=tuple(sample.completion for sample in group.samples), samples=tuple(sample.rollout for sample in group.samples),
        )  # fmt: skip
    yield from _from_tokens(recorded, prompts, unscored, model=model)


def read_prompts(recorded: RecordedRun, *, numbers: AbstractSet[int] | None = None) -> dict[int, tuple[Prompt, int]]:
    """Return group -> (prompt, partition). Prompts that cannot be read are skipped."""
    reads = recorded.reader.prompts(only=numbers)
    return {read.payload.group: (read.payload, read.record.partition) for read in reads if read.payload is not None}


def _from_tokens(
    recorded: RecordedRun, prompts: Mapping[int, tuple[Prompt, int]], unscored: Mapping[int, Group | None], *, model: str | None
) -> Iterator[Case | SkippedGroup]:
    """Yield the groups without rewards; their completions are decoded from the token ids of their samples."""
    if not unscored:
        return
    decoder = decoder_of(recorded, model)
    by_group: dict[int, dict[int, Rollout]] = {}
    for read in recorded.reader.samples(only=unscored.keys()):
        if (rollout := read.payload) is not None:
            group_samples = by_group.setdefault(rollout.group, {})
            if len(group_samples) < prompts[rollout.group][0].samples_per_prompt:
                group_samples[rollout.sample] = rollout
    for number, group in sorted(unscored.items()):
        prompt, partition = prompts[number]
        samples = tuple(rollout for _, rollout in sorted(by_group.pop(number, {}).items()))
        before = group.outcome if group else None
        if (problem := _problem(prompt, before, samples)) is not None:
            yield SkippedGroup(number=number, partition=partition, before=before, reason=problem, group=group)
        elif isinstance(decoder, str):
            yield SkippedGroup(number=number, partition=partition, before=before, reason=decoder, group=group)
        else:
            yield Case(
                group=group or _blank(prompt, recorded), partition=partition, before=before, messages=prompt.messages,
                completions=tuple(decoder.decode(generated(sample)) for sample in samples), samples=samples,
            )  # fmt: skip


def _problem(prompt: Prompt, before: str | None, samples: tuple[Rollout, ...]) -> str | None:
    """Return the reason why a group cannot be scored; None if it can."""
    if len(samples) < prompt.samples_per_prompt:
        return f"{len(samples)} of {prompt.samples_per_prompt} samples are in the log"
    if aborted := sum(sample.finish == "abort" for sample in samples):
        return f"{aborted} of {len(samples)} samples were aborted"
    if before == "abandoned":
        return "the group was abandoned: its last samples arrived after the deadline"
    return None


def decoder_of(recorded: RecordedRun, model: str | None) -> Decoder | str:
    """Return a decoder for the run's tokenizer in `model` (the configured directory if None), or the reason why there is none."""
    path = model or recorded.config.model.path
    info = recorded.info
    try:
        here = digests(Path(path), chat_template=recorded.config.data.chat_template)
        if "digests" in info and here["tokenizer"] != info["digests"]["tokenizer"]:
            return (
                f"completions are recorded as token ids, and the tokenizer in {path} is not the run's; give its directory with --model DIR"
            )
        return Decoder(path)
    except (ValueError, OSError) as error:
        return f"completions are recorded as token ids, and the run's tokenizer cannot be loaded ({error}); give --model DIR"


def _blank(prompt: Prompt, recorded: RecordedRun) -> Group:
    return group_of(prompt, "failed", reason="never scored", reward=recorded.config.reward, scored_ns=prompt.created_ns)


WINDOW = 32
"""Groups in flight per child process. Results are yielded in order, so a slow group delays later ones."""
POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group with its new outcome."""

    case: Case
    group: Group
    """The group with the new outcome; without samples if the reward function failed."""

    @property
    def number(self) -> int:
        return self.group.group

    @property
    def partition(self) -> int:
        return self.case.partition


def score_groups(
    recorded: Iterable[Case | SkippedGroup], config: Config, *, steps: int, processes: int
) -> Iterator[ScoredGroup | SkippedGroup]:
    """Score groups with `config.reward` in `processes` child processes; yield the results in the order of the groups.

    `steps` is the run's number of steps, which reward functions receive. Raises `ChildError` if a reward function cannot be loaded.
    """
    settings = {"max_steps": steps, "max_completion_length": config.max_completion_tokens, "by_source": config.data.rewards}
    with closing(reward_pool(config.reward, size=processes, **settings)) as pool:
        waiting: dict[int, Case] = {}
        ended: dict[int, ScoredGroup | SkippedGroup] = {}
        yielded = 0
        for number, case in enumerate(chain(recorded, (None,))):
            if isinstance(case, SkippedGroup):
                ended[number] = case
            elif case is not None:
                waiting[number] = case
                per_version = config.schedule.steps_per_version
                payload = payload_of(case.group, case.samples, case.completions, messages=case.messages, steps_per_version=per_version)
                pool.submit(number, payload)
            most = 0 if case is None else WINDOW * processes - 1
            while yielded in ended or len(waiting) + len(ended) > most:
                if yielded in ended:
                    yield ended.pop(yielded)
                    yielded += 1
                else:
                    for result in pool.poll(POLL_S):
                        scored = waiting.pop(result.key)
                        ended[result.key] = ScoredGroup(case=scored, group=new_outcome(scored, result, config))


def new_outcome(case: Case, result: Done[int] | Failed[int], config: Config) -> Group:
    """Return the group with its new outcome. If the reward function failed, the group is `failed`, with the reason and without samples."""
    names = tuple(config.reward.functions)
    same = replace(case.group, reward_names=names, reward_weights=tuple(config.reward.weights or [1.0] * len(names)))
    if isinstance(result, Failed):
        return replace(same, outcome="failed", reason=result.reason, samples=(), metrics=None)
    return scored_group(same, case.samples, case.completions, Score.of(result.result), algorithm=config.algorithm)


WORKER = "replay-score"
BATCH_BYTES = 8 << 20
"""Bytes of outcomes after which a transaction is committed."""
WAIT_S = 60.0


@dataclass(slots=True, kw_only=True)
class NewRun:
    """Writes a new run from the records of another. A context manager that deletes the topics if the run was not registered."""

    log: Log
    source: RecordedRun
    run: str
    config: Config
    producer: Producer
    transactions: Transactions
    worker: str = WORKER
    """Name of the scorer in the headers of written groups."""
    offsets: dict[int, int] = field(default_factory=dict)
    """Group -> offset of its committed outcome."""
    _waiting: list[Outgoing] = field(default_factory=list)
    _bytes: int = 0
    _head: str | None = None
    _done: bool = False

    @classmethod
    def create(cls, log: Log, source: RecordedRun, run: str, config: Config, *, option: str = "--write", worker: str = WORKER) -> Self:
        """Create the topics of a new run, whose id is the value of `option`. Raises `ConfigError` for an invalid or existing id.

        Topics of an unregistered run with an empty ledger are left over from a killed process: they and the run's directory are deleted.
        """
        usable(run, f"{option} ")
        left = log.topics(f"{run}.")
        recorded = f"{run}.ledger" in left and any(log.end_offsets([(f"{run}.ledger", 0)]).values())
        if find(log, run) is not None or recorded:
            raise ConfigError(f"{option} {run}: this run or topics of this name exist already; choose another id")
        if left:
            shutil.rmtree(run_directory(run), ignore_errors=True)
            log.delete_topics(left)
        count = log.partitions(f"{source.run}.prompts")
        if not count or 0 not in source.past.ledger_state.manifests:
            raise LogError(f"{source.run} cannot be copied: its topics do not exist, or version 0 was never published; start the run first")
        specs = topics_of(
            run, partitions=count, weight_partitions=config.weight_partitions, weight_segment_bytes=config.weight_segment_bytes,
            sample_segment_bytes=config.sample_segment_bytes, turns=config.turns_by_log,
        )  # fmt: skip
        log.create_topics(specs, copies=config.kafka.copies)
        return cls(
            log=log, source=source, run=run, config=config, worker=worker, producer=log.producer(),
            transactions=log.transactions(f"{run}.{WORKER}"),
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.transactions.close()
            self.producer.close()
        finally:
            if not self._done:
                self.log.delete_topics(self.log.topics(f"{self.run}."))

    def add(self, result: ScoredGroup | SkippedGroup) -> None:
        """Write the new outcome of a group. For a skipped group the recorded outcome, if any, is written."""
        if (group := result.group) is not None:
            # The recorded time of scoring keeps the order of arrival.
            first_scored = isinstance(result, ScoredGroup) and result.case.before is None
            self.write_group(replace(group, scored_ns=time.time_ns()) if first_scored else group, result.partition)

    def write_group(self, group: Group, partition: int) -> str:
        """Write the outcome of a group to `partition` of `groups`; return its SHA-256."""
        parts, key = groups.encode_parts(group, run=self.run, worker=self.worker), str(group.group).encode()
        topic = f"{self.run}.groups"
        self._write(Outgoing(topic=topic, partition=partition, key=key, headers=own.encode(value), value=value) for own, value in parts)
        return parts[0][0].sha256 or ""

    def copy_group(self, outcome: Read[Group]) -> None:
        """Write a recorded outcome of the source run unchanged."""
        self._write(self._renamed(record, groups.check(record, run=self.source.run)) for record in outcome.records)

    def copy(self, *, only: AbstractSet[int] | None = None, notify: Callable[[str], None]) -> None:
        """Copy the source's prompts and samples: all, or those of the groups in `only`."""
        notify(f"copying prompts and samples to {self.run}")
        reader = self.source.reader
        copied: tuple[tuple[Callable[..., Headers], Iterator[Read[Any]]], ...] = (
            (prompts.check, reader.prompts(only=only)),
            (rollouts.check, reader.samples(only=only)),
        )
        for check, reads in copied:
            # A record with several samples is read once per sample, and copied once.
            for _, records in groupby((read.record for read in reads if read.payload is not None), key=lambda record: record.id):
                record = next(records)
                self.producer.send(self._renamed(record, check(record, run=reader.run)))
        self.producer.flush(WAIT_S)
        self.producer.check()

    def finish(self, *, origin: dict[str, Any], notify: Callable[[str], None]) -> RunRecord:
        """Copy prompts, samples and version 0, write a closed ledger without steps, and register the run."""
        self.commit()
        self.copy(notify=notify)
        info = {**self.source.info, "rescored_from": origin}
        manifest = self.copy_version(0)
        end = {"status": "finished", "reason": f"rescored from {self.source.run}: nothing was trained"}
        now = time.time_ns()
        entries = (
            Entry(seq=0, kind="run-opened", time_ns=now, details=self.opening(info)),
            Entry(seq=1, kind="version", time_ns=now, version=0, step=0, digest=manifest.digest, metrics={"bytes": float(manifest.nbytes)}),
            Entry(seq=2, kind="run-closed", time_ns=now, step=0, digest=manifest.digest, details=json.dumps(end)),
        )
        return self.register(info, entries, [manifest], status="finished")

    def opening(self, info: Mapping[str, Any]) -> str:
        """Return the details of the `run-opened` entry: the source's, with this run's configuration and info."""
        opened = self.source.past.ledger_state.opened
        return json.dumps({**json.loads((opened and opened.details) or "{}"), "config": json.loads(to_json(self.config)), "info": info})

    def copy_version(self, version: int, tensors: Sequence[TensorBytes] | None = None) -> Manifest:
        """Send a policy version of the source run; `tensors` are its weights, read from the log if None. Raises `LogError`."""
        manifests = self.source.past.ledger_state.manifests
        recorded, content = manifests[version], tensors or fetch(self.log, manifests, version, run=self.source.run)
        return replace(self.send(content, version=version, step=recorded.step, digest=recorded.digest), created_ns=recorded.created_ns)

    def send(self, tensors: Sequence[TensorBytes], *, version: int, step: int, digest: str) -> Manifest:
        """Send the chunks of a policy version; return its manifest, which `register` writes."""
        return send_version(
            self.producer, tensors, run=self.run, version=version, step=step,
            partitions=chunk_partitions(version, count=self.log.partitions(f"{self.run}.weights") or 0),
            max_bytes=self.config.weights.chunk_mib * 2**20, digest=lambda: digest,
        )  # fmt: skip

    def register(self, info: Mapping[str, Any], entries: Iterable[Entry], manifests: Iterable[Manifest], *, status: Status) -> RunRecord:
        """Write the ledger and the manifests of the sent versions in one transaction, then register the run."""
        self.transactions.commit([*(manifest_record(one, run=self.run) for one in manifests), *map(self._as_record, entries)])
        now = time.time_ns()
        record = RunRecord(run=self.run, status=status, config=to_json(self.config), info=json.dumps(info), created_ns=now, updated_ns=now)
        make_key(self.run)
        write(self.log, record)
        self._done = True
        return record

    def _as_record(self, entry: Entry) -> Outgoing:
        linked = replace(entry, previous=self._head)
        outgoing = ledger.outgoing(linked, run=self.run, topic=f"{self.run}.ledger", key=entry.kind.encode())
        self._head = ledger.digest(outgoing.value)
        return outgoing

    def _renamed(self, record: Record, headers: Headers) -> Outgoing:
        """Return a record of the source as a record of this run, for the same topic and partition."""
        topic = f"{self.run}{record.topic.removeprefix(self.source.run)}"
        named = replace(headers, run=self.run).encode(record.value)
        return Outgoing(topic=topic, partition=record.partition, key=record.key, headers=named, value=record.value)

    def _write(self, parts: Iterable[Outgoing]) -> None:
        for part in parts:
            self._waiting.append(part)
            self._bytes += len(part.value)
        if self._bytes >= BATCH_BYTES:
            self.commit()

    def commit(self) -> None:
        offsets = self.transactions.commit(self._waiting) if self._waiting else []
        for record, offset in zip(self._waiting, offsets, strict=True):
            self.offsets.setdefault(int(record.key or b""), offset)
        self._waiting, self._bytes = [], 0
