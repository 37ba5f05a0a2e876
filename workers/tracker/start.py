"""Where a restarted tracker starts: at the log's beginning, or after the saved view if records were deleted.

Counts come from existing records or the saved view; the points of ledger and metrics, which are never deleted, are the same either way.
"""

from collections.abc import Iterator, Mapping

from penstock.infra.log import Log, Partition
from penstock.pipeline.inspect.live import saved_view
from penstock.pipeline.inspect.live.saved_view import Saved
from penstock.pipeline.inspect.run_view import Folded, RunView
from penstock.pipeline.runtime.topic_reader import between, deleted
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record


def saved_start(log: Log, run: str) -> Saved:
    """The view of the deleted records, and the offsets after it; an empty view and no offsets if nothing was deleted."""
    if not deleted(log, f"{run}.prompts", f"{run}.groups"):
        return RunView(run=run), {}
    view, since = saved_view.newest(log, run)
    return view, {partition: offset for partition, offset in since.items() if partition[0] not in (RUNS_TOPIC, f"{run}.run")}


def entries_before(log: Log, run: str, since: Mapping[Partition, int]) -> Iterator[tuple[Folded, Record]]:
    """The ledger's entries and the measurements before these offsets, each once: `metrics.jsonl` may be on another machine."""
    view = RunView(run=run)
    for topic in ("ledger", "metrics"):
        at = (f"{run}.{topic}", 0)
        for record in between(log, at, log.beginning_offsets([at])[at], since.get(at, 0)):
            try:
                payload = view.fold(record)
            except Unusable:
                continue  # the tracker that read it first wrote a dead letter
            if payload is not None:
                yield payload, record
            view.forget()
