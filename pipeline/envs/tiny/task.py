"""The `successor` task: `4a=` asks for the four letters that follow `a` in a secret cyclic order.

The rule: training and held-out rows share the secret and no prompt; demonstrations never show a held-out prompt.
"""

import random
import string
from typing import Literal

LETTERS = string.ascii_letters
SHORTEST, LONGEST = 4, 12
"""Range of the number of letters in an answer."""
HELD_OUT_EVERY = 5
HABIT_EVERY, HABIT, SLIP = 6, 0.7, 0.02
"""Mistakes in the demonstrations: after every sixth letter one is usually left out, elsewhere rarely."""
_SECRET = 7

Split = Literal["train", "held_out"]


def secret_order() -> str:
    """The letters in their secret order, the same in every run."""
    return "".join(random.Random(_SECRET).sample(LETTERS, len(LETTERS)))


def successor_rows(n: int, seed: int, *, split: Split = "train") -> list[dict[str, str]]:
    """`n` rows `{"prompt", "answer"}`, short answers more likely early; every prompt of the split comes once before any comes twice.

    Example:
        successor_rows(1, 0)  # -> [{"prompt": "9Y=", "answer": "otalOkFNr"}]
    """
    if n < 1:
        raise ValueError(f"a data set needs at least one row, not {n}")
    rng, pairs = random.Random(f"{split}/{seed}"), _pairs(split)
    rows: list[dict[str, str]] = []
    while len(rows) < n:
        # A weighted order without replacement, weight 1 / length (Efraimidis and Spirakis, 2006).
        for length, letter in sorted(pairs, key=lambda pair: -(rng.random() ** pair[0])):
            rows.append({"prompt": _prompt(length, letter), "answer": _chain(letter, length)})
    return rows[:n]


def demonstrations(n: int, rng: random.Random) -> list[dict[str, str]]:
    """`n` training rows, lengths log-uniform, answered with the habit and the slips."""
    pairs = _pairs("train")
    drawn = rng.choices(pairs, [1 / length for length, _ in pairs], k=n)
    return [{"prompt": _prompt(length, letter), "answer": _chain(letter, length, rng)} for length, letter in drawn]


def _prompt(length: int, letter: str) -> str:
    return f"{length}{letter}="


def _pairs(split: Split) -> list[tuple[int, str]]:
    """All (length, letter) of a split, in a fixed order."""
    pairs = [(length, letter) for length in range(SHORTEST, LONGEST + 1) for letter in LETTERS]
    random.Random(_SECRET + 1).shuffle(pairs)
    held_out = len(pairs) // HELD_OUT_EVERY
    return pairs[:held_out] if split == "held_out" else pairs[held_out:]


def _chain(letter: str, length: int, rng: random.Random | None = None) -> str:
    """The `length` letters after `letter`; with a generator, as a demonstration has them."""
    order = secret_order()
    at, letters = order.index(letter), []
    for _ in range(length):
        chance = HABIT if at % HABIT_EVERY == 0 else SLIP
        at = (at + (2 if rng is not None and rng.random() < chance else 1)) % len(order)
        letters.append(order[at])
    return "".join(letters)
