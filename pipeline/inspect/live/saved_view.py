"""The run view as a record of the topic `state`: written by the tracker, the starting point of readers.

A saved view plus the later records equals a view of all records that forgets. Without a usable saved view, all records are read.
"""

import json
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from penstock.infra.log import Log, Partition, Pending, Producer
from penstock.pipeline.inspect.run_status import steps_per_version
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.run_view_types import RATE_WINDOW, Ended, GroupFacts, Opened, StepFacts, Tally, WorkerView, WorkingTime
from penstock.pipeline.runtime.topic_reader import scan
from penstock.pipeline.scheduling.rules import IdSet
from penstock.topics.catalogue import RUNS_TOPIC, STATE, topic_name
from penstock.topics.ledger import Entry
from penstock.topics.metrics import Measurement
from penstock.topics.upkeep import state
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Outgoing, RecordId

FORMAT = 1
EVERY_S = 15.0
"""Interval between saved views; a reader folds the records written since the newest one."""
MOST_BYTES = 8 << 20
"""A larger view is not written: it has too many dead letters or too many incarnations of workers."""
REWARDS = 256
"""Largest number of reward entries in a saved view; older versions are merged into ranges to stay below it."""

Saved = tuple[RunView, dict[Partition, int]]


@dataclass(slots=True)
class ViewWriter:
    """Writes the run view with the offsets up to which it was folded."""

    log: Log
    producer: Producer
    worker: str
    _written_s: float = float("-inf")

    def write(self, view: RunView, positions: Mapping[Partition, int], *, now: bool = False) -> Pending | None:
        """Write the view if that is due, and return its record. `positions` are the offsets up to which it was folded."""
        if not now and time.monotonic() - self._written_s < EVERY_S:
            return None
        self._written_s = time.monotonic()
        topic = f"{view.run}.{STATE}"
        text = to_json(view)
        if len(text) > MOST_BYTES or self.log.partitions(topic) is None:  # the run is older than this topic
            return None
        named = {f"{name.removeprefix(f'{view.run}.')}/{number}": offset for (name, number), offset in positions.items()}
        record = state.State(worker=self.worker, positions=json.dumps(named), view=text)
        value = state.encode(record)
        headers = state.headers(record, run=view.run).encode(value)
        return self.producer.send(Outgoing(topic=topic, partition=0, key=state.KEY, headers=headers, value=value))


