"""Uses of a worker's time: every second has one."""

from collections.abc import Mapping

from penstock.topics.metrics import Activity

_COUNTED_AS: Mapping[Activity, Activity] = {
    Activity.COMPUTE: Activity.BUSY,
    Activity.STOP: Activity.BUSY,
    Activity.NO_CALLS: Activity.NO_PROMPTS,
    Activity.LOAD: Activity.NO_WEIGHTS,
}
"""Activities whose seconds are counted under another one."""
NO_ACTIVITY = ("broker", "suspended")
"""Uses that no worker reports: an unreachable broker, and a suspended process."""
USES = (*(activity.value for activity in Activity if activity not in _COUNTED_AS), *NO_ACTIVITY)
OUTSIDE = ("start", "done", "suspended")
"""Uses outside the time in which a worker could work."""
TRAINER_WAITS = ("no_group", "no_device")
"""Uses of the trainer's time that count as waiting, in every report."""
_COUNTED_EACH_SECOND = frozenset({"no_prompts", "no_samples", "no_group", "full_window", "no_room"})
"""Uses in a loop that counts its time every second; the others may count it after minutes."""
SUSPENDED_S = 60.0
"""A loop without an iteration for this long was suspended with its process."""
TURN_S = 1.0
"""Seconds of a suspension that may have been waiting."""


def use_of(activity: Activity) -> str:
    """The use under which the seconds of an activity are counted.

    Example:
        use_of(Activity.LOAD)  # -> "no_weights"
    """
    return _COUNTED_AS.get(activity, activity).value


def kind_of(use: str) -> str:
    """The kind of a use: `work`, `wait` or `load`.

    Example:
        kind_of("broker")  # -> "wait"
    """
    return "wait" if use in NO_ACTIVITY else Activity(use).kind


def split(use: str, seconds: float) -> dict[str, float]:
    """Use -> its part of the seconds since the last count; a waiting loop that stood still for over a minute was suspended.

    Example:
        split("no_group", 75.0)  # -> {"no_group": 1.0, "suspended": 74.0}
    """
    if use not in _COUNTED_EACH_SECOND or seconds <= SUSPENDED_S:
        return {use: seconds}
    return {use: TURN_S, "suspended": seconds - TURN_S}
