"""What a run's topics say about it, folded record by record: one state for the report, the live view, `status` and the tracker.

The rule: `RunView.fold` is a pure function of the records, in any interleaving of topics; it looks at no clock and at nothing but the log.
"""

import json
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.pipeline.observe.run_view_types import GroupFacts, Opened, StepFacts, Tally, WorkerView, together
from penstock.pipeline.scheduling.id_set import IdSet
from penstock.topics import dead_letters, groups, ledger, metrics, prompts, rollouts, runs
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.dead_letters import DeadLetter
from penstock.topics.ledger import Entry
from penstock.topics.metrics import Measurement
from penstock.topics.runs import RunRecord
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import Record

SCORED = frozenset({"scored", "filtered"})
"""Outcomes with a reward for every sample."""
DECODED = frozenset({"ledger", "metrics"})
"""Topics whose payloads are looked at here; of the others the headers say enough."""
RECENT_STEPS = 4
"""Steps' worth of groups behind the moving mean of the reward, of at most `RECENT_GROUPS`."""
RECENT_GROUPS = 1024
WORK = ("samples", "groups", "admitted", "step")
"""Cumulative numbers of workers that rise while there is progress; `step` rises in a recovery, too."""

Folded = Entry | Measurement | DeadLetter | RunRecord | Headers


