"""Where a restarted tracker begins: at the log's beginning, or behind the view that is in the log, once records were deleted.

The rule: counts come from records that are there or from the saved view; the points of ledger and metrics, which nobody deletes, are the
same either way.
"""

from collections.abc import Iterator, Mapping

from penstock.infra.log import Log, Partition
from penstock.pipeline.observe.live import saved_view
from penstock.pipeline.observe.live.saved_view import Saved
from penstock.pipeline.observe.run_view import Folded, RunView
from penstock.pipeline.runtime.topic_reader import between, deleted
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record


def known(log: Log, run: str) -> Saved:
    """What is known of the records that were deleted, and the offsets to go on from; an empty view and none where all are there."""
    if not deleted(log, f"{run}.prompts", f"{run}.groups"):
        return RunView(run=run), {}
    view, since = saved_view.newest(log, run)
    return view, {place: offset for place, offset in since.items() if place[0] not in (RUNS_TOPIC, f"{run}.run")}


def held_before(log: Log, run: str, since: Mapping[Partition, int]) -> Iterator[tuple[Folded, Record]]:
    """The ledger's entries and the measurements before these offsets, each once: `metrics.jsonl` may be on another machine."""
    view = RunView(run=run)
    for topic in ("ledger", "metrics"):
        at = (f"{run}.{topic}", 0)
        for record in between(log, at, log.beginning_offsets([at])[at], since.get(at, 0)):
            try:
                payload = view.fold(record)
            except Unusable:
                continue  # set aside by the tracker that read it first
            if payload is not None:
                yield payload, record
            view.forget()
