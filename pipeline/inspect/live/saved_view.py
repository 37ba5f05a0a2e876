"""Stores run views in the topic `state`, so that readers start from the newest one instead of reading all records."""

import functools
import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from penstock.infra.log import Log, Partition, Pending, Producer
from penstock.pipeline.inspect.run_status import steps_per_version
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.run_view_types import RATE_WINDOW, Tally, WorkerView
from penstock.pipeline.runtime.topic_reader import scan
from penstock.pipeline.scheduling.rules import IdSet
from penstock.topics.catalogue import RUNS_TOPIC, STATE, topic_name
from penstock.topics.internal import state
from penstock.topics.ledger import Entry
from penstock.topics.wire.errors import Unusable

FORMAT = 2
EVERY_S = 15.0
"""Interval between saved views."""
MOST_BYTES = 8 << 20
"""A view that is larger, because of many dead letters or restarted workers, is not saved."""
REWARDS = 256
"""Largest number of reward entries in a saved view; older versions are merged into ranges to stay below it."""

Saved = tuple[RunView, dict[Partition, int]]


@dataclass(slots=True)
class ViewWriter:
    """Writes the run view with the offsets after the records that it contains."""

    log: Log
    producer: Producer
    worker: str
    _written_s: float = float("-inf")

    def write(self, view: RunView, positions: Mapping[Partition, int], *, now: bool = False) -> Pending | None:
        """Send the view if `EVERY_S` have passed, or `now`; return the record in flight, None if it was not sent.

        `positions` maps each partition to the offset after the last record in the view.
        """
        if not now and time.monotonic() - self._written_s < EVERY_S:
            return None
        self._written_s = time.monotonic()
        topic = f"{view.run}.{STATE}"
        text = to_json(view)
        if len(text) > MOST_BYTES or self.log.partitions(topic) is None:  # an earlier release created the run, without this topic
            return None
        named = {f"{name.removeprefix(f'{view.run}.')}/{number}": offset for (name, number), offset in positions.items()}
        record = state.State(worker=self.worker, positions=json.dumps(named), view=text)
        return self.producer.send(state.outgoing(record, run=view.run, topic=topic, key=state.KEY))


def newest(log: Log, run: str) -> Saved:
    """Return the newest saved view, and partition -> offset after its last record in it; an empty view and {} if none is usable.

    A view is not usable if another release wrote it or if the log has lost records that it contains. Raises `LogError`.
    """
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
            if all(ends[tp] >= offset for tp, offset in positions.items()):  # otherwise the log has lost records that the view contains
                starts = log.beginning_offsets(positions)
                return from_json(run, saved.view), {tp: max(starts[tp], offset) for tp, offset in positions.items()}
        except (Unusable, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return RunView(run=run), {}


def to_json(view: RunView) -> str:
    """Encode a view as JSON, without registrations, which are few and always read."""
    plain: dict[str, Any] = {name: getattr(view, name) for name in _SAVED} | {"format": FORMAT, "rewards": _merged_rewards(view)}
    for name in _KEY:
        plain[name] = list(plain[name].values())
    for name, count in _PAIRS.items():
        plain[name] = [
            [*(key if count > 1 else (key,)), *(item if isinstance(item, tuple) else (item,))] for key, item in plain[name].items()
        ]
    plain |= {"worked": view.worked.spans, "stops": view.worked.stops}
    return json.dumps(plain, separators=(",", ":"), default=_plain)


def from_json(run: str, text: str) -> RunView:
    """Decode a view. Raises `ValueError`, `KeyError` or `TypeError` for text that `to_json` of this release did not write."""
    plain = json.loads(text, object_hook=lambda item: IdSet.from_json(item) if "pages" in item else item)
    if plain["format"] != FORMAT:
        raise ValueError(f"the saved view has format {plain['format']}, this release reads {FORMAT}")
    for worker in plain["workers"]:
        worker["values"] = {}
    for name, key in _KEY.items():
        plain[name] = {item[key]: item for item in plain[name]}
    for name, count in _PAIRS.items():
        is_tuple = name in _TUPLES
        plain[name] = {tuple(row[:count]) if count > 1 else row[0]: row[count:] if is_tuple else row[count] for row in plain[name]}
    plain["worked"] = {"spans": plain["worked"], "stops": plain["stops"]}
    (view,) = _adapter().validate_python([{"run": run, **{name: plain[name] for name in _SAVED}}])
    for restored in view.workers.values():
        restored.recent, restored.values = deque(restored.recent, RATE_WINDOW), restored.incarnations.get(restored.incarnation, {})
    return view


_KEY: Mapping[str, Any] = {"steps": 0, "versions": "version", "workers": "worker", "evals": "version"}
"""Field that is saved as a list of values -> attribute or index of a value that is its key."""
_PAIRS = {"open": 1, "groups": 1, "rewards": 1, "dead_letters": 3, "measured": 2}
"""Field that is saved as a list of [*key, *value] -> length of the key."""
_TUPLES = frozenset({"open", "groups", "rewards"})
_NOT_SAVED = frozenset({"run", "record", "samples", "duplicates", "_made"})
_SAVED = tuple(field.name for field in fields(RunView) if field.name not in _NOT_SAVED)


@functools.cache
def _adapter() -> TypeAdapter[list[RunView]]:
    return TypeAdapter(list[RunView], config=ConfigDict(arbitrary_types_allowed=True))


def _plain(item: Any) -> Any:
    """Convert an object for `json.dumps`, as its argument `default`."""
    if isinstance(item, IdSet):
        return item.as_json()
    if isinstance(item, set | deque):
        return sorted(item) if isinstance(item, set) else list(item)
    plain = {field.name: getattr(item, field.name) for field in fields(item)}
    left_out = {"plan": (), "boundaries": ()} if isinstance(item, Entry) else {"values": None} if isinstance(item, WorkerView) else {}
    return plain | left_out


def _merged_rewards(view: RunView) -> dict[int, Tally]:
    """Return `view.rewards` with old versions merged into ranges, each under its first version; at most about `REWARDS` items."""
    width, newest = 1, max(view.rewards, default=0)
    while newest // width > REWARDS:
        width *= 2
    single = newest - max(REWARDS, 2 * steps_per_version(view))
    tallies: dict[int, Tally] = {}
    for version in sorted(view.rewards):
        first = version if version > single else version // width * width
        tallies[first] = tallies.get(first, Tally()).plus(view.rewards[version])
    return tallies


def _partition(run: str, name: str) -> Partition:
    """Return the partition that `ViewWriter` has named without the run id: "groups/2"."""
    topic, _, number = name.rpartition("/")
    return (topic if topic == RUNS_TOPIC else topic_name(run, topic)), int(number)
