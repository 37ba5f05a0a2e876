"""The mark in a step's entry, from what the trainer holds when it commits the step."""

import contextlib
from collections.abc import Mapping, Sequence

from penstock.infra.log import Partition
from penstock.pipeline.runtime.factories import open_store
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.scheduling import rules
from penstock.pipeline.scheduling.resume_point import ResumePoint
from penstock.topics import weights
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record
from penstock.workers.trainer.group_inbox import GroupInbox
from penstock.workers.trainer.resuming import Places


def resume_point_at(
    session: Session, inbox: GroupInbox, places: Places, positions: Mapping[Partition, int], *, saved: Sequence[int]
) -> ResumePoint:
    """Where a step that is about to be committed leaves the run; `positions` are those of the trainer's tail."""
    selector, checkpoints = inbox.selector, places.checkpoints(saved)
    oldest = checkpoints[-1][0] if checkpoints else 0
    version, manifests = places.anchor(rules.version_after(oldest, steps_per_version=session.schedule.steps_per_version))
    open_groups = {(session.topic("groups"), partition): offset for partition, offset in inbox.begins().items()}
    return ResumePoint(
        below=selector.below,
        settled=tuple(sorted(selector.settled)),
        drops=selector.drops_to_resume,
        dropped=selector.drops,
        positions={place_name(session, at): open_groups.get(at, position) for at, position in positions.items()},
        checkpoints=checkpoints,
        manifests=manifests,
        version=version,
        rebased=places.rebased,
        rewards=(inbox.scale.low, inbox.scale.high) if inbox.scale.low <= inbox.scale.high else (),
    )


def note_anchor(places: Places, record: Record, state: LedgerState) -> None:
    """Note where the manifest of a version that begins a chain stands."""
    with contextlib.suppress(Unusable):
        manifest = state.manifests.get(weights.check(record, run=state.run).policy_version_min or 0)
        if manifest is not None and manifest.begins_chain:
            places.anchors.setdefault(manifest.version, record.offset)


def saved_steps(session: Session) -> list[int]:
    """Steps of the checkpoints that exist, newest first."""
    store = open_store(session.config, session.run)
    return [] if store is None else store.steps()


def place_name(session: Session, at: Partition) -> str:
    """A partition's name in a mark.

    Example:
        place_name(session, ("demo.groups", 3))  # -> "groups/3"
    """
    return f"{at[0].removeprefix(f'{session.run}.')}/{at[1]}"
