"""The learning rate of a step, from the step's number alone: a resumed run needs no scheduler state."""

import math

LR_SCHEDULES = ("constant", "linear", "cosine")


def learning_rate(step: int, *, lr: float, schedule: str = "constant", warmup_steps: int = 0, total_steps: int = 0) -> float:
    """The rate of optimizer step `step` (the first is 0): linear warm-up, then constant, or falling to 0 at `total_steps`.

    Example:
        learning_rate(0, lr=1.0, warmup_steps=2)                     # -> 0.5
        learning_rate(5, lr=1.0, schedule="linear", total_steps=10)  # -> 0.5
    """
    if schedule not in LR_SCHEDULES:
        raise ValueError(f"unknown learning-rate schedule {schedule!r}: choose one of {', '.join(LR_SCHEDULES)}")
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    if total_steps <= warmup_steps:
        raise ValueError(f"a {schedule} learning-rate schedule needs total_steps above warmup_steps = {warmup_steps}, not {total_steps}")
    done = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    return lr * (1.0 - done) if schedule == "linear" else lr * 0.5 * (1.0 + math.cos(math.pi * done))
