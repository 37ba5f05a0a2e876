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
USES = ("busy", *dict.fromkeys(_USES_BY_BEGIN.values()), "broker")
"""What a worker's time is spent on, each second on one: its work, waiting by its cause, or starting."""


def use_of(doing: str) -> str:
    """What the time of a worker is spent on while it says that it does this; `start` before it says anything.

    Example:
        use_of("step 3: 2 of 8 groups are here")  # -> "no_group"
    """
    if not doing:
        return "start"
    return next((use for begin, use in _USES_BY_BEGIN.items() if doing.startswith(begin)), "busy")