@dataclass(slots=True, kw_only=True)
class RunView:
    """The state of one run; feed it records of any of its topics and of `penstock.runs`."""

    run: str
    record: RunRecord | None = None
    opened: Entry | None = None
    closed: Entry | None = None
    steps: dict[int, StepFacts] = field(default_factory=dict)
    versions: dict[int, Entry] = field(default_factory=dict)
    stale: set[int] = field(default_factory=set)
    admitted: set[int] = field(default_factory=set)
    open: dict[int, Opened] = field(default_factory=dict)
    """Admitted groups without an outcome."""
    groups: dict[int, GroupFacts] = field(default_factory=dict)
    samples: dict[int, dict[int, int]] = field(default_factory=dict)
    """Completion tokens of every sample, by group and sample number."""
    workers: dict[str, WorkerView] = field(default_factory=dict)
    evals: dict[int, Measurement] = field(default_factory=dict)
    """The first evaluation of each version."""
    dead_letters: dict[tuple[str, int, int], str] = field(default_factory=dict)
    """Place of the refused record -> kind."""
    duplicates: Counter[str] = field(default_factory=Counter)
    """Records that were ignored because an earlier one says the same, by topic."""
    mlflow: dict[str, str] = field(default_factory=dict)
    """run_id and uri, once the tracker has said them."""
    rewards: dict[int, Tally] = field(default_factory=dict)
    """All scored samples, filtered ones included, by the oldest policy version of their group."""
    moved_ms: int = 0
    """When there was progress last: the run was registered or started, a step, a version, a group, a sample, a prompt, an evaluation."""
    _recent: deque[Tally] = field(default_factory=lambda: deque(maxlen=RECENT_GROUPS))
    _killers: set[tuple[str, int, int]] = field(default_factory=set)
    """Places of records whose readers have died of decoding them."""
    _last_seq: int = -1
    _measured: dict[tuple[str, str], IdSet] = field(default_factory=dict)

    def fold(self, record: Record) -> Folded | None:
        """Take in a record and give what it holds; None for a duplicate and for what is not about this run.

        Raises `Unusable`, and is unchanged then.
        """
        if self._killers and (record.topic, record.partition, record.offset) in self._killers:
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
        if record.key != self.run.encode():
            return None
        if not record.value:  # a run that had this id was deleted
            self.record = None
            return None
        _, found = runs.read(record, run=self.run)
        if self.record is not None and found.updated_ns < self.record.updated_ns:
            return None  # an old state once more: compaction keeps the last record, which need not be the newest
        self.record = found
        self.moved_ms = max(self.moved_ms, found.updated_ns // 1_000_000)
        return found

    def _fold_ledger(self, record: Record) -> Entry | None:
        _, entry = ledger.read(record, run=self.run)
        if not ledger.continues(entry, after=self._last_seq):
            return None
        self._last_seq = entry.seq
        if entry.kind == "run-opened":
            self.opened = self.opened or entry
        elif entry.kind == "run-closed":
            self.closed = self.closed or entry
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
        _, found = metrics.read(record, run=self.run)
        measured = self._measured.setdefault((found.worker, found.incarnation), IdSet())
        if found.seq in measured:
            return None
        measured.add(found.seq)
        worker = self.workers.setdefault(found.worker, WorkerView(worker=found.worker, role=found.role))
        before = [worker.total(name) for name in WORK]
        worker.add(found)
        if found.kind == "eval" or [worker.total(name) for name in WORK] != before:
            self.moved_ms = max(self.moved_ms, record.timestamp_ms)
        if found.kind == "eval" and found.version is not None:
            self.evals.setdefault(found.version, found)
        self.mlflow.update({key.removeprefix("mlflow_"): text for key, text in found.labels.items() if key.startswith("mlflow_")})
        return found

    def _fold_groups(self, record: Record) -> Headers | None:
        found = groups.check(record, run=self.run)
        if found.part:  # a later part of a group that is there already
            return found
        assert found.group is not None
        assert found.outcome is not None
        if found.group in self.groups:
            return None
        facts = GroupFacts(found.outcome, found.samples or 0, found.tokens or 0, found.reward_mean, found.policy_version_min)
        self.groups[found.group] = facts
        self.open.pop(found.group, None)
        if facts.outcome in SCORED and facts.reward_mean is not None and facts.version_min is not None:
            tally = Tally(facts.samples, facts.samples * facts.reward_mean)
            self.rewards[facts.version_min] = self.rewards.get(facts.version_min, Tally()).plus(tally)
            self._recent.append(tally)
        return found

    def _fold_prompts(self, record: Record) -> Headers | None:
        found = prompts.check(record, run=self.run)
        if found.group is None or found.group in self.admitted:
            return None
        self.admitted.add(found.group)
        if found.group not in self.groups:
            self.open[found.group] = Opened(record.partition, record.timestamp_ms / 1000)
        return found

    def _fold_rollouts(self, record: Record) -> Headers | None:
        found = rollouts.check(record, run=self.run)
        assert found.group is not None
        assert found.sample is not None
        drawn = self.samples.setdefault(found.group, {})
        if found.sample in drawn:
            return None
        drawn[found.sample] = found.tokens or 0
        return found

    def _fold_dead_letters(self, record: Record) -> DeadLetter | None:
        _, letter = dead_letters.read(record, run=self.run)
        place = (letter.topic, letter.partition, letter.offset)
        if place in self.dead_letters:
            return None
        self.dead_letters[place] = letter.kind
        if letter.kind == "killer" and letter.topic.removeprefix(f"{self.run}.") in DECODED:
            self._killers.add(place)
        return letter

    @property
    def details(self) -> dict[str, Any]:
        """What the ledger says about the run's end: status and reason."""
        return _object(self.closed.details if self.closed else None)

    @property
    def status(self) -> str:
        """finished, stopped or failed once the ledger or the run's record says so, else created or running."""
        if self.closed is not None:
            return str(self.details.get("status", "finished"))
        said = self.record.status if self.record else "created"
        since = self.record.updated_ns if self.record and said == "stopped" else 0
        # A stopped run that is resumed is known by the workers that report again.
        resumed = said == "stopped" and any(worker.time_ns > since and not worker.ended for worker in self.workers.values())
        return "running" if resumed or (said == "created" and self.opened is not None) else said

    @property
    def ended(self) -> bool:
        """Whether nothing more is to come."""
        return self.status in ("finished", "stopped", "failed")

    @property
    def config(self) -> dict[str, Any]:
        """The run's configuration as a plain table, {} before it is known."""
        return _object(self.record.config) if self.record else dict(_object(self.opened.details if self.opened else None).get("config", {}))

    @property
    def info(self) -> dict[str, Any]:
        """What was found out when the run was created."""
        return _object(self.record.info) if self.record else dict(_object(self.opened.details if self.opened else None).get("info", {}))

    @property
    def progress(self) -> int:
        """Counts what moves a run on: steps, versions, outcomes of groups; a recovery repeats them and adds none."""
        return len(self.steps) + len(self.versions) + len(self.groups)

    @property
    def steps_planned(self) -> int | None:
        """Optimizer steps of the whole run."""
        return self.info.get("steps")

    @property
    def steps_per_version(self) -> int:
        """S"""
        return int(self.config.get("schedule", {}).get("steps_per_version") or 1)

    @property
    def version(self) -> int | None:
        """The newest published policy version."""
        return max(self.versions, default=None)

    @property
    def reward(self) -> float | None:
        """Moving mean over all scored samples of the last few steps' groups, before any filter."""
        groups = RECENT_STEPS * int(self.config.get("schedule", {}).get("prompts_per_step") or 8)
        return together(list(self._recent)[-groups:]).mean


_FOLDS: dict[str, Callable[[RunView, Record], Folded | None]] = {
    "ledger": RunView._fold_ledger,
    "metrics": RunView._fold_metrics,
    "groups": RunView._fold_groups,
    "prompts": RunView._fold_prompts,
    "rollouts": RunView._fold_rollouts,
    "dead-letters": RunView._fold_dead_letters,
}


_PROGRESS = frozenset({"ledger", "groups", "prompts", "rollouts"})


def _object(text: str | None) -> dict[str, Any]:
    found = json.loads(text) if text else {}
    return found if isinstance(found, dict) else {}
