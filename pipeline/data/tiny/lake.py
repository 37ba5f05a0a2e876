"""The frozen lake: a 4x4 map per seed; walk from the upper left to the lower right without falling into a hole, in at most ten turns.

Rules and probabilities of maps are those of Gymnasium's FrozenLake-v1, not slippery. An observation lists the safe moves, then row and
column: `DR00:`. An action is one of L, D, R, U. A map depends on its seed alone.
"""

import random
from collections import deque
from typing import Literal

SIZE, FROZEN, TURNS = 4, 0.8, 10
MOVES = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
PROMPT = "lake "
HELD_OUT = 10**8
"""First seed of held-out maps."""
ASTRAY = 0.2
HABIT, HABIT_AT = 0.65, ((1, 2), (2, 1))
"""Probability and cells, halfway, of a wrong habit in the demonstrations: up or, next to a hole, left. Without it the most likely
completion is a good walk before any training, and greedy success cannot improve."""

Cell = tuple[int, int]


class Lake:
    """One episode on the frozen lake; the reward is 1 at the goal, otherwise 0."""

    def reset(self, *, seed: int) -> str:
        self.holes, self.cell, self.turns = holes_of(seed), (0, 0), 0
        return self._observation()

    def step(self, action: str) -> tuple[str, float, bool]:
        """Move, and return (observation, reward, True at the end); an invalid move ends the episode."""
        self.turns += 1
        if action not in MOVES:
            return "!", 0.0, True
        self.cell = _moved(self.cell, action)
        if self.cell in self.holes:
            return "x", 0.0, True
        if self.cell == (SIZE - 1, SIZE - 1):
            return "=", 1.0, True
        return self._observation(), 0.0, self.turns >= TURNS

    def _observation(self) -> str:
        moves = [move for move in MOVES if (to := _moved(self.cell, move)) != self.cell and to not in self.holes]
        return f"{''.join(moves)}{self.cell[0]}{self.cell[1]}:"


def holes_of(seed: int) -> frozenset[Cell]:
    """Return the holes of a seed's map, from which the goal can be reached."""
    rng = random.Random(seed)
    cells = [(row, column) for row in range(SIZE) for column in range(SIZE)]
    while True:
        holes = frozenset(cell for cell in cells[1:-1] if rng.random() >= FROZEN)
        if (0, 0) in distances(holes):
            return holes


def distances(holes: frozenset[Cell]) -> dict[Cell, int]:
    """Return cell -> number of steps to the goal, for each cell that can reach it."""
    goal = (SIZE - 1, SIZE - 1)
    steps, pending = {goal: 0}, deque([goal])
    while pending:
        cell = pending.popleft()
        for move in MOVES:
            to = _moved(cell, move)
            if to not in steps and to not in holes:
                steps[to] = steps[cell] + 1
                pending.append(to)
    return steps


def lake_rows(n: int, seed: int, *, split: Literal["train", "held_out"] = "train") -> list[dict[str, str | int]]:
    """Return `n` rows `{"prompt", "seed", "answer"}`, one map each; held-out maps are the same in every run."""
    first = HELD_OUT if split == "held_out" else 1 + seed % 1000 * 10**5
    return [{"prompt": PROMPT, "seed": first + number, "answer": ""} for number in range(n)]


def demonstration(rng: random.Random) -> list[tuple[str, bool]]:
    """Return the texts of one episode, each with True if it is an action: shortest paths with random steps and the habit."""
    lake = Lake()
    seed = rng.randrange(HELD_OUT)
    texts, ended = [(PROMPT, False), (lake.reset(seed=seed), False)], False
    steps = distances(lake.holes)
    while not ended:
        nearer = [move for move in MOVES if steps.get(_moved(lake.cell, move), SIZE**2) < steps[lake.cell]]
        back = [move for move in "UL" if _moved(lake.cell, move) not in lake.holes]
        if lake.cell in HABIT_AT and back and rng.random() < HABIT:
            action = back[0]
        else:
            action = rng.choice("LDRU") if rng.random() < ASTRAY else rng.choice(nearer)
        text, _, ended = lake.step(action)
        texts += [(action, True), (text, False)]
    return texts[:-1]


def _moved(cell: Cell, move: str) -> Cell:
    row, column = cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]
    return (row, column) if 0 <= row < SIZE and 0 <= column < SIZE else cell