def newest(log: Log, run: str) -> Saved:
    """The newest saved view and the offsets after it; an empty view and no offsets if none is usable. Raises `LogError`."""
    state_partition = (f"{run}.{STATE}", 0)
    if log.partitions(state_partition[0]) is None:
        return RunView(run=run), {}
    end = log.end_offsets([state_partition])[state_partition]
    for record in reversed(list(scan(log, state_partition[0], since={state_partition: max(0, end - 2)}))):
        try:
            saved = state.read(record, run=run)[1]
            positions = {_partition(run, name): int(offset) for name, offset in json.loads(saved.positions).items()}
            if not all(number < (log.partitions(topic) or 0) for topic, number in positions):
                continue
            ends = log.end_offsets(positions)
            if all(ends[tp] >= offset for tp, offset in positions.items()):  # otherwise records that it has folded were lost
                starts = log.beginning_offsets(positions)
                return from_json(run, saved.view), {tp: max(starts[tp], offset) for tp, offset in positions.items()}
        except (Unusable, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return RunView(run=run), {}


def to_json(view: RunView) -> str:
    """A view as JSON, without its registry records, which are few and read each time."""
    document = {
        "format": FORMAT,
        "opened": _entry(view.opened),
        "closed": _entry(view.closed),
        "steps": [list(step) for step in view.steps.values()],
        "versions": [_entry(entry) for entry in view.versions.values()],
        "rebased": [_entry(entry) for entry in view.rebased],
        "stale": sorted(view.stale),
        "admitted": view.admitted.as_json(),
        "repeated": view.repeated,
        "open": [[group, *opened] for group, opened in view.open.items()],
        "groups": [[group, *facts] for group, facts in view.groups.items()],
        "workers": [_worker(worker) for worker in view.workers.values()],
        "evals": [asdict(evaluation) for evaluation in view.evals.values()],
        "dead_letters": [[*record_id, kind] for record_id, kind in view.dead_letters.items()],
        "reward_errors": dict(view.reward_errors),
        "mlflow": view.mlflow,
        "rewards": [[version, *tally] for version, tally in _stretches(view).items()],
        "no_reward": view.no_reward,
        "moved_ms": view.moved_ms,
        "worked": view.worked.spans,
        "stops": view.worked.stops,
        "killers": sorted(view.killers),
        "last_seq": view.last_seq,
        "measured": [[*source, numbers.as_json()] for source, numbers in view.measured.items()],
        "past": {field.name: _plain(getattr(view.past, field.name)) for field in fields(Ended)},
    }
    return json.dumps(document, separators=(",", ":"))


def from_json(run: str, text: str) -> RunView:
    """The view in `text`. Raises `ValueError`, `KeyError`, `TypeError` for text that `to_json` of this release did not write."""
    document = json.loads(text)
    if document["format"] != FORMAT:
        raise ValueError(f"a view of format {document['format']}, this release reads {FORMAT}")
    steps = [StepFacts(number, version, time_s, tuple(groups), values) for number, version, time_s, groups, values in document["steps"]]
    versions = [_as_entry(entry) for entry in document["versions"]]
    past = document["past"]
    return RunView(
        run=run,
        opened=None if document["opened"] is None else _as_entry(document["opened"]),
        closed=None if document["closed"] is None else _as_entry(document["closed"]),
        steps={step.step: step for step in steps},
        versions={entry.version: entry for entry in versions if entry.version is not None},
        rebased=[_as_entry(entry) for entry in document["rebased"]],
        stale=set(document["stale"]),
        admitted=IdSet.from_json(document["admitted"]),
        repeated=document["repeated"],
        open={group: Opened(*opened) for group, *opened in document["open"]},
        groups={group: GroupFacts(*facts) for group, *facts in document["groups"]},
        workers={plain["worker"]: _as_worker(plain) for plain in document["workers"]},
        evals={values["version"]: Measurement(**values) for values in document["evals"]},
        dead_letters={(topic, partition, offset): kind for topic, partition, offset, kind in document["dead_letters"]},
        reward_errors=Counter(document["reward_errors"]),
        mlflow=document["mlflow"],
        rewards={version: Tally(*tally) for version, *tally in document["rewards"]},
        no_reward=document["no_reward"],
        moved_ms=document["moved_ms"],
        worked=WorkingTime([(low, high) for low, high in document["worked"]], document["stops"]),
        killers={RecordId(*record_id) for record_id in document["killers"]},
        last_seq=document["last_seq"],
        measured={(worker, incarnation): IdSet.from_json(numbers) for worker, incarnation, numbers in document["measured"]},
        past=Ended(**{name: _as_sets(past[name]) for name in past} | {name: Counter(past[name]) for name in ("outcomes", "fates")}),
    )


def _stretches(view: RunView) -> dict[int, Tally]:
    """Rewards by first version of a range, wide enough for `REWARDS` ranges; the newest versions have their own entries."""
    width, newest = 1, max(view.rewards, default=0)
    while newest // width > REWARDS:
        width *= 2
    single = newest - max(REWARDS, 2 * steps_per_version(view))
    tallies: dict[int, Tally] = {}
    for version in sorted(view.rewards):
        first = version if version > single else version // width * width
        tallies[first] = tallies.get(first, Tally()).plus(view.rewards[version])
    return tallies


def _entry(entry: Entry | None) -> dict[str, Any] | None:
    return None if entry is None else asdict(replace(entry, plan=(), boundaries=()))


def _as_entry(plain: Mapping[str, Any]) -> Entry:
    return Entry(**{**plain, "plan": (), "boundaries": (), "groups": tuple(plain["groups"])})


def _worker(worker: WorkerView) -> dict[str, Any]:
    plain = {field.name: getattr(worker, field.name) for field in fields(WorkerView)}
    return {**plain, "values": None, "recent": list(worker.recent)}


def _as_worker(plain: dict[str, Any]) -> WorkerView:
    values = plain["incarnations"].get(plain["incarnation"], {})
    recent = deque(((time_ns, totals) for time_ns, totals in plain["recent"]), maxlen=RATE_WINDOW)
    return WorkerView(**{**plain, "values": values, "recent": recent})


def _plain(value: Any) -> Any:
    return value.as_json() if isinstance(value, IdSet) else value


def _as_sets(plain: Any) -> Any:
    return IdSet.from_json(plain) if isinstance(plain, dict) and "pages" in plain else plain


def _partition(run: str, name: str) -> Partition:
    topic, _, number = name.rpartition("/")
    return (topic if topic == RUNS_TOPIC else topic_name(run, topic)), int(number)
