"""The `successor` task: the prompt `4a=` requests the four characters after `a` in a secret cyclic order.

Training and held-out rows share the secret but no prompt; demonstrations never contain a held-out prompt.
"""

import random
import string
from typing import Literal

ALPHABET = string.ascii_letters
SHORTEST, LONGEST = 4, 12
HELD_OUT_EVERY = 5
HABIT_EVERY, HABIT, SLIP = 6, 0.7, 0.02
"""Mistakes in the demonstrations: after every sixth character one is usually skipped, elsewhere rarely."""
_SECRET = 7

Split = Literal["train", "held_out"]


def secret_order() -> str:
    """Return the alphabet in its secret order, the same in every run."""
    return "".join(random.Random(_SECRET).sample(ALPHABET, len(ALPHABET)))


def successor_rows(n: int, seed: int, *, split: Split = "train") -> list[dict[str, str]]:
    """Return `n` rows `{"prompt", "answer"}`, short answers more likely early; all prompts of the split occur before one repeats.

    Example:
        successor_rows(1, 0)  # -> [{"prompt": "9Y=", "answer": "otalOkFNr"}]
    """
    if n < 1:
        raise ValueError(f"a data set needs at least one row, not {n}")
    rng, pairs = random.Random(f"{split}/{seed}"), _pairs(split)
    rows: list[dict[str, str]] = []
    while len(rows) < n:
        # A weighted order without replacement, weight 1 / length (Efraimidis and Spirakis, 2006).
        for length, start in sorted(pairs, key=lambda pair: -(rng.random() ** pair[0])):
            rows.append({"prompt": _prompt(length, start), "answer": _chain(start, length)})
    return rows[:n]


def demonstrations(n: int, rng: random.Random) -> list[dict[str, str]]:
    """Return `n` training rows of log-uniform length, completed with the habit and the slips."""
    pairs = _pairs("train")
    sampled = rng.choices(pairs, [1 / length for length, _ in pairs], k=n)
    return [{"prompt": _prompt(length, start), "answer": _chain(start, length, rng)} for length, start in sampled]


def _prompt(length: int, start: str) -> str:
    return f"{length}{start}="


def _pairs(split: Split) -> list[tuple[int, str]]:
    """Return the (length, first character) pairs of a split."""
    pairs = [(length, start) for length in range(SHORTEST, LONGEST + 1) for start in ALPHABET]
    random.Random(_SECRET + 1).shuffle(pairs)
    held_out = len(pairs) // HELD_OUT_EVERY
    return pairs[:held_out] if split == "held_out" else pairs[held_out:]


def _chain(start: str, length: int, rng: random.Random | None = None) -> str:
    """Return the `length` characters after `start`; with a generator, with the mistakes of a demonstration."""
    order = secret_order()
    index, characters = order.index(start), []
    for _ in range(length):
        chance = HABIT if index % HABIT_EVERY == 0 else SLIP
        index = (index + (2 if rng is not None and rng.random() < chance else 1)) % len(order)
        characters.append(order[index])
    return "".join(characters)
