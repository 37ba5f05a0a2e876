"""An own data set, a function that returns dicts: `data.source = "own_dataset.py:capitals?longest=8"`."""

from collections.abc import Iterator
from itertools import islice

from penstock.pipeline.data.tiny import successor_rows


def capitals(*, seed: int = 0, size: int = 256, split: str = "train", longest: int = 12) -> Iterator[dict[str, str]]:
    """`size` questions of the demo for the letters after a capital one, at most `longest` of them; equal for equal seed and split."""
    rows = successor_rows(20 * size, seed, split="train" if split == "train" else "held_out")
    return islice((row for row in rows if row["prompt"][-2].isupper() and len(row["answer"]) <= longest), size)
