"""Samples whose prompt is not in the log become dead letters; one that is only late, because its leader is away, is waited for."""

import contextlib

from penstock.infra.errors import LogError
from penstock.pipeline.runtime.session import Session
from penstock.topics import prompts
from penstock.topics.wire.errors import Unusable
from penstock.workers.scorer.group_buffer import PartitionGroups

LATE_LIMIT_S = 5.0


def set_aside_orphans(session: Session, state: PartitionGroups, *, now_s: float) -> None:
    """Set aside the samples of groups that have waited long for their prompt, once the log shows that none comes."""
    suspects = state.orphans(now_s=now_s)
    late = _prompts_to_come(session, state) if suspects else frozenset()
    for group in suspects:
        if late is None or group.group in late:
            group.seen_s = now_s
            continue
        del state.open[group.group]
        if group.group < state.below:
            continue  # it had ended long before its samples were read again
        for record in group.records.values():
            error = Unusable(f"no prompt of group {group.group} stands in partition {state.partition}", kind="orphan")
            session.dead_letters.write(record, error)


def _prompts_to_come(session: Session, state: PartitionGroups) -> frozenset[int] | None:
    """Groups whose prompts are in the log now and have not arrived here; None if the log cannot be read."""
    found = set()
    tail = None
    try:
        tail = session.log.tail({(session.topic("prompts"), state.partition): state.prompts_position})
        for record in tail.read_to_end(LATE_LIMIT_S, include_open=True):
            with contextlib.suppress(Unusable):
                found.add(prompts.check(record, run=session.run).group)
    except LogError:
        return None
    finally:
        if tail is not None:
            tail.close()
    return frozenset(group for group in found if group is not None)
