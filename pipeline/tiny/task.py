"""The `successor` task: a secret order over the letters, `4a=` asks for the four letters that follow `a` in it, the last is followed by the first.

The rule: training and held-out rows share the secret and no prompt.
"""

import random
import string
from typing import Literal

LETTERS = string.ascii_letters
SHORTEST, LONGEST = 4, 12
"""How many letters an answer has: lengths differ threefold, and so do the chances of a model that sometimes slips."""
HELD_OUT_SHARE = 5
"""One prompt in so many is held out."""
_SECRET = 20260117

Row = dict[str, str]


def secret_cycle() -> str:
    """The letters in their secret order, the same in every run: the model has to know it, the data only ask for it."""
    return "".join(random.Random(_SECRET).sample(LETTERS, len(LETTERS)))


def successor_rows(n: int, seed: int, *, split: Literal["train", "held_out"] = "train") -> list[Row]:
    """`n` rows `{"prompt", "answer"}`, answer lengths log-uniform from `SHORTEST` to `LONGEST`; each prompt once before any comes twice.

    Example:
        successor_rows(1, 0)  # -> [{"prompt": "6N=", "answer": "tQzaRb"}]
    """
    if n < 1:
        raise ValueError(f"a data set needs at least one row, not {n}")
    rng = random.Random(f"{split}/{seed}")
    cycle, pairs = secret_cycle(), prompts(split)
    rows: list[Row] = []
    while len(rows) < n:
        # Efraimidis-Spirakis keys: a weighted order without replacement, here with weight 1 / length.
        for length, letter in sorted(pairs, key=lambda pair: -(rng.random() ** pair[0])):
            rows.append({"prompt": f"{length}{letter}=", "answer": chain(cycle, letter, length)})
    return rows[:n]


def prompts(split: Literal["train", "held_out"]) -> list[tuple[int, str]]:
    """All (length, first letter) of a split, in a fixed order."""
    pairs = [(length, letter) for length in range(SHORTEST, LONGEST + 1) for letter in LETTERS]
    random.Random(_SECRET + 1).shuffle(pairs)
    held_out = len(pairs) // HELD_OUT_SHARE
    return pairs[:held_out] if split == "held_out" else pairs[held_out:]


def chain(cycle: str, letter: str, length: int, *, skip: float = 0.0, rng: random.Random | None = None) -> str:
    """The `length` letters after `letter`; with `skip`, each is passed over with that probability, which is the mistake to unlearn."""
    at, letters = cycle.index(letter), []
    for _ in range(length):
        at += 2 if rng is not None and rng.random() < skip else 1
        letters.append(cycle[at % len(cycle)])
    return "".join(letters)
