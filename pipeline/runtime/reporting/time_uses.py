"""What a worker's time is spent on, by what it says it does. The rule: each second has one use."""

from collections.abc import Mapping

_USES_BY_BEGIN: Mapping[str, str] = {
    "waiting for prompts": "no_prompts",
    "waiting for calls": "no_prompts",
    "waiting for samples": "no_samples",
    "waiting for version": "no_weights",
    "waiting for a version": "no_weights",
    "loading version": "no_weights",
    "waiting for new weights": "full_window",
    "waiting for a rollout worker": "no_room",
    "waiting for the device": "no_device",
    "handing the device over": "no_device",
    "group ": "no_room",
    "step ": "no_group",
    "writing": "save",
    "loading": "start",
    "reading": "start",
    "repeating": "start",
    "all prompts": "done",
    "done": "done",
}
"""The beginning of what a worker says it does -> what its time is spent on; anything else is work."""
USES = ("busy", *dict.fromkeys(_USES_BY_BEGIN.values()), "broker", "suspended")
"""What a worker's time is spent on, each second on one: its work, waiting by its cause, starting, or nothing as its process stood still."""
OUTSIDE = ("start", "done", "suspended")
"""Uses that are no part of the time in which a worker could work."""
TRAINER_WAITS = ("no_group", "no_device")
"""Uses of the trainer's time that count as waiting, for every report."""
_IN_TURNS = frozenset({"no_prompts", "no_samples", "no_group", "full_window", "no_room"})
"""Waiting in a loop that counts its time every second; the other uses may count it once after minutes."""
SUSPENDED_S = 60.0
"""A loop that has not turned for so long was suspended with its process."""
TURN_S = 1.0
"""Seconds of a suspension that may have been waiting."""


def use_of(doing: str) -> str:
    """What the time of a worker is spent on while it says that it does this; `start` before it says anything.

    Example:
        use_of("step 3: 2 of 8 groups are here")  # -> "no_group"
    """
    if not doing:
        return "start"
    return next((use for begin, use in _USES_BY_BEGIN.items() if doing.startswith(begin)), "busy")


def split(use: str, seconds: float) -> dict[str, float]:
    """Use -> its part of the seconds since the time was counted last: a loop that stood still for a minute did not wait meanwhile.

    Example:
        split("no_group", 75.0)  # -> {"no_group": 1.0, "suspended": 74.0}
    """
    if use not in _IN_TURNS or seconds <= SUSPENDED_S:
        return {use: seconds}
    return {use: TURN_S, "suspended": seconds - TURN_S}
