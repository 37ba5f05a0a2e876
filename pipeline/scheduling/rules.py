"""Schedules as data; the rules of admission, start, freshness and publication; the presence of partition owners.

All differences between modes are fields of `Schedule`, and `MODES` has the named ones. Rules are pure functions of integers and of a
`Schedule`. A killed worker does not report its exit, so an owner's presence expires `SILENT_S` after its last report.
"""

import time
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.topics.metrics import Measurement

Order = Literal["submission", "arrival"]
StaleInFlight = Literal["finish", "abort", "continue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When steps start, when weights are loaded, and how stale a sample may be."""

    mode: str
    starts_on: Literal["round", "groups"]
    """round: a step waits until its whole round is scored; groups: until its own groups are (complete groups, arXiv 2606.26997)."""
    loads_at: Literal["round", "group", "step"]
    """round: every group of a round is generated under that round's version; group: under the newest version when the group starts; step:
    the newest weights are loaded between two decode steps, and samples in flight continue under them (PipelineRL, arXiv 2509.19128)."""
    max_lag: int
    prompts_per_step: int = 8
    """Prompt groups of a step (U)."""
    samples_per_prompt: int = 8
    """Samples of a group (K)."""
    steps_per_version: int = 1
    """Optimizer steps between two published versions (S)."""
    order: Order = "submission"
    stale_in_hand: StaleInFlight = "finish"
    """Handling of a group in flight that can no longer be fresh. finish: it is generated to its end; abort: it is aborted and replaced
    (RollArt); continue: it continues, and its stale tokens are not trained."""
    oversample: int = 0
    """r: a group is started with K + r samples and closed when K of them have ended."""
    oversample_groups: int = 0
    """s: a round has R + s groups in flight, R = U·S, and ends when R are trained; the others become stale, or the next round's first."""
    max_drops_per_step: int = 128

    @property
    def samples_begun(self) -> int:
        return self.samples_per_prompt + self.oversample

    @property
    def round_groups(self) -> int:
        """Groups trained between two published versions: U·S."""
        return self.prompts_per_step * self.steps_per_version


MODES: Mapping[str, Schedule] = {
    "synchronous": Schedule(mode="synchronous", starts_on="round", loads_at="round", max_lag=0),
    "pipelined": Schedule(mode="pipelined", starts_on="groups", loads_at="round", max_lag=0),
    "one_step_off": Schedule(mode="one_step_off", starts_on="groups", loads_at="group", max_lag=1),
    "in_flight": Schedule(mode="in_flight", starts_on="groups", loads_at="step", max_lag=4, order="arrival"),
    "bounded": Schedule(mode="bounded", starts_on="groups", loads_at="step", max_lag=1, order="arrival", stale_in_hand="abort"),
}


def preset(mode: str, **fields: Any) -> Schedule:
    """A named mode with this run's fields. None keeps the mode's value; `max_drops_per_step` is max(16 U·S, 64) by default."""
    schedule = replace(MODES[mode], **{name: value for name, value in fields.items() if value is not None})
    most_drops = fields.get("max_drops_per_step") or max(16 * schedule.round_groups, 64)
    return replace(schedule, max_drops_per_step=most_drops)


DROPPED = frozenset({"filtered", "failed", "abandoned"})
"""Outcomes a scorer may give a group instead of `scored`; each of them, and `stale`, admits one new prompt."""


def version_after(steps: int, *, steps_per_version: int) -> int:
    """Policy version once `steps` optimizer steps are done: floor(steps / S); 0 is the initial model."""
    return steps // steps_per_version


def versions_of(steps: int, *, steps_per_version: int) -> int:
    """The newest version of a complete run; it is published after the last step even if S does not divide the steps."""
    return -(-steps // steps_per_version)


def publishes(step: int, *, steps: int, steps_per_version: int) -> bool:
    """True if a version is published after the step with this 0-based number."""
    return (step + 1) % steps_per_version == 0 or step + 1 == steps


def too_far_off(ess: float | None, *, floor: float | None) -> bool:
    """True if the last step's effective sample size is below `floor`, so that generation ahead must pause."""
    return ess is not None and floor is not None and ess < floor


def admission_limit(schedule: Schedule, *, newest_version: int, dropped: int, steps: int, ahead: bool = True) -> int:
    """Number of groups that may be admitted by now in all, which limits how far generation runs ahead of training.

    `admitted - dropped <= U·S·(newest_version + 1 + max_lag) + s`, and at most s more than the run's `steps` need. `dropped` is the number
    of distinct dropped groups. Without `ahead` the limit is that of the newest version's round, as if `max_lag` were 0.

    Example:
        admission_limit(preset("pipelined", prompts_per_step=4, samples_per_prompt=8, steps_per_version=1),
                        newest_version=2, dropped=5, steps=100)  # -> 17
    """
    window = schedule.round_groups * (newest_version + 1 + (schedule.max_lag if ahead else 0))
    return min(window, steps * schedule.prompts_per_step) + schedule.oversample_groups + dropped


def slot_of(*, admitted: int, dropped: int) -> int:
    """Position of the next admitted group in the sequence of trained groups."""
    return admitted - dropped


def min_version(schedule: Schedule, *, slot: int, newest_version: int) -> int:
    """Oldest policy version under which a group may be generated: max(0, round - max_lag), with round = floor(slot / (U·S)).

    `slot` is the group's position among the trained groups. The s extra groups of a round have slots of the next one, whose version is not
    published: they start under the newest.
    """
    return max(0, min(slot // schedule.round_groups - schedule.max_lag, newest_version))


def may_start(*, min_version: int, loaded_version: int) -> bool:
    """True if a rollout worker with these weights may start this prompt; otherwise it waits for newer ones."""
    return loaded_version >= min_version


def version_to_load(schedule: Schedule, *, min_version: int, newest_version: int, loaded_version: int) -> int | None:
    """Version to load before a group is started, or None to keep the loaded one.

    Under `loads_at = "round"` weights are loaded only if the group needs newer ones; otherwise the newest are loaded.
    """
    if newest_version <= loaded_version or (schedule.loads_at == "round" and loaded_version >= min_version):
        return None
    return newest_version


def lag(*, learner_version: int, policy_version_min: int) -> int:
    """Staleness of a sample, in versions."""
    return learner_version - policy_version_min


def lag_summary(lags: npt.ArrayLike) -> dict[str, float]:
    """`lag_min`, `lag_mean`, `lag_max` and `lag_p95` (the smallest lag that 95 % do not exceed), in versions; empty without lags."""
    values = np.asarray(lags, np.float64)
    if not values.size:
        return {}
    return {
        "lag_min": float(values.min()),
        "lag_mean": float(values.mean()),
        "lag_max": float(values.max()),
        "lag_p95": float(np.quantile(values, 0.95, method="inverted_cdf")),
    }


def fractions_by_lag(lags: npt.ArrayLike) -> dict[int, float]:
    """Lag -> share, for the lags that occur, in ascending order."""
    distinct, counts = np.unique(np.asarray(lags, np.int64), return_counts=True)
    return {int(lag): int(count) / int(counts.sum()) for lag, count in zip(distinct, counts, strict=True)}


def is_fresh(*, learner_version: int, policy_version_min: int, max_lag: int) -> bool:
    """True if a group may be trained on: the lag of its oldest policy version is at most `max_lag`."""
    return learner_version - policy_version_min <= max_lag


def will_be_stale(*, newest_version: int, policy_version_min: int, max_lag: int) -> bool:
    """True if a group in flight would be stale when it is trained on, because the learner is at `newest_version` or later."""
    return not is_fresh(learner_version=newest_version, policy_version_min=policy_version_min, max_lag=max_lag)


def next_in_line(groups: Sequence[tuple[int, int]], *, loaded_version: int, newest_version: int) -> int | None:
    """Index of the (group number, oldest allowed version) pair to start next: the lowest number that an available version allows.

    None if all must wait for newer weights.
    """
    available = max(loaded_version, newest_version)
    ready = [(number, index) for index, (number, oldest) in enumerate(groups) if may_start(min_version=oldest, loaded_version=available)]
    return min(ready)[1] if ready else None


def choose_partition(*, unfinished: Sequence[int], slots: Sequence[int], owners: Sequence[str | None]) -> int | None:
    """Partition of the next group, or None if no owner has room.

    A partition has room if it has fewer unfinished groups than the slots its owner reports. Of those, the one whose owner has the smallest
    share of its slots in use is chosen, so that a new worker gets groups at once.

    Example:
        choose_partition(unfinished=[1, 0, 2], slots=[2, 2, 2], owners=["a", "b", "a"])  # -> 1
    """
    used: dict[str, int] = {}
    room: dict[str, int] = {}
    for count, slot, owner in zip(unfinished, slots, owners, strict=True):
        if owner is not None:
            used[owner] = used.get(owner, 0) + count
            room[owner] = room.get(owner, 0) + slot
    candidates = [
        (used[owner] / room[owner], unfinished[partition], partition)
        for partition, owner in enumerate(owners)
        if owner is not None and unfinished[partition] < slots[partition]
    ]
    return min(candidates)[2] if candidates else None


SILENT_S = 30.0
"""An owner without a report for this long is absent. It reports once a second, except while it loads weights or compiles."""


@dataclass(slots=True)
class Presence:
    """The owners of a run's partitions according to their reports, on the reader's clock."""

    partitions: int
    now_s: float = 0.0
    """Time since the reader started, without pauses."""
    slots: list[int] = field(init=False)
    """Partition -> number of unfinished groups that it may have at once."""
    _owners: list[str | None] = field(init=False)
    _seen_s: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.slots, self._owners, self._seen_s = [0] * self.partitions, [None] * self.partitions, [0.0] * self.partitions

    def update(self, process: str, owned: Collection[int], *, slots: int) -> None:
        """Apply a report: the process owns exactly these partitions and has `slots` for groups over all of them."""
        share = max(1, -(-slots // max(1, len(owned))))
        for partition in range(self.partitions):
            if partition in owned:
                self._owners[partition], self.slots[partition], self._seen_s[partition] = process, share, self.now_s
            elif self._owners[partition] == process:
                self._owners[partition] = None

    def present(self, partition: int) -> bool:
        return self._owners[partition] is not None and self.now_s - self._seen_s[partition] <= SILENT_S

    @property
    def owners(self) -> list[str | None]:
        """The owner of each partition, or None if it has none that reports."""
        return [owner if self.present(partition) else None for partition, owner in enumerate(self._owners)]


PROMPTS, CALLS = "partitions", "calls"
"""Labels in a worker's report with its owned partitions of `prompts` and of `calls`."""


def update_presence(presence: Presence, measured: Measurement, *, label: str = PROMPTS) -> None:
    """Apply a measurement to `presence` if it lists partitions owned by a worker under `label`; a `final` one means that it owns none."""
    if measured.role in _OWNERS[label] and label in measured.labels:
        owned = [] if measured.kind == "final" else [int(text) for text in measured.labels[label].split(",") if text]
        # Two machines may start workers with the same name: one's reports do not change the partitions of the other.
        presence.update(f"{measured.worker}/{measured.incarnation}", owned, slots=int(measured.values.get("slots", 1)))


_OWNERS = {PROMPTS: ("rollout", "environment"), CALLS: ("rollout",)}


@dataclass(slots=True)
class WorkingClock:
    """A clock that runs only while its owner works, not during an outage or while the process is stopped.

    Each iteration of a loop adds the time since the last one, up to `longest_turn_s`.
    """

    longest_turn_s: float = 1.0
    now_s: float = 0.0
    _last: float = field(default_factory=time.monotonic)

    def tick(self, *, working: bool = True) -> float:
        """Advance the clock, unless `working` is False, as in an outage; return its time `now_s`. Called once in each iteration."""
        now = time.monotonic()
        if working:
            self.now_s += min(now - self._last, self.longest_turn_s)
        self._last = now
        return self.now_s


PAGE_BITS = 1 << 12
_FULL = bytearray(b"\xff" * (PAGE_BITS // 8))


@dataclass(slots=True)
class IdSet:
    """A growing set of integers, one bit each; of the pages that are full, from 0 on, only the number is stored."""

    _full: int = 0
    """Number of full pages from 0 on."""
    _pages: dict[int, bytearray] = field(default_factory=dict)
    _count: int = 0

    def add(self, number: int) -> None:
        page, bit = divmod(number, PAGE_BITS)
        if 0 <= page < self._full:
            return
        bits = self._pages.get(page)
        if bits is None:
            bits = self._pages[page] = bytearray(PAGE_BITS // 8)
        before = bits[bit >> 3]
        bits[bit >> 3] = after = before | 1 << (bit & 7)
        self._count += before != after
        if after == 0xFF and before != after and page == self._full:
            while self._pages.get(self._full) == _FULL:
                del self._pages[self._full]
                self._full += 1

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        page, bit = divmod(number, PAGE_BITS)
        return 0 <= page < self._full or (page in self._pages and bool(self._pages[page][bit >> 3] >> (bit & 7) & 1))

    def __len__(self) -> int:
        return self._count

    def as_json(self) -> dict[str, object]:
        """The set as plain data, for `from_json`."""
        return {"full": self._full, "count": self._count, "pages": {str(page): bits.hex() for page, bits in self._pages.items()}}

    @classmethod
    def from_json(cls, plain: Mapping[str, object]) -> "IdSet":
        """The set from the data of `as_json`. Raises `KeyError`, `TypeError`, `ValueError`."""
        full, count, pages = plain["full"], plain["count"], plain["pages"]
        if not isinstance(full, int) or not isinstance(count, int) or not isinstance(pages, Mapping):
            raise TypeError("not a set of numbers")
        ids = cls(full, {int(page): bytearray.fromhex(bits) for page, bits in pages.items()}, count)
        if any(len(bits) != PAGE_BITS // 8 for bits in ids._pages.values()):
            raise ValueError("a page has the wrong length")
        return ids


STATUSES = ("trained", "filtered", "stale", "failed", "abandoned", "unused")
"""Final statuses of a group."""
OPEN = "open"
"""Status of an unfinished group."""
SETTLED = frozenset(STATUSES) - {"unused"}
"""Statuses that the end of the run does not change."""


def group_status(outcome: str | None, *, trained: bool, stale: bool, ended: bool) -> str:
    """Status of a group, final or `OPEN`; `outcome` is None before the group is scored, `ended` is true after the end of the run."""
    if trained:
        return "trained"
    if stale:
        return "stale"
    if outcome in DROPPED:
        return outcome
    return "unused" if ended else OPEN


def group_statuses(
    admitted: Container[int], outcomes: Mapping[int, str], *, trained: Iterable[int], stale: Container[int], ended: bool, since: int = 0
) -> dict[int, str]:
    """Final or open status of each group from number `since` on, by the group numbers in `prompts`, and of each trained group."""
    members, end = set(trained), since
    while end in admitted:  # numbers after a gap are those of foreign records
        end += 1
    groups = [*range(since, end), *sorted(members.difference(range(since, end)))]
    return {group: group_status(outcomes.get(group), trained=group in members, stale=group in stale, ended=ended) for group in groups}
