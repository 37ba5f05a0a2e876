"""Sums in words, and their reward: the task of `smollm2.toml`."""

import random
import re
from typing import Any

LARGEST = 20


def sums(*, seed: int = 0, split: str = "train") -> list[dict[str, str]]:
    """All sums of two numbers from 1 to 20, half of them in `train`, the other half in any other split; equal for equal seed."""
    pairs = [(first, second) for first in range(1, LARGEST + 1) for second in range(1, LARGEST + 1)]
    random.Random(seed).shuffle(pairs)
    half = len(pairs) // 2
    return [
        {"prompt": f"What is {first} plus {second}? Answer with the number only.", "answer": str(first + second)}
        for first, second in (pairs[:half] if split == "train" else pairs[half:])
    ]


def last_number(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 if the last number of a completion is the answer: "12 + 3 = 15" counts like "15"."""
    return [
        float((re.findall(r"\d+", _text(completion)) or [""])[-1] == gold) for completion, gold in zip(completions, answer, strict=True)
    ]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]
