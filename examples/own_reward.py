"""An own reward, in TRL's shape: `reward.functions = ["own_reward.py:prefix"]`."""

from typing import Any


def prefix(completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
    """Share of the reference answer that the completion matches before its first mistake; None without a reference answer."""
    return [_share(completion.strip(), str(gold)) if gold else None for completion, gold in zip(completions, answer, strict=True)]


def _share(completion: str, gold: str) -> float:
    right = 0
    while right < min(len(completion), len(gold)) and completion[right] == gold[right]:
        right += 1
    return right / max(len(completion), len(gold))
