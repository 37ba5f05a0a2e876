"""The state of a run, updated record by record from its topics. Report, live view, `status` and tracker use it.

The state depends only on the records, not on how topics are interleaved. `RunView.forget` bounds its memory: unfinished and the newest
finished items are retained, others only counted.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from penstock.infra.log import Log, Partition
from penstock.pipeline.inspect.run_view_types import Ended, GroupFacts, Opened, StepFacts, Tally, WorkerView, WorkingTime
from penstock.pipeline.runtime.topic_reader import POISON, RunReader, scan
from penstock.pipeline.scheduling.rules import DROPPED, IdSet
from penstock.topics import dead_letters, groups, ledger, metrics, prompts, rollouts, runs
from penstock.topics.catalogue import RUNS_TOPIC, TOPICS
from penstock.topics.dead_letters import DeadLetter
from penstock.topics.ledger import Entry
from penstock.topics.metrics import Measurement
from penstock.topics.runs import RunRecord
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import Record, RecordId

SCORED = frozenset({"scored", "filtered"})
"""Outcomes of groups that have rewards."""
DECODED = frozenset({"ledger", "metrics"})
"""Topics whose payloads are decoded; of other topics only the headers are read."""
TOPICS_READ = ("dead-letters", *(topic for topic in TOPICS if topic not in ("run", "weights", "dead-letters")))
KEPT = {"steps": 32, "versions": 4, "groups": 1024, "evals": 32}
"""Numbers of newest items that `forget` retains; it acts when there are twice as many."""
WORK = ("samples", "calls", "groups", "admitted", "step")
"""Cumulative worker values that increase with progress; `step` also increases during a recovery."""

Folded = Entry | Measurement | DeadLetter | RunRecord | Headers
Also = Callable[[Folded | None, Record], None]


@dataclass(slots=True, kw_only=True)
class RunView:
    """The state of one run. Call `fold` with records of its topics and of `penstock.runs`."""

    run: str
    record: RunRecord | None = None
    opened: Entry | None = None
    closed: Entry | None = None
    steps: dict[int, StepFacts] = field(default_factory=dict)
    versions: dict[int, Entry] = field(default_factory=dict)
    rebased: list[Entry] = field(default_factory=list)
    """Ledger entries of rebases: recomputed steps differed, or hardware or libraries had changed, and the run continued."""
    stale: set[int] = field(default_factory=set)
    admitted: IdSet = field(default_factory=IdSet)
    repeated: int = 0
    """Number of prompts admitted again because their first group was abandoned."""
    open: dict[int, Opened] = field(default_factory=dict)
    groups: dict[int, GroupFacts] = field(default_factory=dict)
    samples: dict[int, dict[int, int]] = field(default_factory=dict)
    """Group -> sample -> number of completion tokens."""
    workers: dict[str, WorkerView] = field(default_factory=dict)
    evals: dict[int, Measurement] = field(default_factory=dict)
    """Version -> its first evaluation."""
    dead_letters: dict[tuple[str, int, int], str] = field(default_factory=dict)
    """(topic, partition, offset) of the refused record -> kind."""
    missing_rewards: dict[str, str] = field(default_factory=dict)
    """Process of a scorer -> its samples without a reward by cause, as JSON."""
    duplicates: Counter[str] = field(default_factory=Counter)
    mlflow: dict[str, str] = field(default_factory=dict)
    rewards: dict[int, Tally] = field(default_factory=dict)
    """Oldest policy version of a group -> tally of its scored samples, including filtered groups."""
    no_reward: int = 0
    """Number of samples without a reward in scored and filtered groups."""
    moved_ms: int = 0
    """Time of the last progress: a registration, start, step, version, group, sample, prompt or evaluation."""
    worked: WorkingTime = field(default_factory=WorkingTime)
    past: Ended = field(default_factory=Ended)
    poison: set[RecordId] = field(default_factory=set)
    """Records whose readers crashed while decoding them."""
    _made: RunRecord | None = None
    """Registration in the run's own topic, which takes precedence over the topic of all runs."""
    last_seq: int = -1
    head: str | None = None
    """Digest of the newest ledger entry's payload."""
    measured: dict[tuple[str, str], IdSet] = field(default_factory=dict)
    """(worker, process) -> sequence numbers of its measurements."""

    def fold(self, record: Record) -> Folded | None:
        """Update the view with one record. Raises `Unusable` for an invalid one, and leaves the view unchanged.

        Return the decoded payload, or the headers if only these are read; None for a duplicate, another run, or a topic without a rule.
        """
        if self.poison and record.id in self.poison:
            return None
        if record.topic == RUNS_TOPIC:
            return self._fold_run(record)
        topic = record.topic.removeprefix(f"{self.run}.")
        folded = _FOLDS[topic](self, record) if topic in _FOLDS else None
        if folded is None and topic in _FOLDS:
            self.duplicates[topic] += 1
        elif topic in _PROGRESS:
            self.moved_ms = max(self.moved_ms, record.timestamp_ms)
        return folded

    def _fold_run(self, record: Record) -> RunRecord | None:
        """Apply a registration from `penstock.runs`, the topic of all runs: return it; None for another run or a deletion."""
        if record.key != self.run.encode():
            return None
        if not record.value:  # tombstone: an earlier run of this id was deleted
            self.record = None
            return None
        _, state = runs.read(record, run=self.run)
        self.record = state if self._made is None else runs.with_status(self._made, state)
        self.moved_ms = max(self.moved_ms, state.updated_ns // 1_000_000)
        self.worked.add(state.created_ns / 1e9)
        return state

    def _fold_made(self, record: Record) -> RunRecord | None:
        """Apply the registration in the run's own topic; `penstock.runs` only adds the present status to it."""
        _, made = runs.read(record, run=self.run)
        self._made = made
        if self.record is not None:
            self.record = runs.with_status(made, self.record)
        return made

    def _fold_ledger(self, record: Record) -> Entry | None:
        """Apply an entry of the ledger, the trainer's journal: return it; None if it repeats an entry or follows a gap."""
        _, entry = ledger.read(record, run=self.run)
        if not ledger.continues(entry, after=self.last_seq):
            return None
        self.last_seq, self.head = entry.seq, ledger.digest(record.value)
        self.worked.add(entry.time_ns / 1e9)
        if entry.kind == "run-opened":
            self.opened = self.opened or entry
        elif entry.kind == "run-closed":
            self.closed = self.closed or entry
        elif entry.kind == "rebased":
            self.rebased.append(entry)
        elif entry.kind == "stale":
            self.stale.update(entry.groups)
        elif entry.kind == "version" and entry.version is not None:
            self.versions.setdefault(entry.version, entry)
        elif entry.kind == "step" and entry.step is not None:
            members = tuple(planned.group for planned in entry.plan)
            facts = StepFacts(entry.step, entry.version or 0, entry.time_ns / 1e9, members, entry.metrics)
            self.steps.setdefault(entry.step, facts)
        return entry

    def _fold_metrics(self, record: Record) -> Measurement | None:
        """Apply a worker's status, evaluation or final report: return it; None if its sequence number was read before."""
        _, measurement = metrics.read(record, run=self.run)
        numbers = self.measured.setdefault((measurement.worker, measurement.incarnation), IdSet())
        if measurement.seq in numbers:
            return None
        numbers.add(measurement.seq)
        self.worked.add(measurement.time_ns / 1e9)
        worker = self.workers.setdefault(measurement.worker, WorkerView(worker=measurement.worker, role=measurement.role))
        before = [worker.total(name) for name in WORK]
        if worker.incarnations and measurement.incarnation not in worker.incarnations:
            self.worked.stop(measurement.time_ns / 1e9 - 1e-3)  # the gap before a restart is a pause, as after a killed launcher
        worker.add(measurement)
        if measurement.role == "tracker" and measurement.kind == "final":  # the tracker is the last worker to exit
            self.worked.stop(measurement.time_ns / 1e9)
        if measurement.kind == "eval" or [worker.total(name) for name in WORK] != before:
            self.moved_ms = max(self.moved_ms, record.timestamp_ms)
        if measurement.kind == "eval" and measurement.version is not None:
            self.evals.setdefault(measurement.version, measurement)
        if "missing_rewards" in measurement.labels:
            self.missing_rewards[measurement.incarnation] = measurement.labels["missing_rewards"]
        self.mlflow.update({key.removeprefix("mlflow_"): text for key, text in measurement.labels.items() if key.startswith("mlflow_")})
        return measurement

    def _fold_groups(self, record: Record) -> Headers | None:
        """Apply the outcome of a group, from the headers alone: return them; None for a second outcome of the group."""
        headers = groups.check(record, run=self.run)
        if headers.part:  # a later part of a group whose first part was counted
            return headers
        assert headers.group is not None
        assert headers.outcome is not None
        if headers.group in self.groups or headers.group in self.past.groups:
            return None
        counts = headers.samples or 0, headers.tokens or 0
        outcome = GroupFacts(headers.outcome, *counts, headers.reward_mean, headers.policy_version_min, headers.no_reward or 0)
        self.groups[headers.group] = outcome
        self.open.pop(headers.group, None)
        self.no_reward += outcome.no_reward
        if outcome.outcome in SCORED and outcome.reward_mean is not None and outcome.version_min is not None:
            scored = outcome.samples - outcome.no_reward
            tally = Tally(scored, scored * outcome.reward_mean)
            self.rewards[outcome.version_min] = self.rewards.get(outcome.version_min, Tally()).plus(tally)
        return headers

    def _fold_prompts(self, record: Record) -> Headers | None:
        """Apply a prompt, which admits its group: return its headers; None for a second prompt of the group."""
        headers = prompts.check(record, run=self.run)
        if headers.group is None or headers.group in self.admitted:
            return None
        self.admitted.add(headers.group)
        self.repeated += bool(headers.attempt)
        if headers.group not in self.groups and headers.group not in self.past.groups:
            self.open[headers.group] = Opened(record.partition, record.timestamp_ms / 1000)
        return headers

    def _fold_rollouts(self, record: Record) -> Headers | None:
        """Add the token counts of generated samples: return the record's headers; None if all its samples were read before."""
        headers = rollouts.check(record, run=self.run)
        assert headers.group is not None
        samples, tokens = self.samples.setdefault(headers.group, {}), rollouts.tokens_of(headers)
        if tokens.keys() <= samples.keys():
            return None
        samples.update(tokens | samples)
        return headers

    def _fold_dead_letters(self, record: Record) -> DeadLetter | None:
        """Count a record that a worker refused: return its dead letter; None for a second one about the same record."""
        _, dead_letter = dead_letters.read(record, run=self.run)
        if dead_letter.record_id in self.dead_letters:
            return None
        self.dead_letters[dead_letter.record_id] = dead_letter.kind
        if dead_letter.kind == POISON and dead_letter.topic.removeprefix(f"{self.run}.") in DECODED:
            self.poison.add(dead_letter.record_id)
        return dead_letter

    def forget(self) -> None:
        """Bound the memory: drop finished items except the newest and count them in `past`. Acts at twice the numbers in `KEPT`."""
        if all(len(getattr(self, name)) < 2 * most for name, most in KEPT.items()):
            return
        past = self.past
        for number in range(past.counted_steps, max(self.steps, default=-1) + 1):
            for group in self.steps[number].groups if number in self.steps else ():
                past.settle(group, "trained")
        past.counted_steps = max(self.steps, default=-1) + 1
        for group in self.stale:
            past.settle(group, "stale")
        for group, facts in self.groups.items():
            if facts.outcome in DROPPED:
                past.settle(group, facts.outcome)
        for number in sorted(self.steps)[: -KEPT["steps"]]:
            del self.steps[number]
            past.steps += 1
        for version in sorted(self.versions)[: -KEPT["versions"]]:
            del self.versions[version]
            past.versions += 1
        for version in sorted(self.evals)[: -KEPT["evals"]]:
            del self.evals[version]
        ended = [group for group in self.groups if group in past.settled]
        for group in ended[: max(0, len(self.groups) - KEPT["groups"])]:
            past.groups.add(group)
            past.outcomes[self.groups.pop(group).outcome] += 1
        self.stale = {group for group in self.stale if group in self.groups or group not in past.groups}

    @property
    def progress(self) -> int:
        """Number of steps, versions and group outcomes so far. It does not increase during a recovery, which repeats steps."""
        return self.steps_done + len(self.versions) + self.past.versions + len(self.groups) + self.past.outcomes.total()

    @property
    def steps_done(self) -> int:
        return len(self.steps) + self.past.steps

    @property
    def version(self) -> int | None:
        return max(self.versions, default=None)


_FOLDS: dict[str, Callable[[RunView, Record], Folded | None]] = {
    "run": RunView._fold_made,
    "ledger": RunView._fold_ledger,
    "metrics": RunView._fold_metrics,
    "groups": RunView._fold_groups,
    "prompts": RunView._fold_prompts,
    "rollouts": RunView._fold_rollouts,
    "dead-letters": RunView._fold_dead_letters,
}


_PROGRESS = frozenset({"ledger", "groups", "prompts", "rollouts"})


def load(log: Log, run: str, *, topics: Collection[str] = TOPICS_READ) -> RunView:
    """Return a run's view from its records in these topics, up to the current end offsets. Raises `LogError`."""
    return read_view(RunReader(log, run), topics=topics)


def read_view(
    reader: RunReader,
    *,
    topics: Collection[str] = TOPICS_READ,
    also: Also | None = None,
    view: RunView | None = None,
    since: Mapping[Partition, int] | None = None,
) -> RunView:
    """Return a run's view from its records in these topics, up to the current end offsets; unusable records are skipped.

    `also` is called with what `fold` returned for each record, and the record. `view` is a saved view to update, and `since` has the offset
    after its last record in each partition.
    """
    view = RunView(run=reader.run) if view is None else view
    # The topic of all runs first: if it shows that the run has ended, the other topics are complete. Then dead letters of poison records.
    sources = [
        scan(reader.log, RUNS_TOPIC, f"{reader.run}.run"),
        *(reader.records(*(topic for topic in part if topic in topics), since=since) for part in (TOPICS_READ[:1], TOPICS_READ[1:])),
    ]
    for record in itertools.chain.from_iterable(sources):
        with contextlib.suppress(Unusable):
            folded = view.fold(record)
            if also is not None:
                also(folded, record)
    return view
