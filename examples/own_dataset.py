"""An own data set, a function that returns dicts: `data.source = "own_dataset.py:sums?largest=20"`."""

import random
from collections.abc import Iterator


def sums(*, seed: int = 0, size: int = 256, split: str = "train", largest: int = 9) -> Iterator[dict[str, str | int]]:
    """`size` additions of two numbers up to `largest`, the same ones for the same seed and split."""
    draw = random.Random(f"{split}/{seed}")
    for _ in range(size):
        first, second = draw.randint(0, largest), draw.randint(0, largest)
        yield {"prompt": f"{first}+{second}=", "answer": str(first + second), "largest": largest}
